"""Weights dealt to sums of 16 bits: none is lost, none can overflow."""
import numpy as np
import pytest

from engines.backends.llvm.dealing import LARGEST, WINDOW, deal, window_starts

LANES = 8


def weights_of(kind, shape):
    random = np.random.default_rng(0)
    values = {"tame": random.normal(0, 25, shape), "wild": random.normal(0, 60, shape),
              "lowest": np.full(shape, -128), "zero": np.zeros(shape)}[kind]
    return values.clip(-128, 127).astype(np.int8)


def products(dealt, panel, x):
    """What the turns of a panel make of the bytes x, as the machine does it; [lane]."""
    total = np.zeros(LANES, np.int64)
    for turn in range(*dealt.starts[panel:panel + 2]):
        picks, weights = dealt.turns[turn, :2].astype(int), dealt.turns[turn, 2:].view(np.int8).astype(np.int64)
        taken = x[dealt.offsets[turn] + picks] * weights                        # [vector, lane, byte]
        sums = taken.reshape(2, LANES, 2, 2).sum(-1).sum(0)                     # [lane, sum]
        assert (np.abs(sums) < 1 << 15).all()
        total += sums.sum(-1)
    return total


@pytest.mark.parametrize("kind", ["tame", "wild", "lowest", "zero"])
@pytest.mark.parametrize("length", [3, 16, 21, 40])
def test_dealt_weights_make_the_same_sums_and_none_leaves_16_bits(kind, length):
    weights = weights_of(kind, (2, LANES, 3, length))
    offsets = np.arange(3) * 100
    dealt = deal(weights, offsets)
    x = np.random.default_rng(1).integers(0, 256, 300 + WINDOW)
    for panel in range(2):
        expected = sum(weights[panel, :, run].astype(np.int64) @ x[at:at + length] for run, at in enumerate(offsets))
        np.testing.assert_array_equal(products(dealt, panel, x), expected)
        products(dealt, panel, np.full_like(x, 255))


def test_a_sum_of_the_largest_bytes_and_weights_just_fits():
    assert 255 * LARGEST < 1 << 15 <= 255 * (LARGEST + 1)


def test_only_hard_windows_take_more_than_two_turns():
    counts = {kind: len(deal(weights_of(kind, (4, LANES, 1, 1024)), np.zeros(1, int)).offsets) for kind in
              ("tame", "wild", "lowest")}
    windows = 4 * 1024 // WINDOW
    assert 2 * windows <= counts["tame"] < 2.05 * windows < counts["wild"] < counts["lowest"] == 8 * windows


def test_windows_cover_a_run_and_stay_inside_it():
    assert [window_starts(n) for n in (5, 16, 17, 48)] == [[0], [0], [0, 1], [0, 16, 32]]
