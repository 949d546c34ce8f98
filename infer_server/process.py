"""Start and settings of this process (imports, descriptor limit, malloc), and its resource usage."""
from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# Parameters of glibc's malloc.h. By default a buffer above 128 KiB is mapped when it is allocated and unmapped when it
# is freed, with a fault for each page: for a request of 600 KB that costs more than all of protobuf.

_OPTIONS = {
    "M_MMAP_THRESHOLD": (-3, 1 << 30),
    "M_TRIM_THRESHOLD": (-1, (1 << 31) - 1),
    "M_TOP_PAD": (-2, 64 << 20),
}


def imported(name: str) -> Callable[..., Any]:
    """Import the function "module:function" of a program that starts.

    Nothing is collected meanwhile, nor are the objects of modules visited later: imports make no garbage, and
    collections are a tenth of the time that they take.
    """
    module, _, function = name.partition(":")
    gc.disable()
    found: Callable[..., Any] = getattr(import_module(module), function)
    gc.freeze()
    gc.enable()
    return found


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files and sockets (RLIMIT_NOFILE) to the hard one.

    The soft limit of a shell is low for the sake of old programs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:      # macOS rejects an unlimited soft limit
        log.info("the limit of %d open files is unchanged: %s", soft, error)


def resident_bytes(process: str = "self") -> int:
    """Return the resident memory of this process, or of another by its process id."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_secs(process: str = "self") -> float:
    """Return the CPU time of this process, or of another by its process id."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread and, permanently, in processes that are started meanwhile.

    Signals to a process group then reach the server alone; signals to this thread are delivered afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def age_secs() -> float:
    """Return the seconds since this process was started; 0 without /proc."""
    try:
        started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_secs = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return max(0.0, up_secs - started_ticks / os.sysconf("SC_CLK_TCK"))


def tune_malloc() -> None:
    """Keep freed memory in the process for the next message or array. Logs if the allocator cannot be tuned."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        log.info("this C library has no mallopt: large messages cost more")
        return
    for name, (parameter, value) in _OPTIONS.items():
        if not mallopt(parameter, value):
            log.info("mallopt refused %s", name)
