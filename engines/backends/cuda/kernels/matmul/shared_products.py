"""The product of two run-time tensors on tensor cores, out of shared memory: a block for 64 rows by 64 columns of y, a
warp for 32 by 32 of them.

    for 64 bytes of k after 64 bytes of k, while the next ones are copied:
        sums[row, column] += a * b

a lies there by rows of k; so does b where its k is contiguous, else by columns, and then it comes transposed
(ldmatrix.trans) by units of two bytes. Of bytes a lane so has two neighbouring columns, where it is to have one of
COUTS and one of the next (`_runs`), of the k that stand beside each other in a: those rows are asked for (two of eight
of them share their banks). A row is followed by 16 bytes that nobody reads: eight rows lie in eight groups of banks.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from engines.backends.cuda.codegen.copies import CHUNK, commit, copy_chunk, wait
from engines.backends.cuda.codegen.fragments import TILE, Words
from engines.backends.cuda.codegen.gpu import WARP, Gpu
from engines.backends.cuda.codegen.module import barrier, pick_bytes, shared, where, wide
from engines.backends.cuda.codegen.products import STEP, load_tiles
from engines.backends.cuda.kernels.access import alignment
from engines.backends.cuda.kernels.matmul.product_tiles import COLUMNS, ProductTile
from engines.backends.cuda.kernels.matmul.query_tiles import FLIP
from engines.codegen.ir_builder import Value
from engines.codegen.types import I32
from engines.lowering.problems.matmul import Product
from engines.lowering.problems.problem import STORED
from engines.lowering.problems.view import View

BLOCK = 64                      # rows, and columns
ROWS = 32                       # of a warp
WARPS, STAGES, DEPTH = 4, 3, 64     # DEPTH: bytes of k of a stage
THREADS = WARPS * WARP
PITCH = DEPTH + CHUNK           # bytes from a row of k to the next in shared memory


def suits(problem: Product, gpu: Gpu, aligned: Sequence[int]) -> bool:
    """Whether both can be copied by whole chunks, and there are rows for a second tile."""
    a, b = problem.a, problem.b
    if not (gpu.by_warp(problem.precision) and {a.dtype, b.dtype} == {STORED[problem.precision]}
            and problem.y.shape[-2] > TILE and a.strides[-1] == a.size):
        return False
    rows = [(a, aligned[0], problem.depth)]
    if by_columns(b):
        rows.append((b, aligned[1], b.shape[-1]))
    elif b.strides[-2] == b.size:
        rows.append((View(b.dtype, b.shape, (*b.strides[:-2], b.strides[-1], b.size), b.item), aligned[1],
                     problem.depth))
    return len(rows) == 2 and all(
        alignment(view, base) % CHUNK == 0 and extent * view.size % CHUNK == 0 for view, base, extent in rows)


def by_columns(b: View) -> bool:
    """Whether a row of b has neighbouring columns."""
    return b.strides[-1] == b.size


def blocks_of(problem: Product) -> int:
    """Of an item."""
    return math.prod(problem.lead) * math.prod(-(-extent // BLOCK) for extent in problem.y.shape[-2:])


def shared_bytes(problem: Product) -> int:
    return STAGES * (BLOCK * PITCH + _rows_of_b(problem.b) * _pitch_of_b(problem.b))


def _rows_of_b(b: View) -> int:
    return DEPTH // b.size if by_columns(b) else BLOCK


def _pitch_of_b(b: View) -> int:
    return BLOCK * b.size + CHUNK if by_columns(b) else PITCH


class SharedProduct(ProductTile):
    """Writes the part of a warp. All of a block take part."""

    def __init__(self, problem: Product, gpu: Gpu, aligned: Sequence[int], operands: list[Value], block: Value,
                 thread: Value) -> None:
        self.thread, self.lane, warp = thread, thread & WARP - 1, thread.divided(WARP)
        super().__init__(problem, gpu, aligned, operands, block, self.lane, (BLOCK, BLOCK))
        self.warp_row, self.warp_column = (warp & 1) * ROWS, warp.divided(2) * COLUMNS
        self.stage_bytes = shared_bytes(problem) // STAGES
        self.across = by_columns(problem.b)

    def write(self, there: Value) -> None:
        f, gpu = self.f, self.gpu
        of_rows = [self._nothing() for _ in range(0, ROWS, TILE)]
        of_b = of_rows[0][1]            # of every row alike
        carried = {f"rows{m}": acc for m, (acc, _, _) in enumerate(of_rows)}
        sums = {f"a{m}": of_a for m, (_, _, of_a) in enumerate(of_rows)}
        stage = {"read": f.constant(0, I32), "write": f.constant((STAGES - 1) * self.stage_bytes, I32)}
        for turn in range(STAGES - 1):
            self._copy(f.constant(turn * DEPTH, I32), f.constant(turn * self.stage_bytes, I32))
        turns = -(-self.problem.depth * self.problem.a.size // DEPTH)
        for k in f.loop("k", turns, stage=stage, u=of_b, **carried, **sums):
            if gpu.async_copy:
                wait(f, STAGES - 2)
            barrier(f)
            first = f.cast("trunc", k, I32, "k") * DEPTH
            self._copy(first + (STAGES - 1) * DEPTH, stage["write"])
            for step in range(0, DEPTH, STEP):
                _, ones = self._places(first + step)
                pairs = [self._words_of_b(stage["read"], step, pair) for pair in range(COLUMNS // TILE)]
                for m, (acc, _, of_a) in enumerate(of_rows):
                    a = self._words_of_a(stage["read"], step, m)
                    for pair, b in enumerate(pairs):
                        self._multiply(acc, pair, a, b)
                    if self.integers:
                        of_a.update(enumerate(self.lanes.multiply([*of_a.values()], a, [ones])))
                for pair, b in enumerate(pairs if self.integers else ()):
                    self._multiply(of_b, pair, [ones, ones], b)
            stage.update({key: self._next(at) for key, at in stage.items()})
        if gpu.async_copy:
            wait(f, 0)
        for m, (acc, _, of_a) in enumerate(of_rows):
            self._store(self._whole(acc, of_b, of_a), self.row0 + self.warp_row + m * TILE,
                        self.column0 + self.warp_column, there)

    def _next(self, stage: Value) -> Value:
        after = stage + self.stage_bytes
        return self.f.select(after.compare("eq", STAGES * self.stage_bytes), after.like(0), after, "stage")

    # ---- to shared memory
    def _copy(self, first: Value, stage: Value) -> None:
        """The bytes of k from the first on; zeros behind the last."""
        problem, (height, width) = self.problem, self.problem.y.shape[-2:]
        a, b, size = problem.a, problem.b, problem.depth * problem.a.size
        to_b = stage + BLOCK * PITCH
        self._copy_rows(BLOCK, DEPTH, lambda row, byte: (
            self.at_a + wide((self.row0 + row).at_most(height - 1)) * a.strides[-2], (first + byte), size), stage)
        if self.across:
            self._copy_rows(_rows_of_b(b), BLOCK * b.size, lambda row, byte: self._columns(
                first.divided(b.size) + row, self.column0 * b.size + byte), to_b)
        else:
            self._copy_rows(BLOCK, DEPTH, lambda row, byte: (
                self.at_b + wide((self.column0 + row).at_most(width - 1)) * b.strides[-1], first + byte, size), to_b)
        if self.gpu.async_copy:
            commit(self.f)

    def _columns(self, k: Value, byte: Value) -> tuple[Value, Value, int]:
        """A source of b by columns: of a k behind the last there is no byte."""
        b, size = self.problem.b, self.problem.b.shape[-1] * self.problem.b.size
        place = self.f.select(k.below(self.problem.depth), byte, byte.like(size), "byte")
        return self.at_b + wide(k.at_most(self.problem.depth - 1)) * b.strides[-2], place, size

    def _copy_rows(self, rows: int, size: int, source: Callable[[Value, Value], tuple[Value, Value, int]],
                   to: Value) -> None:
        """Rows of so many bytes. source: of a row and a byte of it, where the tensor's row begins, which byte of that
        it is, and how many there are; zeros stand for the others."""
        chunks = size // CHUNK
        for i in range(rows * chunks // THREADS):
            row, byte = self.thread.divided(chunks) + i * (THREADS // chunks), self.thread.remainder(chunks) * CHUNK
            start, place, end = source(row, byte)
            there = place.below(end)
            at = self.f.select(there, place, place.like(0), "place")
            copy_chunk(self.gpu, shared(self.f) + (to + (row * (size + CHUNK) + byte)), start + wide(at),
                       where(there, CHUNK))

    # ---- from shared memory
    def _words_of_a(self, stage: Value, step: int, m: int) -> Words:
        lane = self.lane
        at = stage + ((self.warp_row + (lane & 15)) * PITCH + lane.binary("lshr", 4) * CHUNK)
        tile = load_tiles(shared(self.f) + at + (m * TILE * PITCH + step))
        return [[tile[0], tile[2]], [tile[1], tile[3]]]

    def _words_of_b(self, stage: Value, step: int, pair: int) -> Words:
        lane, b = self.lane, self.problem.b
        first = stage + BLOCK * PITCH
        if not self.across:
            row = self.warp_column + (lane & 7) + (lane.binary("lshr", 4) << 3)
            at = first + (row * PITCH + (lane.binary("lshr", 3) & 1) * CHUNK)
            tile = load_tiles(shared(self.f) + at + (pair * TILE * PITCH + step))
            words: Words = [tile[:2], tile[2:]]
            return [[word ^ FLIP for word in column] for column in words] if self.integers else words
        pitch, column = _pitch_of_b(b), self.warp_column * b.size
        if not self.integers:
            at = first + ((lane & 15) * pitch + lane.binary("lshr", 4) * CHUNK + column)
            tile = load_tiles(shared(self.f) + at + (step // b.size * pitch + pair * TILE * b.size), across=True)
            return [tile[:2], tile[2:]]
        k = (lane & 1) + (lane.binary("lshr", 2) & 2) + ((lane & 6) << 1) + (lane & 16)
        at = first + (k * pitch + column)
        tile = load_tiles(shared(self.f) + at + (step * pitch + pair * TILE), across=True)
        first_8, next_8, third_8, last_8 = (word ^ FLIP for word in tile)
        return [[pick_bytes(first_8, next_8, order), pick_bytes(third_8, last_8, order)] for order in (0x6420, 0x7531)]

    def _runs(self) -> list[tuple[Value, list[tuple[int, int]]]]:
        if not (self.integers and self.across):
            return super()._runs()
        return [(self.lanes.t * 4 + pair * TILE, [(2 * pair + n, c) for c in (0, 1) for n in (0, 1)])
                for pair in range(COLUMNS // TILE)]
