"""Kernels as assembly text, and as functions of this process, native or emulated (emulation.py)."""
from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numpy.typing import NDArray

from infer_server.engines.backends.llvm.codegen.compile import OPT, compile_cached, object_key, target_machine
from infer_server.engines.backends.llvm.codegen.isa import (
    AVX2,
    AVX512_AMX,
    AVX512_AMX_FP16,
    AVX512_BF16,
    AVX512_VNNI,
    AVX_VNNI,
    Isa,
)
from infer_server.engines.backends.llvm.runtime.abi import KERNEL
from infer_server.engines.backends.llvm.runtime.elf import LoadedCode
from infer_server.engines.machine import object_cache
from infer_server.engines.machine.tiles import permitted

# LLVM's name of a feature -> the name in /proc/cpuinfo, where they differ
_CPUINFO = {"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16", "avxvnni": "avx_vnni",
            "neon": "asimd", "dotprod": "asimddp", "amx-tile": "amx_tile", "amx-int8": "amx_int8",
            "amx-bf16": "amx_bf16", "amx-fp16": "amx_fp16"}
# Instruction set -> the one for which LLVM makes the same code of a text without the instructions that only it has, and
# what such instructions contain.
_OF_VNNI = re.compile(r"llvm\.x86\.(?!avx2\.pack)|bfloat")
_OF_TILES = re.compile(r"llvm\.x86\.(?:ldtile|tile|tdp)|bfloat|bf16")
PLAINER = {AVX_VNNI.name: (AVX2, _OF_VNNI), **dict.fromkeys(
    (AVX512_BF16.name, AVX512_AMX.name, AVX512_AMX_FP16.name), (AVX512_VNNI, _OF_TILES))}


@cache
def host_features() -> frozenset[str]:
    """Return the features that this process may use, by the names of Isa.requires."""
    found = llvm.get_host_cpu_features()
    return permitted(frozenset(_CPUINFO.get(name, name) for name, has in found.items() if has))[0]


def runs_here(isa: Isa) -> bool:
    """Return True if this machine executes the instruction set."""
    return isa.requires <= host_features()


def plainer(ir: str, isa: Isa) -> Isa:
    """Return the instruction set to compile a text for, so that equal texts for several are compiled once."""
    other, own = PLAINER.get(isa.name, (isa, None))
    return isa if own and own.search(ir) else other


def _machine(ir: str, isa: Isa, emulate: bool) -> tuple[str, str, str]:
    """Return LLVM's triple, CPU and features for a text of an instruction set.

    Emulated code calls only emulated intrinsics, so it is compiled for this machine.
    """
    if emulate:
        return "", llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    isa = plainer(ir, isa)
    return isa.triple, isa.cpu, isa.features


def _level(ir: str, emulate: bool) -> int:
    """Return the level at which LLVM generates code: 0, which takes two thirds of the time, for emulated kernels.

    At level 0 LLVM calls a library to round to bfloat16, and kernels are loaded without one.
    """
    return 0 if emulate and "bfloat" not in ir else OPT


def assembly(ir: str, isa: Isa, emulate: bool = False) -> str:
    """Return a module's text as assembly text, from the object cache if it is there."""
    machine, cache = _machine(ir, isa, emulate), object_cache.current()
    key = object_cache.digest("assembly", object_key(ir, *machine))
    text = cache.fetch(key) if cache else None
    if text is None:
        text = str(target_machine(*machine).emit_assembly(llvm.parse_assembly(ir))).encode()
        if cache:
            cache.store(key, text)
    return text.decode()


def spills(text: str) -> int:
    """Return the vector accesses to the stack in an assembly text, which show that a register tile spills."""
    x86 = r"[xyz]mm.*\(%r[sb]p|\(%r[sb]p.*[xyz]mm"
    arm = r"\b(?:ldr|str|ldp|stp|ldur|stur)\s+q.*\[(?:sp|x29)"
    return sum(bool(re.search(f"{x86}|{arm}", line)) for line in text.splitlines())


class LoadedKernel:
    """Kernel loaded into this process while the object lives."""

    def __init__(self, ir: str, name: str, isa: Isa, emulate: bool = False) -> None:
        self._code = LoadedCode([compile_cached(ir, *_machine(ir, isa, emulate), opt=_level(ir, emulate))])
        self._call = KERNEL(self._code.addresses[name])

    def __call__(self, operands: Sequence[NDArray[Any]], rows: tuple[int, int],
                 columns: tuple[int, int] = (0, 1)) -> None:
        """Call the kernel. operands: arrays whose first elements the operands point at; rows, columns: [begin, end)."""
        table = np.array([array.ctypes.data for array in operands], np.uintp)
        self._call(table.ctypes.data, *rows, *columns)
