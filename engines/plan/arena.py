"""Memory planning: assigns each buffer of a plan an offset in the memory of a context, and allocates that memory.

With reuse, buffers whose live ranges do not overlap share memory: they are assigned from the largest to the smallest,
each to the tightest gap between the buffers that are alive with it (greedy by size for offset calculation: Pisarchyk
and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020). Without reuse, they follow each other.
"""
from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from bisect import insort
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.capacity import gigabytes, too_large
from infer_server.engines.errors import ConfigError, PlanError
from infer_server.engines.ir.dtypes import memory_dtype, to_bfloat16
from infer_server.engines.ir.symbolic import structure
from infer_server.engines.plan.plan import Buffer, Fill, TensorView

CACHE_LINE = 64
PAGE = 4096
COLOURS = 32            # start offsets, in cache lines within a page, that large buffers cycle through (colouring)
HUGE_PAGE = 2 << 20
_SPARE = 4              # a pool returns a free block of at most this many times the requested size
_KEPT_BLOCKS = 2
_LAYOUTS = 64           # layouts cached for a model
_SMALL_BLOCK = 64 << 10
MADV_HUGEPAGE, MADV_NOHUGEPAGE = 14, 15     # Linux's numbers; Python's mmap may not have them


@dataclass(frozen=True)
class Layout:
    """Offset in bytes of each buffer, in the order of MachinePart.buffers, and the total size."""
    offsets: tuple[int, ...]
    total: int
    one_item: frozenset[int] = frozenset()      # buffers that hold one item, whatever the batch

    @cached_property
    def vector(self) -> NDArray[np.int64]:
        """The offsets as an array."""
        return np.array(self.offsets, np.int64)


@dataclass(frozen=True)
class _Block:
    """Buffers that share one address, and the live range of that address in steps (both ends included)."""
    members: tuple[int, ...]
    bytes: int
    first: int
    last: int


def check_memory(model: str, buffers: Sequence[Buffer], max_batch: int) -> None:
    """Raise ConfigError if the live buffers of the largest batch exceed the memory."""
    if wrong := too_large(peak := peak_bytes(buffers)):
        largest = max(buffers, key=lambda buffer: buffer.bytes)
        batch = f" for a batch of {max_batch}; lower --max-batch" if max_batch > 1 and not too_large(
            peak // max_batch) else ", too much for one item"
        raise ConfigError(f"{model}: its tensors ('{largest.name}' alone {gigabytes(largest.bytes)}) take "
                          f"{wrong}{batch}")


def peak_bytes(buffers: Sequence[Buffer]) -> int:
    """Return the peak of the bytes of live buffers over all steps."""
    change = [0] * (max((buffer.last for buffer in buffers), default=0) + 3)        # first >= -1
    for buffer in buffers:
        change[buffer.first + 1] += buffer.bytes
        change[buffer.last + 2] -= buffer.bytes
    return max(accumulate(change))


Life = tuple[int, int]      # first and last step that a buffer is alive in


def plan_memory(buffers: Sequence[Buffer], fills: Sequence[Fill], reuse: bool = True) -> Layout:
    """Return a layout in which no two buffers alive together overlap and no step overwrites a halo.

    Offsets are multiples of 64. Buffers of at least a page have pages of their own and start at different cache lines
    within the first: tensors of equal shape would otherwise compete for the same few cache sets. Inputs keep their
    memory to the end, so that a context may run on them again.

    Parameters
    ----------
    buffers : sequence of Buffer
        Sizes in bytes and live ranges.
    fills : sequence of Fill
        Halos: buffers share memory with a halo only if theirs is equal.
    reuse : bool
        False gives every buffer memory of its own.
    """
    lives = [(buffer.first, buffer.last) for buffer in buffers]
    return _layout([buffer.bytes for buffer in buffers], lives, halos_of(fills), reuse)


def _layout(sizes: Sequence[int], lives: Sequence[Life], halos: Mapping[int, Hashable], reuse: bool = True) -> Layout:
    blocks = _share(sizes, lives, halos) if reuse else [_Block((i,), size, 0, 0) for i, size in enumerate(sizes)]
    order = sorted(blocks, key=lambda block: (-block.bytes, block.first)) if reuse else blocks
    offsets = [0] * len(sizes)
    allocated: list[tuple[int, int, _Block]] = []
    for number, block in enumerate(order):
        large = block.bytes >= PAGE
        colour = number * 5 % COLOURS * CACHE_LINE if large else 0
        # A large block reserves space for any colour, so that a later block of this size fits into its gap.
        size = -(-(block.bytes + (COLOURS - 1) * CACHE_LINE) // PAGE) * PAGE if large else block.bytes
        start = _best_fit(block, size, PAGE if large else CACHE_LINE, allocated)
        insort(allocated, (start, start + size, block), key=_start_and_end)
        for member in block.members:
            offsets[member] = start + colour
    return Layout(tuple(offsets), max((end for _, end, _ in allocated), default=0))


def _start_and_end(one: tuple[int, int, _Block]) -> tuple[int, int]:
    return one[:2]


def rounded_up(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return sizes rounded up to a multiple of an eighth of the power of two below each: at most an eighth more."""
    steps = np.int64(1) << np.maximum(np.frexp(sizes)[1] - 4, 0)
    rounded: NDArray[np.int64] = -(-sizes // steps) * steps
    return rounded


class Layouts:
    """Cache of the layouts of a model's shapes. Similar shapes share one: the next lengths of a text or a KV cache."""

    def __init__(self, lives: Sequence[Life], halos: Mapping[int, Hashable]) -> None:
        """lives: live range of each buffer. halos: equal for buffers with equal halos, see halos_of."""
        self._lives, self._halos = lives, halos
        self._known: dict[bytes, Layout] = {}

    def plan(self, sizes: NDArray[np.int64]) -> Layout:
        """Return a layout as plan_memory does, for buffers at most an eighth larger."""
        rounded = rounded_up(sizes)
        layout = self._known.get(key := rounded.tobytes())
        if layout is None:
            if len(self._known) >= _LAYOUTS:
                self._known.clear()
            layout = self._known[key] = _layout(rounded.tolist(), self._lives, self._halos)
        return layout


def _share(sizes: Sequence[int], lives: Sequence[Life], halos: Mapping[int, Hashable]) -> list[_Block]:
    """Return a block for each buffer; buffers with equal halos and disjoint live ranges share one."""
    end = max((last for _, last in lives), default=0)
    blocks: list[_Block] = []
    by_halo: dict[object, list[_Block]] = {}
    for i, (first, last) in sorted(enumerate(lives), key=lambda item: item[1][0]):
        life = _Block((i,), sizes[i], first, end if first < 0 else last)
        if i in halos:
            slots = by_halo.setdefault((halos[i], sizes[i]), [])
            free = next((k for k, slot in enumerate(slots) if slot.last < first), len(slots))
            if free < len(slots):       # its last buffer dies before this one is written
                life = replace(slots[free], members=(*slots[free].members, i), last=life.last)
            slots[free:free + 1] = [life]
        else:
            blocks.append(life)
    # A halo is written once, so nothing else may ever lie there.
    forever = [replace(slot, first=-1, last=end) for slots in by_halo.values() for slot in slots]
    return blocks + forever


def halos_of(fills: Sequence[Fill]) -> dict[int, Hashable]:
    """Map each buffer with halos to a key that is equal for buffers that may share memory."""
    found: dict[int, set[Hashable]] = {}
    for fill in fills:
        anonymous = replace(fill, view=replace(fill.view, name="", buffer=0, quant=None))
        found.setdefault(fill.view.buffer, set()).add(structure(anonymous))
    return {buffer: frozenset(group) for buffer, group in found.items()}


def _best_fit(block: _Block, size: int, alignment: int, allocated: Sequence[tuple[int, int, _Block]]) -> int:
    """Return the start of the tightest gap between the blocks alive with this one, or the end of them all.

    allocated: (start, end, block), sorted.
    """
    best, slack, free, first, last = -1, 0, 0, block.first, block.last
    for start, end, other in allocated:
        if other.first > last or first > other.last:
            continue
        left = start - free - size
        if left >= 0 and (best < 0 or left < slack):
            best, slack = free, left
        if end > free:
            free = -(-end // alignment) * alignment
    return best if best >= 0 else free


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library. Each CDLL makes a class, which takes longer than the calls."""
    return ctypes.CDLL(None)


class Memory:
    """Zeroed memory, on huge pages where the system has them; freed with the last view of it.

    Pages that are never touched take no physical memory.
    """

    def __init__(self, size: int, huge_pages: bool = True) -> None:
        """Map `size` bytes. Raises PlanError if the process cannot have them.

        huge_pages: False for memory that is touched sparsely.
        """
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
        if sys.platform == "linux" and (self.size >= HUGE_PAGE or not huge_pages):
            # Advice only: a kernel without huge pages refuses, and small pages work as well.
            _libc().madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size),
                                      MADV_HUGEPAGE if huge_pages else MADV_NOHUGEPAGE)

    def freeze(self) -> None:
        """Make the memory read-only: a kernel that writes to it by mistake raises SIGSEGV."""
        self.bytes.flags.writeable = False
        if sys.platform == "linux":
            _libc().mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), mmap.PROT_READ)


def on_cache_line(constants: bytes | memoryview) -> tuple[NDArray[np.uint8], int]:
    """Return constants as an array that begins on a cache line, and its address.

    Constants read from a plan file are page-aligned already; others are copied if they are not aligned.
    """
    array: NDArray[np.uint8] = np.ndarray((len(constants),), np.uint8, constants)
    if array.ctypes.data % CACHE_LINE:
        copy = Memory(len(array)).bytes
        copy[:len(array)] = array
        array = copy
    return array, array.ctypes.data


class _Lease:
    """Block of a MemoryPool, which returns to the pool when the last view of it is freed."""

    def __init__(self, memory: Memory, size: int) -> None:
        self._memory = memory
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (memory.address, False), "version": 3}


class MemoryPool:
    """Thread-safe pool that reuses the memory of freed contexts.

    The system clears each page at the first touch, 2 MiB at once for huge pages: at a new shape this takes longer than
    the run.
    """

    def __init__(self) -> None:
        self._free: list[Memory] = []           # at most _KEPT_BLOCKS, the last one returned at the end
        self._lock = threading.RLock()          # reentrant: a finalizer may return a block while it is held

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
    """Array that another process may write while it is read: a client's shared memory.

    The SLACK bytes after its end are readable, too.
    """
    address = 0             # its start, if the creator set it: ndarray.ctypes takes 3 us


def array_at(memory: NDArray[np.uint8], offset: int, view: TensorView, items: int) -> NDArray[Any]:
    """Return a NumPy view of the first `items` batch slots of a tensor.

    Parameters
    ----------
    memory : uint8 array
        Memory of the context.
    offset : int
        Offset in bytes of the view's buffer in `memory`.
    view : TensorView
    items : int
        Batch slots; ignored for a tensor without a batch axis.

    Returns
    -------
    ndarray
        The view's shape with `items` inserted at batch_axis: [28, items, 64] for items of [28, 64] and axis 1.
        bfloat16 is returned as the bits in uint16.
    """
    shape, strides = view.shape, view.strides
    if view.batched:
        axis = view.batch_axis
        shape, strides = ((*shape[:axis], items, *shape[axis:]),
                          (*strides[:axis], view.item_stride, *strides[axis:]))
    return np.ndarray(shape, memory_dtype(view.dtype), memory, offset + view.offset, strides)


def write_halo(array: NDArray[Any], fill: Fill, written: int) -> None:
    """Write a halo, without the tensor inside, in all batch slots after the first `written`, which have it already."""
    if written and not fill.view.batched:
        return
    value = to_bfloat16(np.array(fill.value)) if fill.view.dtype == "bfloat16" else fill.value
    axes = (slice(written, None),) if fill.view.batched else ()
    for before, behind in fill.halo:
        if before:
            array[(*axes, slice(before))] = value
        if behind:
            array[(*axes, slice(-behind, None))] = value
        axes = (*axes, slice(before, -behind or None))
