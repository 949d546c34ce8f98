"""Weights and their places, kept in fewer bytes than kernels read, and made wider when a plan is loaded."""
import numpy as np
import pytest

from engines.backends.llvm.codegen.isa import AVX2, AVX512_VNNI, PORTABLE
from engines.backends.llvm.kernels.contraction.pair_offsets import FAR, STEPS, PairOffsets, shorten_places
from engines.backends.llvm.kernels.contraction.widen import Widen, widened
from engines.backends.llvm.kernels.kernel import ALIGNMENT
from tests.engines.backends.harness import EVERY_WIDTH, check


@EVERY_WIDTH
@pytest.mark.parametrize("bits", [16, 32])
def test_every_byte_becomes_the_same_number(isa, bits):
    every = np.arange(-128, 128, dtype=np.int8).reshape(-1, ALIGNMENT)
    spec = Widen(bits)
    assert spec.reference([every], {})[0].ravel().tolist() == list(range(-128, 128))
    check(spec, isa, [every], {}, pieces=3)


def test_weights_are_as_wide_as_the_machine_multiplies_them():
    assert [widened(isa) for isa in (AVX512_VNNI, AVX2, PORTABLE)] == [{}, {0: Widen(16)}, {0: Widen(32)}]


@EVERY_WIDTH
def test_places_of_paired_weights_are_made_of_half_as_many_bytes(isa):
    random = np.random.default_rng(0)
    picks = random.integers(0, 16, (5 * STEPS, 4), np.uint8)
    places = np.stack([random.integers(0, FAR, 5 * STEPS, np.int32), picks.view(np.int32)[:, 0]], -1)
    kept = shorten_places(places)
    assert kept.nbytes * 2 == places.nbytes
    np.testing.assert_array_equal(PairOffsets().reference([kept.reshape(5, -1)], {})[0].reshape(-1, 2), places)
    check(PairOffsets(), isa, [kept.reshape(5, -1)], {}, pieces=2)
