"""Permission to use the tile registers of AMX: Linux gives a process their state only if it asks.

Without permission the first tile instruction of a process raises SIGILL, although /proc/cpuinfo lists amx_tile. A grant
holds for all threads of the process, those that run already too. It is inherited by fork and lost by exec. The kernel
refuses where it does not know the call (before Linux 5.16, some sandboxes) or where a thread has an alternate signal
stack without room for 8 KiB more; so cpu.detect() asks, and not the import of this module.

Source: Linux, Documentation/arch/x86/xstate.rst.
"""
from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from functools import cache

_ARCH_PRCTL = 158
_GET_SUPPORTED, _GET_PERMITTED, _REQUEST_PERMISSION = 0x1021, 0x1022, 0x1023
_TILE_CONFIG, _TILE_DATA = 17, 18       # components of the state that XSAVE saves
_BOTH = 1 << _TILE_CONFIG | 1 << _TILE_DATA
_REASONS = {errno.ENOSPC: "the alternate signal stack of a thread is too small",
            errno.EOPNOTSUPP: "the kernel does not save tile registers",
            errno.EINVAL: "the kernel does not know of tile registers (Linux 5.16 does)",
            errno.ENOSYS: "the kernel or sandbox has no arch_prctl", errno.EPERM: "the sandbox forbids arch_prctl"}

ArchPrctl = Callable[[int, int], tuple[int, int]]  # arch_prctl: (option, argument) -> (errno or 0, word that it wrote)


def permitted(features: frozenset[str], refusal: Callable[[], str] | None = None) -> tuple[frozenset[str], str]:
    """Ask for tile registers where /proc/cpuinfo lists amx_tile.

    Returns
    -------
    features : frozenset of str
        The features without those that start with "amx_" if the kernel refuses.
    reason : str
        Why it refuses, or "".
    """
    if "amx_tile" not in features:
        return features, ""
    reason = (refusal or tile_refusal)()
    return (frozenset(name for name in features if not name.startswith("amx_")), reason) if reason else (features, "")


@cache
def tile_refusal() -> str:
    """Request permission for this process; return why it is refused, or ""."""
    if not (platform.system() == "Linux" and platform.machine() == "x86_64"):
        return "only Linux on x86-64 saves tile registers"
    return refusal_by(_arch_prctl)


def refusal_by(call: ArchPrctl) -> str:
    """Request permission by `call`; return why it is refused, or ""."""
    error, supported = call(_GET_SUPPORTED, 0)
    if error:
        return _reason(error)
    if supported & _BOTH != _BOTH:
        return "the kernel does not save tile registers"
    error, _ = call(_REQUEST_PERMISSION, _TILE_DATA)
    if error:
        return _reason(error)
    error, granted = call(_GET_PERMITTED, 0)
    return _reason(error) if error else "" if granted & _BOTH == _BOTH else "the kernel granted no tile registers"


def _reason(error: int) -> str:
    return _REASONS.get(error, os.strerror(error))


def _arch_prctl(option: int, argument: int) -> tuple[int, int]:
    word = ctypes.c_uint64()
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    system_call.restype = ctypes.c_long
    last = ctypes.c_ulong(argument) if option == _REQUEST_PERMISSION else ctypes.byref(word)
    failed = system_call(ctypes.c_long(_ARCH_PRCTL), ctypes.c_ulong(option), last)
    return ctypes.get_errno() if failed else 0, word.value
