"""Clients' files mapped into memory, from which tensors are read without a copy or with one.

A client may cut its file short at any time, and to touch what is gone ends a process (SIGBUS). The guard is a handler
of that signal (engines/backends/llvm/codegen/bus_guard.py): it puts zeros in the place of the mapping, and marks it as
lost. Mappings are only read: pages of zeros can always be had for that, and no memory is altered by mistake.
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

from engines.errors import ConfigError, EngineError

log = logging.getLogger(__name__)

_PAGE = mmap.PAGESIZE
_SIGACTION_BYTES, _FLAGS_AT = 152, 136      # of struct sigaction with pointers of 64 bits, in glibc and in musl
_SA_SIGINFO, _SA_ONSTACK = 0x4, 0x08000000
_MAP_FIXED = 0x10                   # Linux's number; Python's mmap does not name it
_FAILED = ctypes.c_void_p(-1).value


class Guard:
    """The handler, installed: the process has one disposition of a signal, and so one guard."""

    def __init__(self) -> None:
        """Raises EngineError: there is none for this machine; OSError, RuntimeError: the system does not let it be."""
        from engines.backends.llvm.codegen import bus_guard
        from engines.backends.llvm.codegen.isa import isa_named
        from engines.backends.llvm.runtime.elf import LoadedCode
        from engines.machine.cpu import detect
        if sys.maxsize < 1 << 32:
            raise ConfigError("pointers of this process have 32 bits")
        self._table = (ctypes.c_int64 * (len(bus_guard.GuardRow) * bus_guard.ROWS))()
        self._lost = bus_guard.GuardRow.LOST
        self._nowhere = bus_guard.NOWHERE
        # Rows of it, the one that has been free the longest first; its methods are atomic.
        self._free = deque(range(0, len(self._table), len(bus_guard.GuardRow)))
        self._previous = ctypes.create_string_buffer(_SIGACTION_BYTES)
        _sigaction(None, self._previous)
        libc = ctypes.CDLL(None)
        process = bus_guard.ProcessAddresses(
            ctypes.addressof(self._table), ctypes.addressof(self._previous),
            *(ctypes.cast(function, ctypes.c_void_p).value or 0
              for function in (libc.syscall, libc.sigaction, libc["raise"])))
        self._code = LoadedCode([bus_guard.bus_guard_object(process, isa_named("portable"), detect().architecture)])
        self._place = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(
            self._code.addresses["place"])
        self._handler = self._code.addresses["on_bus_error"]
        action = ctypes.create_string_buffer(_SIGACTION_BYTES)
        ctypes.c_uint64.from_buffer(action).value = self._handler
        ctypes.c_int32.from_buffer(action, _FLAGS_AT).value = _SA_SIGINFO | _SA_ONSTACK
        _sigaction(action, None)

    @property
    def is_installed(self) -> bool:
        """Whether nobody has taken its place since."""
        action = ctypes.create_string_buffer(_SIGACTION_BYTES)
        _sigaction(None, action)
        return ctypes.c_uint64.from_buffer(action).value == self._handler

    def watch(self, begin: int, end: int) -> int:
        """Guards a range of addresses; the row of its table. Raises IndexError: all are taken."""
        row = self._free.popleft()
        self._place(ctypes.byref(self._table, row * 8), begin, end)
        return row

    def forget(self, row: int) -> None:
        """Before the range is unmapped: what lies there next is not a client's."""
        self._place(ctypes.byref(self._table, row * 8), *self._nowhere)
        self._free.append(row)

    def is_lost(self, row: int) -> bool:
        """Whether zeros have taken the place of the range."""
        return self._table[row + self._lost] != 0


def _sigaction(action: ctypes.Array[ctypes.c_char] | None, before: ctypes.Array[ctypes.c_char] | None) -> None:
    """Of SIGBUS. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).sigaction(signal.SIGBUS, action, before):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Mapping:
    """A stretch of a file, to be read. It is unmapped when nobody refers to its bytes any more, whoever has forgotten
    the mapping itself by then."""

    def __init__(self, guard: Guard, descriptor: int, offset: int, byte_size: int) -> None:
        """Raises OSError: there is no room for it; IndexError: for one more."""
        before = offset % _PAGE             # mappings begin on a page
        size = -(-(before + byte_size) // _PAGE) * _PAGE
        # Engines read a little behind a tensor (SLACK), and nothing of what they find there: there is a page of zeros.
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
        """Whether a part was touched that its file no longer has: all of it is zeros since."""
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
    """The process's; None, said in the log: clients' memory is read by system calls instead."""
    try:
        return Guard()
    except (EngineError, OSError, RuntimeError, AttributeError) as error:   # the last: no syscall() in the C library
        log.warning("shared memory of clients is copied by system calls, for it cannot be mapped safely: %s", error)
        return None


def mapped(descriptor: int, offset: int, byte_size: int) -> Mapping | None:
    """A stretch of a client's file; None: it is to be read by system calls."""
    guarding = guard()
    if guarding is None:
        return None                     # the log has it
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
