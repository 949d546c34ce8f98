"""Where buffers lie in the memory of a context.

With reuse, buffers that are never alive together share memory: placed greedily from the largest to the smallest, each
in the tightest gap that the buffers alive with it leave (greedy by size for offset calculation: Pisarchyk and Lee,
"Efficient Memory Management for Deep Neural Net Inference", 2020). Without reuse, they follow each other.
"""
from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from engines.errors import PlanError
from engines.ir.dtypes import memory_dtype, to_bfloat16
from engines.plan.plan import Buffer, Fill, TensorView

CACHE_LINE = 64
PAGE = 4096
COLOURS = 32            # cache lines of a page, of its 64, at which large buffers begin in turn (cache colouring)
HUGE_PAGE = 2 << 20
_SPARE = 4              # times the size asked for that a block of a pool may have
_KEPT_BLOCKS = 2
_LAYOUTS = 64           # kept for a model
_SMALL_BLOCK = 64 << 10
MADV_HUGEPAGE, MADV_NOHUGEPAGE = 14, 15     # Linux's numbers; Python's mmap may not have them


@dataclass(frozen=True)
class Layout:
    """The offset of each buffer, in the order of Plan.buffers, and the bytes of them all."""
    offsets: tuple[int, ...]
    total: int
    one_item: frozenset[int] = frozenset()      # buffers with room for one item, whatever the batch


@dataclass(frozen=True)
class _Block:
    """Buffers that share one address, and the steps between which it is taken (both included)."""
    members: tuple[int, ...]
    bytes: int
    first: int
    last: int


def plan_memory(buffers: Sequence[Buffer], fills: Sequence[Fill], reuse: bool = True) -> Layout:
    """Offsets such that no two buffers alive together overlap, and no step overwrites a halo.

    Offsets are multiples of 64. Buffers of a page and more have pages of their own, and begin at different cache
    lines of their first one: tensors of equal shape would otherwise meet in the same few cache sets. Inputs keep their
    memory to the end, so that a context may run on them again.
    """
    blocks = _share(buffers, fills) if reuse else [_Block((i,), b.bytes, 0, 0) for i, b in enumerate(buffers)]
    order = sorted(blocks, key=lambda block: (-block.bytes, block.first)) if reuse else blocks
    offsets = [0] * len(buffers)
    placed: list[tuple[int, int, _Block]] = []
    for number, block in enumerate(order):
        large = block.bytes >= PAGE
        colour = number * 5 % COLOURS * CACHE_LINE if large else 0
        # A large block's room is the same whatever its colour, so that blocks of one size can follow each other in it.
        size = -(-(block.bytes + (COLOURS - 1) * CACHE_LINE) // PAGE) * PAGE if large else block.bytes
        start = _place(block, size, PAGE if large else CACHE_LINE, placed)
        placed.append((start, start + size, block))
        for member in block.members:
            offsets[member] = start + colour
    return Layout(tuple(offsets), max((end for _, end, _ in placed), default=0))


def rounded_up(size: int) -> int:
    """Return the next multiple of an eighth of the power of two below it: at most an eighth more."""
    step = 1 << max(size.bit_length() - 4, 0)
    return -(-size // step) * step


class Layouts:
    """Layouts of a model's shapes. Shapes that differ little have one: the next lengths of a text, or of a cache."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Layout] = {}

    def plan(self, buffers: Sequence[Buffer], fills: Sequence[Fill]) -> Layout:
        """Return a layout as plan_memory does, for buffers at most an eighth larger."""
        sizes = tuple([rounded_up(buffer.bytes) for buffer in buffers])
        key = sizes, tuple([(buffer.first, buffer.last) for buffer in buffers]), halo_classes(fills)
        layout = self._known.get(key)
        if layout is None:
            if len(self._known) >= _LAYOUTS:
                self._known.clear()
            rounded = [replace(buffer, bytes=size) for buffer, size in zip(buffers, sizes, strict=True)]
            layout = self._known[key] = plan_memory(rounded, fills)
        return layout


def _share(buffers: Sequence[Buffer], fills: Sequence[Fill]) -> list[_Block]:
    """A block for each buffer; those with halos of one geometry, alive one after the other, are one."""
    halos = _halos(fills)
    end = max((buffer.last for buffer in buffers), default=0)
    blocks: list[_Block] = []
    by_halo: dict[object, list[_Block]] = {}
    for i, buffer in sorted(enumerate(buffers), key=lambda item: item[1].first):
        life = _Block((i,), buffer.bytes, buffer.first, end if buffer.first < 0 else buffer.last)
        if i in halos:
            slots = by_halo.setdefault((halos[i], buffer.bytes), [])
            free = next((k for k, slot in enumerate(slots) if slot.last < life.first), len(slots))
            if free < len(slots):       # of a buffer that died before this one is born
                life = replace(slots[free], members=(*slots[free].members, i), last=life.last)
            slots[free:free + 1] = [life]
        else:
            blocks.append(life)
    # A halo is written once, so nothing else may ever lie there.
    forever = [replace(slot, first=-1, last=end) for slots in by_halo.values() for slot in slots]
    return blocks + forever


def halo_classes(fills: Sequence[Fill]) -> tuple[tuple[int, int], ...]:
    """Return the buffer of each fill, and the number of the first fill that is equal but for its tensor."""
    first: dict[Fill, int] = {}
    return tuple([(fill.view.buffer, first.setdefault(_anonymous(fill), number)) for number, fill in enumerate(fills)])


def _anonymous(fill: Fill) -> Fill:
    return replace(fill, view=replace(fill.view, name="", buffer=0, quant=None))


def _halos(fills: Sequence[Fill]) -> dict[int, frozenset[Fill]]:
    """Buffer -> its fills without the names: equal if and only if one may stand in for the other."""
    found: dict[int, set[Fill]] = {}
    for fill in fills:
        found.setdefault(fill.view.buffer, set()).add(_anonymous(fill))
    return {buffer: frozenset(group) for buffer, group in found.items()}


def _place(block: _Block, size: int, alignment: int, placed: Sequence[tuple[int, int, _Block]]) -> int:
    """The start of the tightest gap between the blocks alive with this one; after them all if none is wide enough."""
    taken = sorted((start, end) for start, end, other in placed
                   if other.first <= block.last and block.first <= other.last)
    best, slack, free = -1, 0, 0
    for start, end in taken:
        left = start - free - size
        if left >= 0 and (best < 0 or left < slack):
            best, slack = free, left
        free = max(free, -(-end // alignment) * alignment)
    return best if best >= 0 else free


class Memory:
    """Zeroed bytes on huge pages where the system has them, freed with the last view of them.

    A page costs nothing until it is touched.
    """

    def __init__(self, size: int, huge_pages: bool = True) -> None:
        """huge_pages: False for memory of which little is touched, here and there. Raises PlanError: there is not so
        much."""
        self.size, self.has_huge_pages = max(size, 1), huge_pages
        # An anonymous mapping begins on a page; the spare 2 MiB let ours begin on a huge one.
        # Private, or a forked child would write into its parent's tensors.
        try:
            self._map = mmap.mmap(-1, -(-self.size // PAGE) * PAGE + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise PlanError(f"this process cannot have {self.size} bytes of memory ({error}); a smaller --max-batch, "
                            "fewer instances or fewer threads take less") from error
        raw = np.frombuffer(self._map, np.uint8)
        skip = -raw.ctypes.data % HUGE_PAGE
        self.bytes: NDArray[np.uint8] = raw[skip:skip + self.size]
        self.address: int = self.bytes.ctypes.data
        if sys.platform == "linux" and self.size >= HUGE_PAGE:
            # Advice only: a kernel without huge pages refuses, and small pages work as well.
            ctypes.CDLL(None).madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size),
                                      MADV_HUGEPAGE if huge_pages else MADV_NOHUGEPAGE)

    def freeze(self) -> None:
        """From here on nobody writes to it: a kernel that is wrong about an address ends, and alters nothing."""
        self.bytes.flags.writeable = False
        if sys.platform == "linux":
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), mmap.PROT_READ)


def on_cache_line(constants: bytes | memoryview) -> tuple[NDArray[np.uint8], int]:
    """Return constants as an array that begins on a cache line, and its address.

    Constants that were read from a file lie on a page; others are copied.
    """
    array: NDArray[np.uint8] = np.ndarray((len(constants),), np.uint8, constants)
    if array.ctypes.data % CACHE_LINE:
        copy = Memory(len(array)).bytes
        copy[:len(array)] = array
        array = copy
    return array, array.ctypes.data


class _Lease:
    """A block of a pool, which gets it back when the last view of it is gone."""

    def __init__(self, memory: Memory, size: int) -> None:
        self._memory = memory
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (memory.address, False), "version": 3}


class MemoryPool:
    """Memory of contexts, taken again when they are gone. Thread-safe.

    The system clears each page that is touched for the first time, 2 MiB at once where pages are huge: at a new shape
    that takes longer than the run.
    """

    def __init__(self) -> None:
        self._free: list[Memory] = []           # at most _KEPT_BLOCKS, the one that came last at the end
        self._lock = threading.RLock()          # a block may come back whenever an object is freed

    def take(self, size: int, huge_pages: bool = True) -> NDArray[np.uint8]:
        """Return `size` bytes with arbitrary contents. Raises PlanError: there is not so much memory."""
        with self._lock:
            fitting = [memory for memory in self._free if size <= memory.size <= max(_SPARE * size, HUGE_PAGE)
                       and memory.has_huge_pages == huge_pages]
            memory = min(fitting, key=lambda one: one.size, default=None)
            if memory:
                self._free.remove(memory)
        if memory is None:
            spare = size + size // 8            # for shapes that are a little larger
            memory = Memory(spare if spare >= HUGE_PAGE else 1 << max(spare - 1, _SMALL_BLOCK - 1).bit_length(),
                            huge_pages)
        lease = _Lease(memory, max(size, 1))
        finalize(lease, self._give, memory).atexit = False
        return np.asarray(lease)

    def _give(self, memory: Memory) -> None:
        with self._lock:
            self._free = [*self._free, memory][-_KEPT_BLOCKS:]


class ChangingArray(np.ndarray[Any, np.dtype[Any]]):
    """An array that others may write while it is read: a client's shared memory. The SLACK bytes behind it may be read,
    too."""
    address = 0             # where it begins, if who made it has said so: numpy takes 3 us to say it


def array_at(memory: NDArray[np.uint8], offset: int, view: TensorView, items: int) -> NDArray[Any]:
    """`items` batch slots of a tensor as a numpy array: [items, *shape], or shape if it has no batch axis.

    The axis of the items is where the tensor has it: [28, items, 64] of items [28, 64] if batch_axis is 1.
    offset: of the view's buffer in `memory`. A bfloat16 tensor comes as uint16, its bits.
    """
    shape, strides = view.shape, view.strides
    if view.batched:
        axis = view.batch_axis
        shape, strides = ((*shape[:axis], items, *shape[axis:]),
                          (*strides[:axis], view.item_stride, *strides[axis:]))
    return np.ndarray(shape, memory_dtype(view.dtype), memory, offset + view.offset, strides)


def write_halo(array: NDArray[Any], fill: Fill, written: int) -> None:
    """Fill a tensor and its halo in all batch slots but the first `written`, in which that has been done."""
    value = to_bfloat16(np.array(fill.value)) if fill.view.dtype == "bfloat16" else fill.value
    if fill.view.batched:
        array[written:] = value
    elif not written:
        array[...] = value
