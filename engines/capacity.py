"""Memory of this process: its limit, above which tensors are rejected before they are allocated; its return."""
from __future__ import annotations

import ctypes
import math
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:       # frontend workers, which return memory, do without NumPy
    from infer_server.engines.ir.graph import TensorType

_CGROUP = Path("/sys/fs/cgroup/memory.max")


def trim() -> None:
    """Return freed memory to the system, if the allocator can."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


@cache
def memory_limit() -> int:
    """Return the bytes that this process may use: the machine's memory, or the limit of a cgroup or `ulimit -v`."""
    limits = [sys.maxsize]
    if hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        import resource  # POSIX only, as sysconf is
        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        limits += [soft - _address_space()] * (soft != resource.RLIM_INFINITY)
    if _CGROUP.is_file() and (text := _CGROUP.read_text().strip()).isdecimal():
        limits.append(int(text))
    return min(limits)


def _address_space() -> int:
    """Return the size of the process's address space in bytes; 0 if unknown."""
    sizes = Path("/proc/self/statm")
    return int(sizes.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") if sizes.is_file() else 0


def bytes_of(tensor: TensorType) -> int:
    """Return the bytes of a tensor; of one item if it has a batch axis."""
    return math.prod(extent for extent in tensor.shape if isinstance(extent, int)) * tensor.dtype.itemsize


def too_large(size: int) -> str:
    """Return a message if `size` bytes exceed the limit, else ""."""
    limit = memory_limit()
    return f"{gigabytes(size)}, and this machine has {gigabytes(limit)}" if size > limit else ""


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size < 1e15 else f"{size / 1e9:.1e} GB"
