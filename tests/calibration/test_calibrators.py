import numpy as np
import pytest

from infer_server.calibration.calibrators import CALIBRATORS, make_calibrator
from infer_server.calibration.calibrators.entropy import BINS, LEVELS, Entropy, divergences
from infer_server.calibration.calibrators.mse import squared_error
from infer_server.calibration.histogram import Histogram
from infer_server.engines.errors import ConfigError


def histogram_of(values):
    histogram = Histogram()
    histogram.observe(np.asarray(values, np.float32))
    return histogram


def relu_like(seed=0, outliers=30):
    """Return half zeros, half-normal values, and a few outliers."""
    rng = np.random.default_rng(seed)
    values = np.maximum(rng.standard_normal(200_000), 0)
    values[:outliers] = rng.uniform(10, 40, outliers)
    return values.astype(np.float32)


# ---- entropy
def s7310(bins, count_bin_0=False):
    """Return {m: divergence} by the pseudo-code of GTC talk S7310, with a loop for each of its lines."""
    bins = [float(b) for b in bins]
    if not count_bin_0:
        bins[0] = 0.0
    result = {}
    for m in range(128, len(bins) + 1):
        reference = bins[:m]
        p = list(reference)
        p[m - 1] += sum(bins[m:])
        q = [0.0] * m
        for level in range(128):
            members = [i for i in range(m) if i * 128 // m == level]
            filled = [i for i in members if reference[i] > 0]
            for i in filled:
                q[i] = sum(reference[j] for j in members) / len(filled)
        p_sum, q_sum = sum(p), sum(q)
        divergence = 0.0
        for i in range(m):
            if p[i] > 0:
                divergence += p[i] / p_sum * np.log((p[i] / p_sum) / (q[i] / q_sum if q[i] else 1e-12))
        result[m] = divergence
    return result


@pytest.mark.parametrize("seed", [0, 1])
def test_entropy_equals_a_literal_transcription_of_s7310(seed):
    rng = np.random.default_rng(seed)
    bins = np.histogram(np.abs(rng.standard_normal(3_000)), 300)[0].astype(np.float64)
    bins[rng.integers(0, 300, 40)] = 0                  # gaps, and outliers that meet empty bins
    expected = s7310(bins)
    np.testing.assert_allclose(divergences(bins), list(expected.values()), rtol=1e-9, atol=1e-12)
    assert LEVELS + np.argmin(divergences(bins)) == min(expected, key=expected.get)


def test_counting_bin_0_would_give_another_threshold():
    bins = histogram_of(relu_like(outliers=0)).magnitudes(400)
    with_zeros = s7310(bins, count_bin_0=True)
    assert LEVELS + np.argmin(divergences(bins)) != min(with_zeros, key=with_zeros.get)


def test_all_2048_bins_are_a_candidate_and_the_threshold_then_is_half_a_bin_beyond():
    """Public TensorRT caches have it: `prob: 3c010a14` is 2048.5 / 2048 / 127."""
    values = np.linspace(0, 1, 100_001)
    low, high = Entropy().range(histogram_of(values))
    assert low == 0.0
    assert high == 2048.5 / BINS


def test_entropy_clips_outliers_at_one_threshold_on_both_sides():
    rng = np.random.default_rng(3)
    values = rng.standard_normal(200_000)
    values[0] = 100.0
    low, high = Entropy().range(histogram_of(values))
    assert high < 10
    assert -high <= low == pytest.approx(values.min(), abs=0.5)


# ---- the others
def test_minmax_is_what_was_seen():
    assert make_calibrator("minmax").range(histogram_of([-1.5, 0.5, 7.0])) == (-1.5, 7.0)


def test_percentile_cuts_a_one_sided_tensor_at_the_top_only():
    values = relu_like(outliers=0)
    low, high = make_calibrator("percentile:99").range(histogram_of(values))
    assert low == 0.0
    assert high == pytest.approx(np.quantile(values, 0.99), rel=1e-3)


def test_percentile_cuts_a_signed_tensor_equally_at_both_ends():
    values = np.random.default_rng(4).standard_normal(100_000).astype(np.float32)
    low, high = make_calibrator("percentile:99").range(histogram_of(values))
    assert (low, high) == pytest.approx(tuple(np.quantile(values, [0.005, 0.995])), rel=1e-3)


def quantisation_error(values, low, high):
    scale = (high - low) / 255
    zero_point = np.rint(-low / scale)
    stored = np.clip(np.rint(values / scale) + zero_point, 0, 255)
    return float(((values - (stored - zero_point) * scale) ** 2).sum())


NEARLY_ALL_TINY = np.random.default_rng(7).standard_normal(100_000) * np.where(np.arange(100_000) % 1000, 0.005, 3)


@pytest.mark.parametrize("values", [
    relu_like(), np.random.default_rng(5).standard_normal(100_000), np.random.default_rng(6).laplace(0.5, 1, 100_000),
    NEARLY_ALL_TINY], ids=["relu", "normal", "laplace", "nearly all tiny"])
def test_the_error_that_mse_minimises_is_the_error_of_the_quantised_values(values):
    values = np.asarray(values, np.float64)
    histogram = histogram_of(values)
    for share in (0.1, 0.5, 1.0):
        low, high = histogram.low * share, histogram.high * share
        estimate = squared_error(histogram, np.array([low]), np.array([high]))[0]
        assert estimate == pytest.approx(quantisation_error(values, low, high), rel=0.05)


def test_mse_finds_a_range_no_worse_than_any_of_a_coarse_search():
    values = relu_like(outliers=5).astype(np.float64)
    low, high = make_calibrator("mse").range(histogram_of(values))
    found = quantisation_error(values, low, high)
    assert found < 0.9 * quantisation_error(values, 0.0, values.max())
    others = [quantisation_error(values, 0.0, values.max() * share) for share in np.linspace(0.05, 1, 20)]
    assert found <= 1.02 * min(others)


# ---- all of them
@pytest.mark.parametrize("name", CALIBRATORS)
def test_every_range_holds_zero_and_at_most_half_a_bin_more_than_was_seen(name):
    for values in (relu_like(), -relu_like(), np.float32([0.25]), np.float32([-3, 2]), np.float32([5, 6]),
                   np.random.default_rng(7).normal(-1, 0.1, 1000)):
        low, high = make_calibrator(name).range(histogram_of(values))
        slack = 0.5 / BINS * np.abs(values).max() + 1e-6
        assert min(values.min(), 0) - slack <= low <= 0.0 <= high <= max(values.max(), 0) + slack
        assert high > low


@pytest.mark.parametrize("name", CALIBRATORS)
def test_a_tensor_that_never_was_anything_but_zero_has_an_empty_range(name):
    assert make_calibrator(name).range(histogram_of(np.zeros(10))) == (0.0, 0.0)


def test_an_unknown_calibrator_is_answered_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match="did you mean 'entropy'"):
        make_calibrator("entrpy")


@pytest.mark.parametrize("text, complaint", [
    ("minmax:3", "has no parameter"), ("percentile:high", "not a number"), ("percentile:0.1", "above 50")])
def test_a_parameter_that_makes_no_sense_is_refused(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_calibrator(text)
