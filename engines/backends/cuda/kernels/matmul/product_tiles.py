"""Product of two run-time tensors on tensor cores: a warp computes 16 rows by 32 columns of y in registers.

    for 32 bytes of k:      sums[row, column] += a * b
    y = program(sums)

A lane loads its fragments (engines/backends/cuda/codegen/fragments.py) through the caches: words of four bytes if k is
contiguous, else single elements. In INT8, b - 128 is signed; with u = b - 128 and v = zb - 128

    sum of (a - za) * (b - zb) = sum of a * u  -  v * sum of a  -  za * sum of u  +  K * za * v

where the sums of a and of u are products by ones.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from infer_server.engines.backends.cuda.codegen.fragments import COUTS, TILE, Words, fragments
from infer_server.engines.backends.cuda.codegen.gpu import Gpu
from infer_server.engines.backends.cuda.codegen.module import wide
from infer_server.engines.backends.cuda.codegen.products import STEP
from infer_server.engines.backends.cuda.kernels.access import (
    load_channels,
    load_constants,
    offset_in,
    pixel_offset,
    run_program,
    store_channels,
    vector_width,
)
from infer_server.engines.backends.cuda.kernels.matmul.query_tiles import FLIP, ONES, Sums, words_of_column
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import FLOAT, I32
from infer_server.engines.lowering.problems.matmul import MIDDLE, Product
from infer_server.engines.lowering.problems.problem import STORED
from infer_server.engines.lowering.problems.view import View

ROWS, COLUMNS = TILE, 32        # per warp


def suits(problem: Product, gpu: Gpu, aligned: Sequence[int]) -> bool:
    """Return True if a, and b if its k is contiguous, can be read in words."""
    a, b = problem.a, problem.b
    words = [(a.strides[-1], a.strides[:-1], a.item, aligned[0])]
    if b.strides[-1] != b.size:
        words.append((b.strides[-2], (*b.strides[:-2], b.strides[-1]), b.item, aligned[1]))
    return (gpu.has_mma(problem.precision) and {a.dtype, b.dtype} == {STORED[problem.precision]}
            and problem.depth * a.size % 4 == 0
            and all(step == a.size and math.gcd(4, base, item, *others) == 4 for step, others, item, base in words))


def tiles_of(problem: Product) -> int:
    """Return the number of tiles per item."""
    return math.prod(problem.lead) * -(-problem.y.shape[-2] // ROWS) * -(-problem.y.shape[-1] // COLUMNS)


class ProductTile:
    """Emitter of one tile. All lanes of the warp take part; rows and columns past the end repeat the last one."""

    def __init__(self, problem: Product, gpu: Gpu, aligned: Sequence[int], operands: list[Value], tile: Value,
                 lane: Value, size: tuple[int, int] = (ROWS, COLUMNS)) -> None:
        """Begin the code of a tile of `size` rows and columns."""
        f = tile.f
        self.problem, self.gpu, self.f, self.integers = problem, gpu, f, problem.precision == "int8"
        self.stored = list(zip((*problem.operands, problem.y), aligned[2:], strict=True))
        a, b, *self.others, numbers, self.constants, self.y = operands
        self.zeros = [f.load(FLOAT, numbers + 4 * n, 4, "zero") for n in (0, 1)]
        self.lanes = fragments(gpu, problem.precision, lane)
        rows, columns = (-(-extent // step) for extent, step in zip(problem.y.shape[-2:], size, strict=True))
        self.matrix, position = tile.divided(rows * columns), tile.remainder(rows * columns)
        self.row0, self.column0 = position.divided(columns) * size[0], position.remainder(columns) * size[1]
        self.at_a, self.at_b = (address + pixel_offset(self.matrix, view.shape[:-2], view.strides[:-2], view.item)
                                for address, view in ((a, problem.a), (b, problem.b)))

    def write(self, valid: Value) -> None:
        problem, f, (height, width) = self.problem, self.f, self.problem.y.shape[-2:]
        rows = [self.at_a + wide((self.row0 + row).at_most(height - 1)) * problem.a.strides[-2]
                for row in self.lanes.rows]
        pairs = [[self.at_b + wide((self.column0 + (column + first)).at_most(width - 1)) * problem.b.strides[-1]
                  for column in self.lanes.columns] for first in range(0, COLUMNS, TILE)]
        acc, of_b, of_a = self._nothing()
        for turn in f.loop("k", -(-problem.depth * problem.a.size // STEP), acc=acc, u=of_b, a=of_a):
            positions, ones = self._positions(f.cast("trunc", turn, I32, "turn") * STEP)
            words = [[self._word(start, position, one) for position, one in zip(positions, ones, strict=True)]
                     for start in rows]
            for pair, starts in enumerate(pairs):
                b = [self._column(start, positions) for start in starts]
                self._multiply(acc, pair, words, b)
                if self.integers:
                    self._multiply(of_b, pair, [ones, ones], b)
            if self.integers:
                of_a.update(enumerate(self.lanes.multiply([*of_a.values()], words, [ones])))
        self._store(self._whole(acc, of_b, of_a), self.row0, self.column0, valid)

    def _nothing(self) -> tuple[Sums, Sums, dict[int, Value]]:
        """Return zero sums of a * u and, for INT8, of u and of a."""
        zero = self.f.constant(0, I32 if self.integers else FLOAT)
        acc = {(n, e): zero for n in range(COLUMNS // COUTS) for e in range(4)}
        return acc, dict(acc) if self.integers else {}, dict.fromkeys(range(4), zero) if self.integers else {}

    def _whole(self, acc: Sums, of_b: Sums, of_a: dict[int, Value]) -> Sums:
        """Combine the three sums into the product."""
        if not self.integers:
            return acc
        za, v = self.gpu.round(self.zeros[0]), self.gpu.round(self.zeros[1]) - MIDDLE
        rest = za * v * self.problem.depth
        return {(n, e): self.gpu.to_float(total - v * of_a[e] - za * of_b[n, e] + rest)
                for (n, e), total in acc.items()}

    def _multiply(self, acc: Sums, pair: int, a: Words, b: Words) -> None:
        keys = [(2 * pair + n, e) for n in (0, 1) for e in range(4)]
        acc.update(zip(keys, self.lanes.multiply([acc[key] for key in keys], a, b), strict=True))

    def _positions(self, first: Value) -> tuple[list[Value], list[Value]]:
        """Return byte offsets within k, and words of ones, for a lane's words from byte `first` of k on.

        Past the end of k both are zeros.
        """
        f, size = self.f, self.problem.depth * self.problem.a.size
        one = f.constant(ONES, I32)
        positions = [first + byte for byte in self.lanes.bytes]
        if size % STEP == 0:
            return positions, [one] * len(positions)
        inside = [position.below(size) for position in positions]
        return ([f.select(test, position, position.like(0), "place") for test,
                 position in zip(inside, positions, strict=True)],
                [f.select(test, one, one.like(0), "ones") for test in inside])

    def _word(self, start: Value, position: Value, one: Value) -> Value:
        """Load a word of a, or 0 past the end of k, so that b's values there do not matter."""
        word = self.f.load(I32, start + wide(position), 4, "word")
        if self.problem.depth * self.problem.a.size % STEP == 0:
            return word
        return self.f.select(one.compare("ne", 0), word, word.like(0), "word")

    def _column(self, start: Value, positions: Sequence[Value]) -> list[Value]:
        view, size = self.problem.b, self.problem.b.size
        if view.strides[-2] == size:
            words = [self.f.load(I32, start + wide(position), 4, "word") for position in positions]
            return [word ^ FLIP for word in words] if self.integers else words
        elements = [start + wide(position.divided(size) + k) * view.strides[-2] for position in positions
                    for k in range(4 // size)]
        return words_of_column(view, elements)

    # ---- y
    def _runs(self) -> list[tuple[Value, list[tuple[int, int]]]]:
        """Return the runs of neighbouring columns of a lane: the first column, and the sums (n, c) of each row."""
        return [(self.lanes.t * 2 + n * COUTS, [(n, 0), (n, 1)]) for n in range(COLUMNS // COUTS)]

    def _store(self, acc: Sums, row0: Value, column0: Value, valid: Value) -> None:
        problem, f, gpu = self.problem, self.f, self.gpu
        height, width = problem.y.shape[-2:]
        for row in (0, 1):
            index = row0 + (self.lanes.row + row * self.lanes.apart)
            pixel = self.matrix * height + index
            for begin, run in self._runs():
                each = vector_width(self.stored, width, len(run))
                for first in range(0, len(run), each):
                    column = column0 + begin + first
                    with f.when(valid & index.below(height) & column.below(width)):
                        sums = [acc[n, 2 * row + c] for n, c in run[first:first + each]]
                        numbers = load_constants(f, self.constants, column, each, problem.program.constants, width)
                        others = [load_channels(gpu, view, self._at(view, address, pixel, column), each)
                                  for view, address in zip(problem.operands, self.others, strict=True)]
                        results = run_program(gpu, problem.program, sums, others, numbers)
                        store_channels(gpu, problem.y, results, self._at(problem.y, self.y, pixel, column))

    def _at(self, view: View, address: Value, pixel: Value, column: Value) -> Value:
        return address + offset_in(view, pixel) + wide(column) * view.strides[-1]
