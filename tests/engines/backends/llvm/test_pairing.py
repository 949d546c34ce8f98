"""Pairing of weights for 16-bit sums: no weight is lost, and no sum overflows."""
import numpy as np
import pytest

from infer_server.engines.backends.llvm.kernels.contraction.pairing import LARGEST, STEP, WINDOW, pair, window_starts

LANES = 16


def weights_of(kind, shape):
    random = np.random.default_rng(0)
    values = {"tame": random.normal(0, 25, shape), "wild": random.normal(0, 60, shape),
              "lowest": np.full(shape, -128), "zero": np.zeros(shape)}[kind]
    return values.clip(-128, 127).astype(np.int8)


def products(paired, panel, x):
    """Compute the products of a panel with the bytes x, in the steps of the instruction. Returns [lane]."""
    total = np.zeros(LANES, np.int64)
    for step in range(*paired.starts[panel:panel + 2]):
        offset, indices = paired.sources[step, 0], paired.sources[step, 1:].view(np.uint8)
        taken = x[offset + indices.astype(np.int64)]
        sums = (taken * paired.steps[step].astype(np.int64)).reshape(LANES, 2, 2).sum(-1)
        assert (np.abs(sums) < 1 << 15).all()
        total += sums.sum(-1)
    return total


def steps_of(weights):
    return len(pair(weights, np.zeros(1, int)).steps)


@pytest.mark.parametrize("kind", ["tame", "wild", "lowest", "zero"])
@pytest.mark.parametrize("length", [3, 16, 21, 40])
def test_paired_weights_make_the_same_sums_and_none_leaves_16_bits(kind, length):
    weights = weights_of(kind, (2, LANES, 3, length))
    offsets = np.arange(3) * 100
    paired = pair(weights, offsets)
    x = np.random.default_rng(1).integers(0, 256, 300 + WINDOW)
    for panel in range(2):
        expected = sum(weights[panel, :, run].astype(np.int64) @ x[at:at + length] for run, at in enumerate(offsets))
        np.testing.assert_array_equal(products(paired, panel, x), expected)
        products(paired, panel, np.full_like(x, 255))


def test_a_sum_of_the_largest_bytes_and_weights_just_fits():
    assert 255 * LARGEST < 1 << 15 <= 255 * (LARGEST + 1)


def test_only_hard_windows_take_more_steps_than_they_have_weights_for():
    fewest = 4 * 1024 // STEP
    counts = {kind: steps_of(weights_of(kind, (4, LANES, 1, 1024))) for kind in ("tame", "wild", "lowest")}
    assert counts["tame"] == fewest < counts["wild"] < counts["lowest"] == 2 * fewest


def test_weights_that_are_zero_in_all_channels_take_no_step():
    weights = weights_of("tame", (1, LANES, 1, 64))
    weights[..., 8:56] = 0
    assert steps_of(weights) == 16 // STEP
    assert steps_of(np.zeros_like(weights)) == 0


def test_an_element_that_fits_with_one_other_only_finds_it():
    """A greedy pairing that does not start with the elements of fewest partners leaves it alone."""
    weights = np.full((1, LANES, 1, WINDOW), 60, np.int8)
    weights[..., 3], weights[..., 12] = 100, 20
    assert steps_of(weights) == WINDOW // STEP


def test_windows_cover_a_run_and_stay_inside_it():
    assert [window_starts(n) for n in (5, 16, 17, 48)] == [[0], [0], [0, 1], [0, 16, 32]]
