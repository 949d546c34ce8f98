"""How kernels walk views: fewer axes, offsets, runs along the innermost axis."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.kernel import Window
from engines.codegen.extents import Extent
from engines.codegen.ir_builder import Function, Value
from engines.codegen.types import I8, I64, PTR, vector
from engines.lowering.problems.view import View

TAILS = (16, 8, 4, 2, 1)        # what is left after full tiles, a number known at run time only, is cut into
BLOCK = 1 << 13     # elements of a row of the grid: enough to pay for its call, few enough to share out


def unravel(index: Value, shape: Sequence[int]) -> list[Value]:
    """The indices along each axis of element `index` (a run-time i64) in row-major order."""
    indices = []
    for extent in reversed(shape[1:]):
        indices.append(index.remainder(extent))
        index = index.divided(extent)
    return [index, *reversed(indices)] if shape else []


def offset(address: Value, indices: Sequence[Value], strides: Sequence[int]) -> Value:
    """The address moved by index * stride along each axis."""
    for index, stride in zip(indices, strides, strict=True):
        if stride:
            address = address + index * stride
    return address


def copy_bytes(isa: Isa, source: Value, target: Value, count: int) -> None:
    """`count` bytes by vectors as wide as they come, unrolled."""
    f = source.f
    for first in range(0, count, isa.bytes):
        part = vector(min(count - first, isa.bytes), I8)
        f.store(f.load(part, source + first), target + first)


def transposed(rows: list[Value]) -> list[Value]:
    """n vectors of n -> the columns. A zip of rows i and i + n/2 rotates the bits of an element's index by one."""
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
    """n vectors of n lanes as one: lane j is the sum of vector j's."""
    n = len(vectors)
    distance = n // 2
    while distance:
        own = [i + n * bool(i & distance) for i in range(n)]            # lane i of the one, or of the other
        others = [(i ^ distance) + n * bool(i & distance) for i in range(n)]
        vectors = [a.f.shuffle(a, b, own, "own") + a.f.shuffle(a, b, others, "others")
                   for a, b in zip(vectors[:distance], vectors[distance:], strict=True)]
        distance //= 2
    return vectors[0]


def item_addresses(addresses: Sequence[Value], views: Sequence[View], item: Value) -> list[Value]:
    return [offset(address, [item], [view.item]) for address, view in zip(addresses, views, strict=True)]


def each_row(f: Function, begin: Value, end: Value, addresses: Sequence[Value], views: Sequence[View],
             outer: Sequence[int]) -> Iterator[list[Value]]:
    """For each row of the grid its address in each view; outer: the extents of the leading axes, whose indices are the
    rows of an item."""
    count = math.prod(outer)
    for row in f.range("row", begin, end):
        at = item_addresses(addresses, views, row.divided(count))
        indices = unravel(row.remainder(count), outer)
        yield [offset(a, indices, view.strides[:len(outer)]) for a, view in zip(at, views, strict=True)]


@dataclass(frozen=True)
class Runs:
    """Joined views as runs along the innermost axis, and their cut into rows of the grid of about BLOCK elements.

    With one axis a row of the grid is a block of it; otherwise it is a block of neighbours on the last axis but one.
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
        """The extent that is cut into blocks."""
        return self.shape[max(len(self.shape) - 2, 0)]

    @property
    def blocks(self) -> int:
        return -(-self.cut // self.block)

    @property
    def rows(self) -> int:
        """Of the grid, for an item."""
        return math.prod(self.shape[:-2]) * self.blocks

    def windows(self) -> list[Window]:
        """What a row of the grid touches of each view."""
        outer = self.shape[:-2]
        if outer:
            return [Window.along(view, 0, math.prod(outer[1:]) * self.blocks) for view in self.views]
        block = min(self.block, self.cut)
        return [Window.along(view, 0, 1, block, count=block) for view in self.views]

    def emit(self, f: Function, addresses: Sequence[Value], begin: Value, end: Value, width: int,
             body: Callable[[list[Value], Value, int], None], anyhow: bool = True) -> None:
        """body(addresses of the run, start, count) for each `width` elements, and for a run's tail.

        width divides BLOCK. The addresses are those of element 0 of the run. anyhow: see Function.tiles.
        """
        outer = self.shape[:-2]
        for row in f.range("row", begin, end):
            at = item_addresses(addresses, self.views, row.divided(self.rows))
            *outer_indices, block = unravel(row.remainder(self.rows), (*outer, self.blocks))
            at = [offset(a, outer_indices, view.strides[:len(outer)]) for a, view in zip(at, self.views, strict=True)]
            if len(self.shape) == 1:
                self._part_of_run(f, at, block * self.block, width, body, anyhow)
                continue
            last = (block * self.block + self.block).at_most(self.shape[-2])
            for pixel in f.range("pixel", block * self.block, last):
                here = [offset(a, [pixel], [view.strides[-2]]) for a, view in zip(at, self.views, strict=True)]
                for start, count in f.tiles("element", self.shape[-1], width, anyhow):
                    body(here, start, count)

    def _part_of_run(self, f: Function, at: list[Value], first: Value, width: int,
                     body: Callable[[list[Value], Value, int], None], anyhow: bool) -> None:
        extent = self.shape[0]
        last = (first + self.block).at_most(extent - extent % width)
        for start in f.range("element", first, last, width):
            body(at, start, width)
        rest = extent % width
        if anyhow and isinstance(extent, Extent) or rest:
            with f.when((first + self.block).compare("uge", extent)):
                for start, count in f.tail(extent, width) if anyhow else [(f.constant(extent - rest, I64), rest)]:
                    body(at, start, count)


def tails(whole: Value, rest: Value, step: int) -> Iterator[tuple[Value, int]]:
    """(start, size) of tiles for the `rest` of less than `step`, behind `whole` tiles of that size: one of TAILS for
    each of its bits, in code that runs where the bit is set."""
    assert step <= 2 * TAILS[0], "a tile whose rest has a bit that is none of TAILS"
    for size in TAILS:
        if size < step:
            with rest.f.when(rest.binary("and", size).compare("ne", 0)):
                yield whole * step + rest.binary("and", -2 * size), size


def hidden(address: Value) -> Value:
    """The same address, unknown to LLVM: loads from it are no repetition of earlier loads."""
    return address.f.op(PTR, f'call ptr asm sideeffect "", "=r,0"({address})', "hidden")
