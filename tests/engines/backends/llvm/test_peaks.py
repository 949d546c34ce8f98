"""Kernels that measure peak rates contain only the instructions that they measure."""
from __future__ import annotations

import itertools
import re
import time

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import (
    AARCH64_DOTPROD,
    AVX2,
    AVX512_AMX_FP16,
    AVX512_BF16,
    AVX512_VNNI,
    AVX_VNNI,
    Isa,
    best_isa,
)
from infer_server.engines.backends.llvm.codegen.tiles import AMX, AMX_FP16
from infer_server.engines.backends.llvm.kernels.common.arithmetic import arithmetic_for
from infer_server.engines.backends.llvm.tuning import peaks
from infer_server.engines.backends.llvm.tuning.timing import aligned
from infer_server.engines.codegen.ir_builder import Module
from tests.engines.backends.llvm.jit import LoadedKernel, assembly, host_features, spills

# The instructions of CHAINS products
PRODUCTS = [(AVX2, "paired", "vpmaddubsw", 1), (AVX2, "paired", "vpmaddwd", 1), (AVX2, "int16", "vpmaddwd", 1),
            (AVX512_VNNI, "int8", "vpdpbusd", 1), (AVX_VNNI, "int8", "vpdpbusd", 1), (AVX2, "int8", "vpmaddwd", 2),
            (AVX512_BF16, "bf16", "vdpbf16ps", 1), (AVX2, "fp32", r"vfmadd\w+ps", 1),
            (AVX512_BF16, "fp32", r"vfmadd\w+ps", 1)]
ISA = best_isa(host_features())


def loop_of_products(isa: Isa, precision: str) -> str:
    """Return the assembly of the loop's body."""
    module = Module()
    arithmetic = peaks.PAIRED if precision == "paired" else arithmetic_for(precision, isa)
    peaks.emit_products(module, "products", isa, arithmetic)
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


@pytest.mark.parametrize("precision, instruction", AMX_FP16.products)
def test_the_loop_of_tile_products_has_four_chains_and_releases_the_registers(precision: str, instruction: str) -> None:
    module = Module()
    peaks.emit_tile_products(module, "products", AMX_FP16, precision)
    text = assembly(module.text(), AVX512_AMX_FP16)
    products = re.findall(rf"\s{instruction}\s+%tmm(\d), %tmm(\d), %tmm(\d)", text)
    assert sorted(sums for _, _, sums in products) == ["0", "1", "2", "3"] and len(set(products)) == 4
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1
    assert AMX.macs(1) == 2 * AMX.macs(2) == 16384


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


@pytest.mark.parametrize("isa", [AVX2, AARCH64_DOTPROD])
def test_the_chain_is_of_additions_of_registers_that_wait_for_each_other(isa: Isa) -> None:
    module = Module()
    peaks.emit_additions(module, "additions")
    text = assembly(module.text(), isa)
    x86 = re.findall(r"\saddq\s+%(\w+), %(\w+)", text)
    links = x86 or [(number, to) for to, of, number in re.findall(r"\sadd\s+(x\d+), (x\d+), (x\d+)", text) if to == of]
    assert links == links[:1] * peaks.ADDITIONS


def test_the_chain_adds_its_number_at_every_link() -> None:
    module = Module()
    peaks.emit_additions(module, "additions")
    number, total = aligned(np.array([3], np.int64)), aligned(np.zeros(1, np.int64))
    LoadedKernel(module.text(), "additions", ISA)([number, total], (2, 7))
    assert total[0] - total.ctypes.data == 3 * 5 * peaks.ADDITIONS


def test_rates_are_the_best_of_every_loop_by_the_clock_that_is_given() -> None:
    loops = [peaks._Loop(lambda: time.sleep(peaks.TURN_SECONDS), work) for work in (8, 6)]
    # Before and after each call that counts, which is one a turn.
    ticks = itertools.chain([0, 4, 0, 2], itertools.cycle([0, 3]))
    assert peaks._rates(loops, lambda: next(ticks)) == {loops[0]: 8 / 3, loops[1]: 6 / 2}


def test_this_machine_has_peaks_of_every_arithmetic_and_level_and_a_clock() -> None:
    found = peaks.measure_peaks()
    assert set(found.macs_per_second) == {"int8", "int16", "fp32", "bf16", "fp16"} and found.hertz
    assert all(rate > 0 for rate in found.macs_per_second.values())
    assert all(level.bytes_per_second > 0 for level in found.levels)
    assert found.level(1e18).name == "DRAM" and found.level(1) == found.levels[0]
