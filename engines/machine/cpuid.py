"""CPUID instruction of x86, for features of CPUs that /proc/cpuinfo does not list.

Linux lists a feature only under a name of its own, and has none for AMX-FP16 (X86_FEATURE_AMX_FP16). Its registers are
those of amx_tile, which is listed. A hypervisor decides what CPUID reports in a guest.

References: Intel SDM (CPUID, leaf 7); Linux, arch/x86/include/asm/cpufeatures.h.
"""
from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections.abc import Callable
from typing import NamedTuple

# void cpuid(uint32_t leaf, uint32_t subleaf, uint32_t registers[4]), in the calling convention of System V
_CODE = bytes.fromhex("53"          # push rbx
                      "4989d0"      # mov r8, rdx
                      "89f8"        # mov eax, edi
                      "89f1"        # mov ecx, esi
                      "0fa2"        # cpuid
                      "418900"      # mov [r8], eax
                      "41895804"    # mov [r8 + 4], ebx
                      "41894808"    # mov [r8 + 8], ecx
                      "4189500c"    # mov [r8 + 12], edx
                      "5b"          # pop rbx
                      "c3")         # ret
_FEATURES = 7       # leaf of the extended features
_AMX_FP16 = 1 << 21


class Registers(NamedTuple):
    """Registers that CPUID writes."""
    eax: int = 0
    ebx: int = 0
    ecx: int = 0
    edx: int = 0


Query = Callable[[int, int], Registers]     # (leaf, subleaf) -> registers


def unlisted_features(query: Query | None = None) -> frozenset[str]:
    """Return the features that this CPU has and Linux does not list, of those that code may use.

    The caller checks that Linux saves their registers. query: executes CPUID.
    """
    query = query or cpuid
    # Intel CPUs answer a leaf above the highest by the highest leaf's registers.
    if query(0, 0).eax < _FEATURES or query(_FEATURES, 0).eax < 1:
        return frozenset()
    return frozenset({"amx_fp16"} if query(_FEATURES, 1).eax & _AMX_FP16 else ())


def cpuid(leaf: int, subleaf: int) -> Registers:
    """Execute CPUID; return zeros if this is no Linux on x86-64, or if it forbids executable memory."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        return Registers()
    memory = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    memory.write(_CODE)
    address, found = ctypes.addressof(ctypes.c_char.from_buffer(memory)), (ctypes.c_uint32 * 4)()
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE),
                                  mmap.PROT_READ | mmap.PROT_EXEC):
        return Registers()
    ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(address)(
        leaf, subleaf, ctypes.addressof(found))
    return Registers(*found)
