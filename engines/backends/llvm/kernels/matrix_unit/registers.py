"""Allocation of a matrix unit's tile registers to pixels and weights."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infer_server.engines.backends.llvm.codegen.tiles import AMX, MatrixUnit, Shapes


@dataclass(frozen=True)
class PixelRuns:
    """Division of a tile's pixels into x registers: runs of up to 16 pixels that are one pixel pitch apart.

    Each row of the tile has its own runs. If the pitch of rows is `wide` positions, one run continues through all rows,
    and the results at the positions between two rows are discarded.
    """
    rows: int
    cols: int
    wide: int = 0

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Return (row, column, positions) of each register.

        Runs of a row are as even as possible. Runs through all rows are of equal size, so that the last one may overlap
        the one before.
        """
        if self.wide:
            positions = (self.rows - 1) * self.wide + self.cols
            count = -(-positions // AMX.rows)
            size = -(-positions // count)
            return [(0, min(n * size, positions - size), size) for n in range(count)]
        return [(i, start, size) for i in range(self.rows) for start, size in _even(self.cols)]

    def position(self, i: int, j: int) -> int:
        """Return the number of pixel (i, j) among all positions."""
        return i * (self.wide or self.cols) + j


def _even(positions: int) -> Iterator[tuple[int, int]]:
    """Yield (start, size) of even pieces of up to 16 positions."""
    pieces = -(-positions // AMX.rows)
    for n in range(pieces):
        start = n * positions // pieces
        yield start, (n + 1) * positions // pieces - start


@dataclass(frozen=True)
class Registers:
    """Tile registers of a micro-kernel: accumulators first, then x, then weights.

    If registers are short, weights share those that are left in turn; with weights of one vector, x does so too.
    """
    unit: MatrixUnit
    rows: Sequence[int]         # pixels in each register of x
    vectors: int
    depth: int

    def c(self, t: int, v: int) -> int:
        return t * self.vectors + v

    @property
    def count_a(self) -> int:
        """Return the number of registers for x."""
        left = self.unit.registers - len(self.rows) * self.vectors - 1
        assert len(self.rows) <= left or self.vectors == 1 and len(set(self.rows)) == 1, "x cannot take turns"
        return min(len(self.rows), left)

    def a(self, t: int) -> int:
        return len(self.rows) * self.vectors + t % self.count_a

    def b(self, v: int) -> int:
        first = len(self.rows) * self.vectors + self.count_a
        return first + v % (self.unit.registers - first)

    @property
    def shapes(self) -> Shapes:
        shapes = {self.b(v): (self.depth // self.unit.group, self.unit.row_bytes) for v in range(self.vectors)}
        for t, rows in enumerate(self.rows):
            shapes[self.a(t)] = rows, self.depth
            shapes.update({self.c(t, v): (rows, self.unit.row_bytes) for v in range(self.vectors)})
        return shapes
