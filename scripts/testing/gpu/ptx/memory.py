"""Global and shared memory of the machine, with checks for races and invalid accesses.

Global memory consists of allocations with inaccessible gaps between them; a byte that a thread has written belongs to
that thread until the launch ends. Shared memory records the threads that access each word between barriers.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.testing.gpu.ptx.text import Fault

Array = NDArray[Any]
BASE = 1 << 20          # address of byte 0 of the memory: low addresses are faults
GAP = 64                # bytes between allocations
WORD = 4
_LAUNCHES = 255         # launches that the stamps of writers distinguish
_THREADS = 16           # bits of a thread's number
_SEVERAL = -2           # reader or writer of a byte: more than one thread


class Memory:
    """Global memory with checks of its accesses."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.owned = np.zeros(size, bool)
        self._writers = np.zeros(size, np.uint32)       # number of the launch, and of the thread in its grid
        self._launch, self._end = 0, 0

    def allocate(self, data: Array | int, align: int = 256) -> int:
        """Allocate bytes, or copy an array, and return the address."""
        size = data if isinstance(data, int) else data.nbytes
        start = -(-(self._end + GAP) // align) * align
        if start + size > len(self.bytes):
            raise MemoryError(f"{size} bytes more than the {len(self.bytes)} that there are")
        self._end = start + size
        self.owned[start:self._end] = True
        if not isinstance(data, int):
            self.bytes[start:self._end] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return start + BASE

    def take_back(self, address: int, size: int) -> None:
        """Free memory; the last allocation's space can be used again."""
        start = address - BASE
        self.owned[start:start + size] = False
        if start + size == self._end:
            self._end = start

    def array(self, address: int, dtype: Any, shape: Sequence[int]) -> Array:
        return np.ndarray(tuple(shape), dtype, self.bytes, address - BASE)

    def at(self, addresses: Array, size: int) -> Array:
        """Return indices into `bytes`. Raises Fault if memory is not allocated or an address not aligned."""
        offsets = addresses.astype(np.int64) - BASE
        if (offsets % size).any():
            raise Fault(f"an address is not a multiple of {size}")
        if offsets.size and (offsets.min() < 0 or offsets.max() + size > len(self.owned)
                             or not (self.owned[offsets].all() and self.owned[offsets + size - 1].all())):
            raise Fault("outside of what is allocated")
        return offsets

    # ---- records of writers
    def begin_launch(self) -> None:
        self._launch += 1
        if self._launch > _LAUNCHES:
            self._launch = 1
            self._writers[:] = 0

    def reads(self, offsets: Array, who: Array) -> None:
        """Check a read of these bytes by threads, given by their numbers in the grid."""
        writers = self._writers[offsets]
        if ((writers >> 24 == self._launch) & (writers != self._stamp(who))).any():
            raise Fault("reads what another thread of the launch wrote")

    def writes(self, offsets: Array, size: int, who: Array) -> None:
        """Note writes of that many bytes each by threads, given by their numbers in the grid."""
        stamp = self._stamp(who)[:, None]
        places = offsets[:, None] + np.arange(size)
        writers = self._writers[places]
        if ((writers >> 24 == self._launch) & (writers != stamp)).any():
            raise Fault("overwrites what another thread of the launch wrote")
        self._writers[places] = stamp
        if (self._writers[places] != stamp).any():
            raise Fault("two threads write to one place")

    def _stamp(self, who: Array) -> Array:
        assert not who.size or who.max() < 1 << 24
        return np.asarray(np.uint32(self._launch) << np.uint32(24) | who.astype(np.uint32))


class Shared:
    """The shared memory of the blocks that run together.

    Of threads that write parts of one word in one instruction, those with equal addresses are detected, not those whose
    parts overlap otherwise; in all other cases, threads that access one word are detected.
    """

    def __init__(self, blocks: int, size: int) -> None:
        self.size = -(-size // 128) * 128 or 128
        words = blocks * self.size // WORD
        self.bytes = np.zeros(blocks * self.size, np.uint8)
        self.epoch = np.zeros(blocks, np.int64)                 # barriers so far
        self.written, self.writer = np.full(words, -1), np.full(words, -1)      # epoch, thread
        self.in_parts = np.zeros(words, bool)                   # all writes since the barrier were of parts
        self.parts = np.full(len(self.bytes), -1)               # epoch and thread of the last write of each byte
        self.read, self.reader = np.full(words, -1), np.full(words, -1)
        self.on_its_way = np.zeros(words, bool)
        self.unfenced = np.zeros(words, bool)                   # written, and not yet seen by wgmma

    def at(self, block: Array, addresses: Array, size: int) -> Array:
        offsets = addresses.astype(np.int64)
        if np.any(offsets % size) or offsets.size and (offsets.min() < 0 or offsets.max() + size > self.size):
            raise Fault(f"an address in shared memory is not aligned to {size}, or beyond {self.size}")
        return offsets + block * self.size

    def reads(self, block: Array, thread: Array, offsets: Array, size: int) -> None:
        """Check a read of threads before it happens."""
        for words in _words(offsets, size):
            now = self.epoch[block]
            if self.on_its_way[words].any():
                raise Fault("reads what a copy has yet to bring")
            if (self.written[words] < 0).any():
                raise Fault("reads shared memory that nothing wrote")
            if ((self.written[words] == now) & (self.writer[words] != thread)).any():
                raise Fault("reads what another thread wrote, without a barrier between")
            again = self.read[words] == now
            self.reader[words] = np.where(again & (self.reader[words] != thread), _SEVERAL, thread)
            self.read[words] = now

    def reads_grouped(self, block: Array, offsets: Array, size: int) -> None:
        """Check a read by the tensor cores (wgmma) before it happens."""
        self.reads(block, np.full(offsets.shape, _SEVERAL), offsets, size)
        if any(np.any(self.unfenced[words]) for words in _words(offsets, size)):
            raise Fault("reads what was written without a fence.proxy.async before the barrier")

    def will_write(self, block: Array, thread: Array, offsets: Array, size: int) -> None:
        for words in _words(offsets, size):
            now = self.epoch[block]
            if ((self.read[words] == now) & (self.reader[words] != thread)).any():
                raise Fault("overwrites what another thread reads, without a barrier between")
            others = (self.written[words] == now) & (self.writer[words] != thread)
            if size < WORD:
                others = others & ~self.in_parts[words] | self._written_in_parts(now, thread, offsets, size)
            if others.any() or self.on_its_way[words].any():
                raise Fault("overwrites what another thread writes, without a barrier between")

    def _written_in_parts(self, now: Array, thread: Array, offsets: Array, size: int) -> Array:
        """Return True if another thread has written to one of these bytes."""
        stamps = self.parts[offsets[:, None] + np.arange(size)]
        by_another = (stamps >> _THREADS == now[:, None]) & (stamps != (now << _THREADS | thread)[:, None])
        return np.asarray(np.any(by_another, axis=1))

    def wrote(self, block: Array, thread: Array, offsets: Array, size: int) -> None:
        now = self.epoch[block]
        for words in _words(offsets, size):
            again = self.written[words] == now
            shared = words[again & (self.writer[words] != thread)]
            self.in_parts[words] = (size < WORD) & (self.in_parts[words] | ~again)
            self.written[words], self.writer[words] = now, thread
            self.on_its_way[words], self.unfenced[words] = False, True
            others = self.writer[words] != thread
            if np.any(others) and (size >= WORD or len(np.unique(offsets)) < len(offsets)):
                raise Fault(f"two threads write to one {'word' if size >= WORD else 'place'}")
            self.writer[words[others]] = self.writer[shared] = _SEVERAL     # parts of a word by several threads
        if size < WORD:
            self.parts[offsets[:, None] + np.arange(size)] = (now << _THREADS | thread)[:, None]

    def set_out(self, offsets: Array, size: int) -> None:
        """Note that an asynchronous copy to these addresses has begun."""
        for words in _words(offsets, size):
            self.on_its_way[words] = True

    def fence(self, block: Array, thread: Array) -> None:
        """Make these threads' writes visible to wgmma."""
        mine = np.zeros((len(self.epoch), thread.max() + 1), bool)
        mine[block, thread] = True
        words = np.flatnonzero(self.unfenced & (self.writer >= 0) & (self.writer < mine.shape[1]))
        self.unfenced[words[mine[words * WORD // self.size, self.writer[words]]]] = False


def _words(offsets: Array, size: int) -> list[Array]:
    return [(offsets + at) // WORD for at in range(0, size, WORD)]
