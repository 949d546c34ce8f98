"""Memory mappings of clients' shared-memory files.

A client may truncate its file at any time; reading a page that no longer exists raises SIGBUS, which ends a process.
The guard is a handler of that signal (engines/backends/llvm/codegen/bus_guard.py): it replaces the mapping by zeros and
marks it as lost. Mappings are read-only: mapping zero pages for them cannot fail, and no memory is written by mistake.
"""
from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import sys
import weakref
from collections import deque
from functools import cache

from infer_server.engines.errors import ConfigError, EngineError

log = logging.getLogger(__name__)

_PAGE = mmap.PAGESIZE
_SIGACTION_BYTES, _FLAGS_AT = 152, 136      # size and sa_flags of struct sigaction, 64-bit glibc and musl
_SA_SIGINFO, _SA_ONSTACK = 0x4, 0x08000000
_MAP_FIXED = 0x10                   # Linux's number; Python's mmap does not name it
_FAILED = ctypes.c_void_p(-1).value


class Guard:
    """Installed SIGBUS handler. A process has one handler of a signal, hence one guard."""

    def __init__(self) -> None:
        """Install the handler.

        Raises EngineError if this machine is not supported, OSError or RuntimeError if the system refuses.
        """
        from infer_server.engines.backends.llvm.codegen import bus_guard
        from infer_server.engines.backends.llvm.codegen.isa import isa_named
        from infer_server.engines.backends.llvm.runtime.elf import LoadedCode
        from infer_server.engines.machine.cpu import detect
        if sys.maxsize < 1 << 32:
            raise ConfigError("pointers of this process have 32 bits")
        self._table = (ctypes.c_int64 * (len(bus_guard.GuardRow) * bus_guard.ROWS))()
        self._lost = bus_guard.GuardRow.LOST
        self._nowhere = bus_guard.NOWHERE
        # Free rows, the one freed first at the left; the methods of deque are atomic.
        self._free = deque(range(0, len(self._table), len(bus_guard.GuardRow)))
        self._previous = ctypes.create_string_buffer(_SIGACTION_BYTES)
        _sigaction(None, self._previous)
        libc = ctypes.CDLL(None)
        process = bus_guard.ProcessAddresses(
            ctypes.addressof(self._table), ctypes.addressof(self._previous),
            *(ctypes.cast(function, ctypes.c_void_p).value or 0
              for function in (libc.syscall, libc.sigaction, libc["raise"])))
        self._code = LoadedCode([bus_guard.bus_guard_object(process, isa_named("portable"), detect().architecture)])
        self._set_row = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(
            self._code.addresses["place"])
        self._handler = self._code.addresses["on_bus_error"]
        action = ctypes.create_string_buffer(_SIGACTION_BYTES)
        ctypes.c_uint64.from_buffer(action).value = self._handler
        ctypes.c_int32.from_buffer(action, _FLAGS_AT).value = _SA_SIGINFO | _SA_ONSTACK
        _sigaction(action, None)

    @property
    def is_installed(self) -> bool:
        """True if no other handler of SIGBUS has been installed since."""
        action = ctypes.create_string_buffer(_SIGACTION_BYTES)
        _sigaction(None, action)
        return ctypes.c_uint64.from_buffer(action).value == self._handler

    def watch(self, begin: int, end: int) -> int:
        """Guard a range of addresses; return its row in the table. Raises IndexError if the table is full."""
        row = self._free.popleft()
        self._set_row(ctypes.byref(self._table, row * 8), begin, end)
        return row

    def forget(self, row: int) -> None:
        """Stop guarding a range; to be called before it is unmapped and its addresses are reused."""
        self._set_row(ctypes.byref(self._table, row * 8), *self._nowhere)
        self._free.append(row)

    def is_lost(self, row: int) -> bool:
        """Return True if the range has been replaced by zeros."""
        return self._table[row + self._lost] != 0


def _sigaction(action: ctypes.Array[ctypes.c_char] | None, before: ctypes.Array[ctypes.c_char] | None) -> None:
    """Set or get (`before`) the handler of SIGBUS. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).sigaction(signal.SIGBUS, action, before):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Mapping:
    """Read-only mapping of a range of a file, unmapped when the last reference to its bytes is gone."""

    def __init__(self, guard: Guard, descriptor: int, offset: int, byte_size: int) -> None:
        """Map and guard the range. Raises OSError if it cannot be mapped, IndexError if the guard's table is full."""
        before = offset % _PAGE             # mappings begin on a page
        size = -(-(before + byte_size) // _PAGE) * _PAGE
        # Kernels may read up to SLACK bytes after a tensor, whose values are unused: a page of zeros follows.
        begin = _map(None, size + _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        try:
            row = guard.watch(begin, begin + size)
        except IndexError:
            _unmap(begin, size + _PAGE)
            raise
        memory = (ctypes.c_char * (size + _PAGE)).from_address(begin)
        weakref.finalize(memory, _release, guard, row, begin, size + _PAGE).atexit = False      # threads may read it
        _map(begin, size, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset - before)
        self.bytes = memoryview(memory).toreadonly().cast("B")[before:before + byte_size]
        self.address = begin + before
        self._guard, self._row = guard, row

    @property
    def is_lost(self) -> bool:
        """True if a page was read that the file no longer has; the whole mapping is zeros since then."""
        return self._guard.is_lost(self._row)


def _release(guard: Guard, row: int, begin: int, size: int) -> None:
    guard.forget(row)
    _unmap(begin, size)


def _map(begin: int | None, size: int, flags: int, descriptor: int, offset: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    address: int | None = libc.mmap(begin, size, mmap.PROT_READ, flags, descriptor, offset)
    if address is None or address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


def _unmap(begin: int, size: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(begin), ctypes.c_size_t(size))


@cache
def guard() -> Guard | None:
    """Return the process's guard; None, with a warning, if clients' memory must be read by system calls instead."""
    try:
        return Guard()
    except (EngineError, OSError, RuntimeError, AttributeError) as error:   # AttributeError: a libc without syscall()
        log.warning("shared memory of clients is copied by system calls, for it cannot be mapped safely: %s", error)
        return None


def mapped(descriptor: int, offset: int, byte_size: int) -> Mapping | None:
    """Map a range of a client's file; None if it must be read by system calls instead."""
    guarding = guard()
    if guarding is None:
        return None                     # guard() has logged the reason
    try:
        if guarding.is_installed:
            return Mapping(guarding, descriptor, offset, byte_size)
        why = "another handler of SIGBUS was installed"
    except OSError as error:
        why = str(error)
    except IndexError:
        why = "too many are mapped"
    log.warning("a region of shared memory is copied by system calls, for it is not mapped: %s", why)
    return None
