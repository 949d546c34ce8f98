"""Attention on tensor cores with keys in shared memory: 64 queries of a head per block, 16 per warp.

    for each 64 keys, while the next ones are copied:
        x[query, key] = scale * q . k + mask
        floats: running maximum of x; earlier sums are rescaled when it grows
        p = 2**(x - maximum);    y[query, column] += p * v

Four warps share the copied keys. Floats need one pass, as in FlashAttention-2 (Dao, 2023). INT8 needs two, as in
query_tiles.py, because p is rounded to bytes relative to the global maximum.

Rows of k and v are padded by 16 bytes, so that eight rows cover eight groups of banks. v is transposed by
ldmatrix.trans in units of two bytes; with bytes a lane then gets two neighbouring columns, instead of one of COUTS and
one of the next, and keeps that order (`_column`).
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

from infer_server.engines.backends.cuda.codegen.copies import CHUNK, commit, copy_chunk, wait
from infer_server.engines.backends.cuda.codegen.fragments import TILE, Words
from infer_server.engines.backends.cuda.codegen.gpu import WARP, Gpu
from infer_server.engines.backends.cuda.codegen.module import barrier, number_if, pick_bytes, shared, wide
from infer_server.engines.backends.cuda.codegen.products import STEP, load_tiles
from infer_server.engines.backends.cuda.kernels.access import alignment
from infer_server.engines.backends.cuda.kernels.matmul import query_tiles
from infer_server.engines.backends.cuda.kernels.matmul.powers import power
from infer_server.engines.backends.cuda.kernels.matmul.query_tiles import (
    FLIP,
    QUERIES,
    Block,
    QueryTile,
    Rows,
    Scores,
    Sums,
)
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.row_formulas import softmax_shift
from infer_server.engines.codegen.types import I32
from infer_server.engines.lowering.problems.matmul import Attention
from infer_server.engines.lowering.problems.view import View

WARPS, STAGES = 4, 2
THREADS = WARPS * WARP
BLOCK = WARPS * QUERIES         # queries
KEYS = 64                       # per stage
FEW, MOST = 64, 96              # a lane's registers for queries and sums: up to FEW, three blocks fit on a
                                # multiprocessor without spills; up to MOST, two


def suits(problem: Attention, gpu: Gpu, aligned: Sequence[int]) -> bool:
    """Return True if k and v can be copied in chunks and read in tiles, fit in memory, and occupy a second warp."""
    _, *others = zip(problem.inputs[:3], aligned, strict=False)
    return query_tiles.suits(problem, gpu, aligned) and gpu.by_warp(problem.precision) and (
        problem.queries > QUERIES and shared_bytes(problem) <= gpu.shared and _registers(problem) <= MOST) and all(
        view.strides[-1] == view.size and alignment(view, base) % CHUNK == 0
        and view.shape[-1] * view.size % STEP == 0 and view.shape[-1] % TILE == 0 for view, base in others)


def blocks_of(problem: Attention) -> int:
    """Return the number of blocks per item."""
    return problem.heads * -(-problem.queries // BLOCK)


def shared_bytes(problem: Attention) -> int:
    """Return the bytes of shared memory per block."""
    return STAGES * KEYS * (_pitch(problem.k) + _pitch(problem.v))


def min_blocks(problem: Attention) -> int:
    """Return the number of resident blocks that the registers allow."""
    return 3 if _registers(problem) <= FEW else 2


def _registers(problem: Attention) -> int:
    return problem.q.shape[-1] * problem.q.size // 8 + problem.v.shape[-1] // 2


def _pitch(view: View) -> int:
    """Return the bytes between rows in shared memory."""
    return view.shape[-1] * view.size + CHUNK


class SharedTile(QueryTile):
    """Emitter of a warp's part of a block. All threads of the block take part."""

    def __init__(self, problem: Attention, gpu: Gpu, f: Function, operands: list[Value], block: Value,
                 thread: Value) -> None:
        blocks = -(-problem.queries // BLOCK)
        self.thread, self.lane = thread, thread & WARP - 1
        query0 = block.remainder(blocks) * BLOCK + thread.divided(WARP) * QUERIES
        super().__init__(problem, gpu, f, operands, block.divided(blocks), query0, self.lane)
        self.turn = KEYS
        self.stage_bytes = shared_bytes(problem) // STAGES
        self.values_at = KEYS * _pitch(problem.k)
        self.stage = f.constant(0, I32)         # offset in shared memory of the stage that is read

    def write(self, valid: Value) -> None:
        if self.integers:
            super().write(valid)
            return
        peaks, (totals, acc) = self._nothing_seen(), self._nothing_summed()
        for blocks in self._stages("stage", True, peak=peaks, total=totals, acc=acc):
            scores = [self._scores(block) for block in blocks]
            tops = self._raised(peaks, scores, totals, acc)
            for block, found in zip(blocks, scores, strict=True):
                self._add(totals, acc, found, tops, block)
        self._finish(peaks, totals, acc, valid)

    def _raised(self, peaks: Rows, scores: Sequence[Scores], totals: Rows, acc: Sums) -> Rows:
        """Update the maxima by new scores, rescale the sums, and return the values to subtract from scores."""
        tops = {}
        for row, before in peaks.items():
            peak = reduce(self.gpu.larger, [x for found in scores for (of, _), x in found.items() if of == row])
            peaks[row] = self.gpu.larger(before, self._together(self.gpu.larger, peak))
            tops[row] = softmax_shift(peaks[row])
            less = power(self.gpu, self.problem, before, tops[row])
            totals[row] = totals[row] * less
            acc.update({(n, e): value * less for (n, e), value in acc.items() if e // 2 == row})
        return tops

    def _blocks(self, name: str, mixes: bool, **carried: dict[Any, Value]) -> Iterator[Block]:
        for blocks in self._stages(name, mixes, **carried):
            yield from blocks

    def _stages(self, name: str, mixes: bool, **carried: dict[Any, Value]) -> Iterator[list[Block]]:
        """Yield the blocks of each stage, while the next stage is copied."""
        f, gpu = self.f, self.gpu
        stage = {"read": f.constant(0, I32), "write": f.constant(self.stage_bytes, I32)}
        self._copy(f.constant(0, I32), stage["read"], mixes)
        for whole in super()._blocks(name, mixes, stage=stage, **carried):
            f.write("; wait for the stage; all are done with the one before, whose place the next one takes")
            if gpu.async_copy:
                wait(f, 0)
            barrier(f)
            self._copy(whole.first + KEYS, stage["write"], mixes)
            self.stage = stage["read"]
            yield [Block(whole.first + row, row) for row in range(0, KEYS, self.keys_at_once)]
            stage["read"], stage["write"] = stage["write"], stage["read"]
        if gpu.async_copy:
            wait(f, 0)
        barrier(f)

    def _copy(self, first: Value, stage: Value, mixes: bool) -> None:
        """Copy a stage of keys from `first` on.

        Keys past the end repeat the last one; stages past the end are zeros.
        """
        problem = self.problem
        taken = number_if(first.below(problem.keys), CHUNK)
        for number, view, at in ((1, problem.k, 0), (2, problem.v, self.values_at))[:1 + mixes]:
            chunks, start = view.shape[-1] * view.size // CHUNK, self._of_head(number, view)
            for i in range(KEYS * chunks // THREADS):
                position = self.thread + i * THREADS
                row, column = position.divided(chunks), position.remainder(chunks)
                if THREADS % chunks == 0:       # the same numbers without a division per i
                    row, column = self.thread.divided(chunks) + i * (THREADS // chunks), self.thread.remainder(chunks)
                key = (first + row).at_most(problem.keys - 1)
                to = shared(self.f) + (stage + (row * _pitch(view) + column * CHUNK + at))
                copy_chunk(self.gpu, to, start + wide(key) * view.strides[-2] + wide(column * CHUNK), taken)
        if self.gpu.async_copy:
            commit(self.f)

    def _keys(self, block: Block, number: int) -> list[Words]:
        """Load the keys by ldmatrix: eight keys and half of STEP bytes, the other half, then eight more keys."""
        pitch = _pitch(self.problem.k)
        row = (self.lane & 7) + (self.lane.binary("lshr", 4) << 3)
        half = self.lane.binary("lshr", 3) & 1
        at = shared(self.f) + (self.stage + (row * pitch + half * (STEP // 2)))
        tiles = [load_tiles(at + ((block.row + number * TILE) * pitch + step * STEP))
                 for step in range(len(self.q))]
        return [[tile[:2], tile[2:]] for tile in tiles]

    def _values(self, block: Block) -> Iterator[Words]:
        view, pitch, lane = self.problem.v, _pitch(self.problem.v), self.lane
        row, half = (lane, lane.like(0)) if self.integers else (lane & 15, lane.binary("lshr", 4))
        at = shared(self.f) + (self.stage + (row * pitch + half * CHUNK + self.values_at))
        for pair in range(view.shape[-1] // TILE):
            tile = load_tiles(at + (block.row * pitch + pair * TILE * view.size), transposed=True)
            if not self.integers:
                yield [tile[:2], tile[2:]]
                continue
            a, b, c, d = (word ^ FLIP for word in tile)
            yield [[pick_bytes(a, b, order), pick_bytes(c, d, order)] for order in (0x6420, 0x7531)]

    def _column(self, n: int, c: int) -> Value:
        if not self.integers:
            return super()._column(n, c)
        return self.lanes.t * 4 + (n // 2 * TILE + c * 2 + n % 2)
