"""Traversal of strided views: fewer axes, byte offsets, runs along the innermost axis."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.kernel import Window
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import I8, I64, PTR, vector
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.lowering.problems.view import View

TAILS = (16, 8, 4, 2, 1)        # tile sizes for the rest after full tiles, if it is known at run time only
BLOCK = 1 << 13     # elements in a row of the grid: enough to amortise a call, few enough to share among threads


def unravel(index: Value, shape: Sequence[int]) -> list[Value]:
    """Return the indices along each axis of element `index` (a run-time i64) in row-major order."""
    indices = []
    for extent in reversed(shape[1:]):
        indices.append(index.remainder(extent))
        index = index.divided(extent)
    return [index, *reversed(indices)] if shape else []


def offset(address: Value, indices: Sequence[Value], strides: Sequence[int]) -> Value:
    """Return the address moved by index * stride along each axis."""
    for index, stride in zip(indices, strides, strict=True):
        if stride:
            address = address + index * stride
    return address


def copy_bytes(isa: Isa, source: Value, target: Value, count: int) -> None:
    """Copy `count` bytes with the widest vectors, unrolled."""
    f = source.f
    for first in range(0, count, isa.bytes):
        part = vector(min(count - first, isa.bytes), I8)
        f.store(f.load(part, source + first), target + first)


def transposed(rows: list[Value]) -> list[Value]:
    """Transpose n vectors of n lanes, n a power of two, by log2(n) rounds of zips of rows i and i + n/2."""
    n = len(rows)
    for _ in range(n.bit_length() - 1):
        zipped = []
        for a, b in zip(rows[:n // 2], rows[n // 2:], strict=True):
            for half in (0, n // 2):
                mask = [half + i // 2 + i % 2 * n for i in range(n)]
                zipped.append(a.f.shuffle(a, b, mask, "zip"))
        rows = zipped
    return rows


def lane_sums(vectors: Sequence[Value]) -> Value:
    """Reduce n vectors of n lanes to one vector: lane j is the sum of the lanes of vector j."""
    return reduced_lanes(vectors, lambda a, b: a + b)


def reduced_lanes(vectors: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """Reduce n vectors of n lanes to one vector: lane j combines the lanes of vector j, halves of them at a time."""
    n = len(vectors)
    distance = n // 2
    while distance:
        own = [i + n * bool(i & distance) for i in range(n)]            # lane i of a, or of b
        others = [(i ^ distance) + n * bool(i & distance) for i in range(n)]
        vectors = [combine(a.f.shuffle(a, b, own, "own"), a.f.shuffle(a, b, others, "others"))
                   for a, b in zip(vectors[:distance], vectors[distance:], strict=True)]
        distance //= 2
    return vectors[0]


def item_addresses(addresses: Sequence[Value], views: Sequence[View], item: Value) -> list[Value]:
    """Return the address of an item in each view."""
    return [offset(address, [item], [view.item]) for address, view in zip(addresses, views, strict=True)]


def each_row(f: Function, begin: Value, end: Value, addresses: Sequence[Value], views: Sequence[View],
             outer: Sequence[int]) -> Iterator[list[Value]]:
    """Loop over rows of the grid, and yield the row's address in each view.

    Parameters
    ----------
    begin, end : rows of the grid.
    addresses, views : tensors.
    outer : extents of the leading axes; each of their indices is a row of the item.
    """
    count = math.prod(outer)
    for row in f.range("row", begin, end):
        at = item_addresses(addresses, views, row.divided(count))
        indices = unravel(row.remainder(count), outer)
        yield [offset(a, indices, view.strides[:len(outer)]) for a, view in zip(at, views, strict=True)]


@dataclass(frozen=True)
class ViewRuns:
    """Views as runs along the innermost axis, split into rows of the grid of about BLOCK elements.

    With one axis a row of the grid is a block of it; otherwise it is a block of neighbours on the second to last axis.
    """
    views: tuple[View, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.views[0].shape

    @property
    def block(self) -> int:
        return BLOCK if len(self.shape) == 1 else max(BLOCK // self.shape[-1], 1)

    @property
    def cut(self) -> int:
        """Return the extent of the axis that is split into blocks."""
        return self.shape[max(len(self.shape) - 2, 0)]

    @property
    def blocks(self) -> int:
        return -(-self.cut // self.block)

    @property
    def rows(self) -> int:
        """Return the number of grid rows of an item."""
        return math.prod(self.shape[:-2]) * self.blocks

    def windows(self) -> list[Window]:
        """Return the window of each view that a row of the grid accesses."""
        outer = self.shape[:-2]
        if outer:
            return [Window.along(view, 0, math.prod(outer[1:]) * self.blocks) for view in self.views]
        block = min(self.block, self.cut)
        return [Window.along(view, 0, 1, block, count=block) for view in self.views]

    def emit(self, f: Function, addresses: Sequence[Value], begin: Value, end: Value, width: int,
             body: Callable[[list[Value], Value, int], None], split_tail: bool = True) -> None:
        """Emit the loops: body(addresses, start, count) for each `width` elements of a run, and for its tail.

        width divides BLOCK. The addresses are those of element 0 of the run. split_tail: see Function.tiles.
        """
        outer = self.shape[:-2]
        for row in f.range("row", begin, end):
            at = item_addresses(addresses, self.views, row.divided(self.rows))
            *outer_indices, block = unravel(row.remainder(self.rows), (*outer, self.blocks))
            at = [offset(a, outer_indices, view.strides[:len(outer)]) for a, view in zip(at, self.views, strict=True)]
            if len(self.shape) == 1:
                self._part_of_run(f, at, block * self.block, width, body, split_tail)
                continue
            last = (block * self.block + self.block).at_most(self.shape[-2])
            for pixel in f.range("pixel", block * self.block, last):
                here = [offset(a, [pixel], [view.strides[-2]]) for a, view in zip(at, self.views, strict=True)]
                for start, count in f.tiles("element", self.shape[-1], width, split_tail):
                    body(here, start, count)

    def _part_of_run(self, f: Function, at: list[Value], first: Value, width: int,
                     body: Callable[[list[Value], Value, int], None], split_tail: bool) -> None:
        extent = self.shape[0]
        last = (first + self.block).at_most(extent - extent % width)
        for start in f.range("element", first, last, width):
            body(at, start, width)
        rest = extent % width
        if split_tail and isinstance(extent, SymbolicInt) or rest:
            with f.when((first + self.block).compare("uge", extent)):
                for start, count in f.tail(extent, width) if split_tail else [(f.constant(extent - rest, I64), rest)]:
                    body(at, start, count)


def tails(whole: Value, rest: Value, step: int) -> Iterator[tuple[Value, int]]:
    """Yield (start, size) of tiles for the elements after `whole` full tiles of size `step`.

    Parameters
    ----------
    whole, rest : run-time numbers of full tiles, and of remaining elements (< step).
    step : size of a full tile, at most 32.

    There is one tile of TAILS for each bit of `rest`, in code that runs if the bit is set.
    """
    assert step <= 2 * TAILS[0], "a tile whose rest has a bit that is none of TAILS"
    for size in TAILS:
        if size < step:
            with rest.f.when(rest.binary("and", size).compare("ne", 0)):
                yield whole * step + rest.binary("and", -2 * size), size


def hidden(address: Value) -> Value:
    """Return the address as an opaque value, so that LLVM does not reuse earlier loads from it."""
    return address.f.op(PTR, f'call ptr asm sideeffect "", "=r,0"({address})', "hidden")
