"""The kernels that measure a core's peaks: that they do what they are measured for, and nothing else."""
from __future__ import annotations

import re

import numpy as np
import pytest

from engines.backends.llvm.codegen.ir_builder import Module
from engines.backends.llvm.codegen.isa import AVX2, AVX512_BF16, AVX512_VNNI, AVX_VNNI, Isa, best_isa
from engines.backends.llvm.kernels.common.arithmetic import arithmetic_for
from engines.backends.llvm.tuning import peaks
from engines.backends.llvm.tuning.tuner import aligned
from tests.engines.backends.llvm.jit import LoadedKernel, assembly, host_features, spills

# The instructions of CHAINS products
PRODUCTS = [(AVX512_VNNI, "int8", "vpdpbusd", 1), (AVX_VNNI, "int8", "vpdpbusd", 1), (AVX2, "int8", "vpmaddwd", 2),
            (AVX512_BF16, "bf16", "vdpbf16ps", 1), (AVX2, "fp32", r"vfmadd\w+ps", 1),
            (AVX512_BF16, "fp32", r"vfmadd\w+ps", 1)]
ISA = best_isa(host_features())


def loop_of_products(isa: Isa, precision: str) -> str:
    """The assembly of the loop's body."""
    module = Module()
    peaks.emit_products(module, "products", isa, arithmetic_for(precision, isa))
    text = assembly(module.text(), isa)
    assert not spills(text)
    first, last = text.index("#APP"), text.rindex("#NO_APP")        # comments that LLVM puts around inline assembly
    return text[first:text.index("\tjb", last)]


@pytest.mark.parametrize(("isa", "precision", "instruction", "each"), PRODUCTS)
def test_the_loop_of_products_multiplies_every_time_and_loads_nothing(isa: Isa, precision: str, instruction: str,
                                                                      each: int) -> None:
    body = loop_of_products(isa, precision)
    assert len(re.findall(rf"\s{instruction}\b", body)) == each * peaks.CHAINS
    assert not re.search(r"\(%r", body)


def test_the_reads_see_every_byte_of_their_columns_and_none_past_them() -> None:
    module = Module()
    peaks.emit_reads(module, "reads", ISA)
    kernel, step = LoadedKernel(module.text(), "reads", ISA), peaks.STREAMS * ISA.bytes
    result = aligned(np.zeros(step, np.uint8))
    for position in (0, step - 1, 2 * step + 5, 3 * step - 1, 3 * step):
        memory = aligned(np.zeros(4 * step, np.uint8))
        memory[position] = 1
        kernel([memory, result], (0, 2), (0, 3 * step))
        assert result.any() == (position < 3 * step)


def test_this_machine_has_peaks_of_every_arithmetic_and_level() -> None:
    found = peaks.measure_peaks()
    assert set(found.macs_per_second) == {"int8", "fp32", "bf16", "fp16"}
    assert all(rate > 0 for rate in found.macs_per_second.values())
    assert all(level.bytes_per_second > 0 for level in found.levels)
    assert found.level(1e18).name == "DRAM" and found.level(1) == found.levels[0]
