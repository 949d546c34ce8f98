"""Product of two run-time tensors on tensor cores from shared memory: 64 x 64 of y per block, 32 x 32 per warp.

    for each 64 bytes of k, while later ones are copied:
        sums[row, column] += a * b

a is stored in rows of k. So is b if its k is contiguous; otherwise b is stored in rows of columns and transposed by
ldmatrix.trans in units of two bytes. With bytes a lane then gets two neighbouring columns, instead of one of COUTS and
one of the next (`_runs`), for the k that are adjacent in a: these rows are addressed (two of each eight share banks).
Rows are padded by 16 bytes, so that eight rows cover eight groups of banks.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from infer_server.engines.backends.cuda.codegen.copies import CHUNK, commit, copy_chunk, wait
from infer_server.engines.backends.cuda.codegen.fragments import TILE, Words
from infer_server.engines.backends.cuda.codegen.gpu import WARP, Gpu
from infer_server.engines.backends.cuda.codegen.module import barrier, number_if, pick_bytes, shared, wide
from infer_server.engines.backends.cuda.codegen.products import STEP, load_tiles
from infer_server.engines.backends.cuda.kernels.access import alignment
from infer_server.engines.backends.cuda.kernels.matmul.product_tiles import COLUMNS, ProductTile
from infer_server.engines.backends.cuda.kernels.matmul.query_tiles import FLIP
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import I32
from infer_server.engines.lowering.problems.matmul import Product
from infer_server.engines.lowering.problems.problem import STORED
from infer_server.engines.lowering.problems.view import View

BLOCK = 64                      # rows and columns per block
ROWS = 32                       # per warp
WARPS, STAGES, DEPTH = 4, 3, 64     # DEPTH: bytes of k per stage
THREADS = WARPS * WARP
PITCH = DEPTH + CHUNK           # bytes between rows of k in shared memory


def suits(problem: Product, gpu: Gpu, aligned: Sequence[int]) -> bool:
    """Return True if both factors can be copied in whole chunks, and y has rows for a second tile."""
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
    """Return True if a row of b is contiguous along its columns."""
    return b.strides[-1] == b.size


def blocks_of(problem: Product) -> int:
    """Return the number of blocks per item."""
    return math.prod(problem.lead) * math.prod(-(-extent // BLOCK) for extent in problem.y.shape[-2:])


def shared_bytes(problem: Product) -> int:
    """Return the bytes of shared memory per block."""
    return STAGES * (BLOCK * PITCH + _rows_of_b(problem.b) * _pitch_of_b(problem.b))


def _rows_of_b(b: View) -> int:
    return DEPTH // b.size if by_columns(b) else BLOCK


def _pitch_of_b(b: View) -> int:
    return BLOCK * b.size + CHUNK if by_columns(b) else PITCH


class SharedProduct(ProductTile):
    """Emitter of a warp's part of a block. All threads of the block take part."""

    def __init__(self, problem: Product, gpu: Gpu, aligned: Sequence[int], operands: list[Value], block: Value,
                 thread: Value) -> None:
        self.thread, self.lane, warp = thread, thread & WARP - 1, thread.divided(WARP)
        super().__init__(problem, gpu, aligned, operands, block, self.lane, (BLOCK, BLOCK))
        self.warp_row, self.warp_column = (warp & 1) * ROWS, warp.divided(2) * COLUMNS
        self.stage_bytes = shared_bytes(problem) // STAGES
        self.transposed = by_columns(problem.b)

    def write(self, valid: Value) -> None:
        f, gpu = self.f, self.gpu
        of_rows = [self._nothing() for _ in range(0, ROWS, TILE)]
        of_b = of_rows[0][1]            # shared by all rows
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
                _, ones = self._positions(first + step)
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
                        self.column0 + self.warp_column, valid)

    def _next(self, stage: Value) -> Value:
        after = stage + self.stage_bytes
        return self.f.select(after.compare("eq", STAGES * self.stage_bytes), after.like(0), after, "stage")

    # ---- copies to shared memory
    def _copy(self, first: Value, stage: Value) -> None:
        """Copy a stage of k from byte `first` on; past the end of k it is zeros."""
        problem, (height, width) = self.problem, self.problem.y.shape[-2:]
        a, b, size = problem.a, problem.b, problem.depth * problem.a.size
        to_b = stage + BLOCK * PITCH
        self._copy_rows(BLOCK, DEPTH, lambda row, byte: (
            self.at_a + wide((self.row0 + row).at_most(height - 1)) * a.strides[-2], (first + byte), size), stage)
        if self.transposed:
            self._copy_rows(_rows_of_b(b), BLOCK * b.size, lambda row, byte: self._columns(
                first.divided(b.size) + row, self.column0 * b.size + byte), to_b)
        else:
            self._copy_rows(BLOCK, DEPTH, lambda row, byte: (
                self.at_b + wide((self.column0 + row).at_most(width - 1)) * b.strides[-1], first + byte, size), to_b)
        if self.gpu.async_copy:
            commit(self.f)

    def _columns(self, k: Value, byte: Value) -> tuple[Value, Value, int]:
        """Return the source of a row of b, with no valid bytes if k is past the end."""
        b, size = self.problem.b, self.problem.b.shape[-1] * self.problem.b.size
        position = self.f.select(k.below(self.problem.depth), byte, byte.like(size), "byte")
        return self.at_b + wide(k.at_most(self.problem.depth - 1)) * b.strides[-2], position, size

    def _copy_rows(self, rows: int, size: int, source: Callable[[Value, Value], tuple[Value, Value, int]],
                   to: Value) -> None:
        """Copy `rows` rows of `size` bytes to shared memory, with zeros for invalid bytes.

        `source` maps a row and a byte to the start of the tensor's row, the byte in it, and its number of valid bytes.
        """
        chunks = size // CHUNK
        for i in range(rows * chunks // THREADS):
            row, byte = self.thread.divided(chunks) + i * (THREADS // chunks), self.thread.remainder(chunks) * CHUNK
            start, position, end = source(row, byte)
            valid = position.below(end)
            at = self.f.select(valid, position, position.like(0), "place")
            copy_chunk(self.gpu, shared(self.f) + (to + (row * (size + CHUNK) + byte)), start + wide(at),
                       number_if(valid, CHUNK))

    # ---- fragments from shared memory
    def _words_of_a(self, stage: Value, step: int, m: int) -> Words:
        lane = self.lane
        at = stage + ((self.warp_row + (lane & 15)) * PITCH + lane.binary("lshr", 4) * CHUNK)
        tile = load_tiles(shared(self.f) + at + (m * TILE * PITCH + step))
        return [[tile[0], tile[2]], [tile[1], tile[3]]]

    def _words_of_b(self, stage: Value, step: int, pair: int) -> Words:
        lane, b = self.lane, self.problem.b
        first = stage + BLOCK * PITCH
        if not self.transposed:
            row = self.warp_column + (lane & 7) + (lane.binary("lshr", 4) << 3)
            at = first + (row * PITCH + (lane.binary("lshr", 3) & 1) * CHUNK)
            tile = load_tiles(shared(self.f) + at + (pair * TILE * PITCH + step))
            words: Words = [tile[:2], tile[2:]]
            return [[word ^ FLIP for word in column] for column in words] if self.integers else words
        pitch, column = _pitch_of_b(b), self.warp_column * b.size
        if not self.integers:
            at = first + ((lane & 15) * pitch + lane.binary("lshr", 4) * CHUNK + column)
            tile = load_tiles(shared(self.f) + at + (step // b.size * pitch + pair * TILE * b.size), transposed=True)
            return [tile[:2], tile[2:]]
        k = (lane & 1) + (lane.binary("lshr", 2) & 2) + ((lane & 6) << 1) + (lane & 16)
        at = first + (k * pitch + column)
        tile = load_tiles(shared(self.f) + at + (step * pitch + pair * TILE), transposed=True)
        first_8, next_8, third_8, last_8 = (word ^ FLIP for word in tile)
        return [[pick_bytes(first_8, next_8, order), pick_bytes(third_8, last_8, order)] for order in (0x6420, 0x7531)]

    def _runs(self) -> list[tuple[Value, list[tuple[int, int]]]]:
        if not (self.integers and self.transposed):
            return super()._runs()
        return [(self.lanes.t * 4 + pair * TILE, [(2 * pair + n, c) for c in (0, 1) for n in (0, 1)])
                for pair in range(COLUMNS // TILE)]
