"""Weights stored in fewer bytes than kernels read, and widened when a plan is loaded."""
import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX2, AVX512_VNNI, PORTABLE
from infer_server.engines.backends.llvm.kernels.contraction.widen import Widen, widened
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT
from scripts.testing.suite import check
from tests.engines.backends.runners import EVERY_WIDTH


@EVERY_WIDTH
@pytest.mark.parametrize("bits", [16, 32])
def test_every_byte_becomes_the_same_number(runner, bits):
    every = np.arange(-128, 128, dtype=np.int8).reshape(-1, ALIGNMENT)
    spec = Widen(bits)
    assert spec.reference([every], {})[0].ravel().tolist() == list(range(-128, 128))
    check(spec, runner, [every], {}, pieces=3)


def test_weights_are_as_wide_as_the_machine_multiplies_them():
    assert [widened(isa) for isa in (AVX512_VNNI, AVX2, PORTABLE)] == [{}, {0: Widen(16)}, {0: Widen(32)}]
