"""Attention on tensor cores whose keys lie in shared memory: a block for 64 queries of a head, a warp for 16 of them.

    for 64 keys after 64 keys, while the next ones are copied:
        x[query, key] = scale * q . k + mask
        floats: the largest x so far; what was summed with the largest one before is made smaller by as much
        p = 2**(x - largest);    y[query, column] += p * v

Four warps read what they have copied together. Floats need the scores once (as in FlashAttention-2); in INT8, where p
is rounded to bytes, by the largest of all, they are made twice, as in query_tiles.py.

A row of k or v is followed by 16 bytes that nobody reads: eight rows lie in eight groups of banks. v comes transposed
from shared memory (ldmatrix.trans), by units of two bytes: of bytes a lane so has two neighbouring columns, where it is
to have one of COUTS and one of the next; it has them in that order (`_column`).
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

from engines.backends.cuda.codegen.copies import CHUNK, commit, copy_chunk, wait
from engines.backends.cuda.codegen.fragments import TILE, Words
from engines.backends.cuda.codegen.gpu import WARP, Gpu
from engines.backends.cuda.codegen.module import barrier, pick_bytes, shared, where, wide
from engines.backends.cuda.codegen.products import STEP, load_tiles
from engines.backends.cuda.kernels.access import alignment
from engines.backends.cuda.kernels.matmul import query_tiles
from engines.backends.cuda.kernels.matmul.powers import power
from engines.backends.cuda.kernels.matmul.query_tiles import FLIP, QUERIES, Block, QueryTile, Rows, Scores, Sums
from engines.codegen.ir_builder import Function, Value
from engines.codegen.row_formulas import softmax_shift
from engines.codegen.types import I32
from engines.lowering.problems.matmul import Attention
from engines.lowering.problems.view import View

WARPS, STAGES = 4, 2
THREADS = WARPS * WARP
BLOCK = WARPS * QUERIES         # queries
KEYS = 64                       # of a stage
FEW, MOST = 64, 96              # registers of a lane for its queries and sums: with so few three blocks fit on a
                                # multiprocessor, with the most two, and nothing spills


def suits(problem: Attention, gpu: Gpu, aligned: Sequence[int]) -> bool:
    """Whether k and v can be copied by chunks and read by whole tiles, there is room, and a second warp has queries."""
    _, *others = zip(problem.inputs[:3], aligned, strict=False)
    return query_tiles.suits(problem, gpu, aligned) and gpu.by_warp(problem.precision) and (
        problem.queries > QUERIES and shared_bytes(problem) <= gpu.shared and _registers(problem) <= MOST) and all(
        view.strides[-1] == view.size and alignment(view, base) % CHUNK == 0
        and view.shape[-1] * view.size % STEP == 0 and view.shape[-1] % TILE == 0 for view, base in others)


def blocks_of(problem: Attention) -> int:
    """Of an item."""
    return problem.heads * -(-problem.queries // BLOCK)


def shared_bytes(problem: Attention) -> int:
    return STAGES * KEYS * (_pitch(problem.k) + _pitch(problem.v))


def blocks_beside(problem: Attention) -> int:
    """Of a multiprocessor, by what the assembler may use of its registers."""
    return 3 if _registers(problem) <= FEW else 2


def _registers(problem: Attention) -> int:
    return problem.q.shape[-1] * problem.q.size // 8 + problem.v.shape[-1] // 2


def _pitch(view: View) -> int:
    """Bytes from a row to the next in shared memory."""
    return view.shape[-1] * view.size + CHUNK


class SharedTile(QueryTile):
    """Writes the part of a warp. All of a block take part."""

    def __init__(self, problem: Attention, gpu: Gpu, f: Function, operands: list[Value], block: Value,
                 thread: Value) -> None:
        blocks = -(-problem.queries // BLOCK)
        self.thread, self.lane = thread, thread & WARP - 1
        query0 = block.remainder(blocks) * BLOCK + thread.divided(WARP) * QUERIES
        super().__init__(problem, gpu, f, operands, block.divided(blocks), query0, self.lane)
        self.turn = KEYS
        self.stage_bytes = shared_bytes(problem) // STAGES
        self.values_at = KEYS * _pitch(problem.k)
        self.stage = f.constant(0, I32)         # that is read: its place in shared memory

    def write(self, there: Value) -> None:
        if self.integers:
            super().write(there)
            return
        peaks, (totals, acc) = self._nothing_seen(), self._nothing_summed()
        for blocks in self._stages("stage", True, peak=peaks, total=totals, acc=acc):
            scores = [self._scores(block) for block in blocks]
            tops = self._raised(peaks, scores, totals, acc)
            for block, found in zip(blocks, scores, strict=True):
                self._add(totals, acc, found, tops, block)
        self._finish(peaks, totals, acc, there)

    def _raised(self, peaks: Rows, scores: Sequence[Scores], totals: Rows, acc: Sums) -> Rows:
        """What is taken off the scores, once the largest of them are among the peaks; the sums are made to fit."""
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
        """One after the other, the next one on its way."""
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
        """The keys from the first on; behind the last, the last once more, or nothing where it begins there."""
        problem = self.problem
        taken = where(first.below(problem.keys), CHUNK)
        for number, view, at in ((1, problem.k, 0), (2, problem.v, self.values_at))[:1 + mixes]:
            chunks, start = view.shape[-1] * view.size // CHUNK, self._of_head(number, view)
            for i in range(KEYS * chunks // THREADS):
                place = self.thread + i * THREADS
                row, column = place.divided(chunks), place.remainder(chunks)
                if THREADS % chunks == 0:       # said so that nothing is divided again for each i
                    row, column = self.thread.divided(chunks) + i * (THREADS // chunks), self.thread.remainder(chunks)
                key = (first + row).at_most(problem.keys - 1)
                to = shared(self.f) + (stage + (row * _pitch(view) + column * CHUNK + at))
                copy_chunk(self.gpu, to, start + wide(key) * view.strides[-2] + wide(column * CHUNK), taken)
        if self.gpu.async_copy:
            commit(self.f)

    def _keys(self, block: Block, number: int) -> list[Words]:
        """Tiles of ldmatrix: eight keys, a half of STEP bytes; its other half; eight more keys."""
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
            tile = load_tiles(at + (block.row * pitch + pair * TILE * view.size), across=True)
            if not self.integers:
                yield [tile[:2], tile[2:]]
                continue
            a, b, c, d = (word ^ FLIP for word in tile)
            yield [[pick_bytes(a, b, order), pick_bytes(c, d, order)] for order in (0x6420, 0x7531)]

    def _column(self, n: int, c: int) -> Value:
        if not self.integers:
            return super()._column(n, c)
        return self.lanes.t * 4 + (n // 2 * TILE + c * 2 + n % 2)
