import numpy as np
import pytest

from infer_server.calibration.histogram import BINS_PER_SIDE, Histogram
from infer_server.engines.errors import CalibrationError


def observed(*arrays):
    histogram = Histogram()
    for array in arrays:
        histogram.observe(np.asarray(array, np.float32))
    return histogram


@pytest.fixture
def heavy_tailed():
    """Return values over eight orders of magnitude, so that the range doubles many times."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal(20_000) * 10.0 ** rng.uniform(-5, 3, 20_000)).astype(np.float32)


def test_neither_order_nor_batch_size_can_be_seen_in_the_counts(heavy_tailed):
    whole = observed(heavy_tailed)
    for parts in (np.array_split(heavy_tailed, 7), np.array_split(np.sort(heavy_tailed), 100),
                  np.array_split(np.sort(heavy_tailed)[::-1], 3)):
        other = observed(*parts)
        np.testing.assert_array_equal(other.counts, whole.counts)
        assert (other.exponent, other.low, other.high) == (whole.exponent, whole.low, whole.high)


def test_zeros_that_come_first_do_not_fix_the_range():
    tiny = np.float32([1e-9, 3e-9, -2e-9])
    np.testing.assert_array_equal(observed([0, 0], tiny).counts, observed(tiny, [0, 0]).counts)
    assert observed([0, 0], tiny).exponent < -20


def test_counts_are_those_of_numpy_on_the_same_grid(heavy_tailed):
    histogram = observed(*np.array_split(heavy_tailed, 5))
    expected, _ = np.histogram(heavy_tailed.astype(np.float64), histogram.edges)
    np.testing.assert_array_equal(histogram.counts, expected)


def test_quantiles_are_within_a_bin_of_the_exact_ones():
    values = np.random.default_rng(1).normal(0.3, 1.0, 50_000).astype(np.float32)
    histogram = observed(values)
    width = histogram.edges[1] - histogram.edges[0]
    for fraction in (0.0001, 0.01, 0.5, 0.99, 0.9999):
        exact = np.quantile(values, fraction, method="lower"), np.quantile(values, fraction, method="higher")
        assert exact[0] - width <= histogram.quantile(fraction) <= exact[1] + width


def test_magnitudes_equal_numpy_where_the_grids_coincide():
    values = np.random.default_rng(2).uniform(-1, 1, 10_000).astype(np.float32)
    values[0] = np.nextafter(np.float32(1), np.float32(0))     # the grid's range is then amax, but for a rounding
    magnitudes = observed(values).magnitudes(2048)
    expected, _ = np.histogram(np.abs(values), 2048, (0.0, 1.0))
    np.testing.assert_allclose(magnitudes, expected, atol=0.01)


def test_magnitudes_keep_every_value_for_any_range(heavy_tailed):
    histogram = observed(heavy_tailed * np.float32(1.37))
    magnitudes = histogram.magnitudes(2048)
    assert magnitudes.sum() == pytest.approx(heavy_tailed.size)
    assert (magnitudes >= 0).all() and magnitudes[-1] >= 1 - 1e-9


def test_zero_belongs_to_the_range_of_a_tensor_that_never_is_zero():
    assert observed([3, 5]).low == 0.0
    assert observed([-3, -5]).high == 0.0


def test_a_power_of_two_is_inside_its_range():
    histogram = observed([1.0, -1.0])
    assert histogram.counts.sum() == 2
    assert histogram.counts[BINS_PER_SIDE + BINS_PER_SIDE // 2] == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    with pytest.raises(CalibrationError, match="1 of 3 values are not finite"):
        observed([1.0, bad, 2.0])


def test_an_empty_array_changes_nothing():
    assert observed(np.zeros((0, 4))).count == 0


def test_merged_histograms_equal_one_of_all_values():
    random = np.random.default_rng(5)
    parts = [random.standard_normal(1000).astype(np.float32) * scale for scale in (0.1, 30.0)]
    whole, halves = Histogram(), [Histogram(), Histogram()]
    for part, half in zip(parts, halves, strict=True):
        whole.observe(part)
        half.observe(part)
    for merged in (halves[0].merged(halves[1]), halves[1].merged(halves[0])):
        np.testing.assert_array_equal(merged.counts, whole.counts)
        assert (merged.exponent, merged.count, merged.low, merged.high) == (
            whole.exponent, whole.count, whole.low, whole.high)
    empty = halves[0].merged(Histogram())
    np.testing.assert_array_equal(empty.counts, halves[0].counts)
    assert halves[0].count == 1000 and empty.exponent == halves[0].exponent
