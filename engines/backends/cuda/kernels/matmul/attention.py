"""Attention: on tensor cores where there are some for its type, its keys in shared memory (shared_tiles.py) or read
through the caches (query_tiles.py); else a warp for each query:

    lane l: x[t] = scale * q . k[t] + mask[t]       for the keys t with t % 32 == l
    all:    the largest x; p[t] = 2**(x - largest), rounded to bytes in INT8; the sum of p
    p goes through shared memory
    lane l: y[e] = program(sum over t of p[t] * v[t, e] / sum of p)     for the columns e with e % 32 == l

with the scores in registers. INT8 sums are exact (engines/lowering/problems/matmul.py).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.backends.cuda.codegen.gpu import WARP
from engines.backends.cuda.codegen.module import GpuModule, across, barrier, begin_kernel, shared, special, wide
from engines.backends.cuda.cost import PLAIN, Card
from engines.backends.cuda.kernels.access import (
    MAGIC,
    load_channels,
    offset_in,
    pixel_offset,
    run_program,
    store_channels,
)
from engines.backends.cuda.kernels.access import load_constants as load_program_constants
from engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from engines.backends.cuda.kernels.matmul import query_tiles, shared_tiles
from engines.backends.cuda.kernels.matmul.powers import power
from engines.backends.cuda.kernels.matmul.product import added, load_factor
from engines.backends.cuda.kernels.matmul.query_tiles import QUERIES, QueryTile, tiles_of
from engines.backends.cuda.kernels.matmul.shared_tiles import SharedTile
from engines.codegen.ir_builder import Function, Value
from engines.codegen.row_formulas import seen, share, taken_off
from engines.codegen.types import FLOAT, I32
from engines.lowering.problems.matmul import MIDDLE, Attention
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import View

WARPS = 4               # of a block
BESIDE = 2              # blocks of a multiprocessor; told none, the assembler may spill a little to make room for more
MOST_KEYS = 1 << 10     # 32 scores of a lane


@dataclass(frozen=True)
class Way(Tactic):
    """What a warp takes on."""
    name: str

    def __str__(self) -> str:
        return self.name


SHARED_TILES, QUERY_TILES, QUERY = (Way("64 queries a block, keys in shared memory"), Way("16 queries a warp"),
                                    Way("a query a warp"))
# Of tiles, in INT8 or not, counted in SASS: instructions for a score; multiply-adds to one beside them.
COUNTED = {(SHARED_TILES, True): (29, 13), (SHARED_TILES, False): (21, 26), (QUERY_TILES, True): (29, 8),
           (QUERY_TILES, False): (25, 8)}


@solves(Attention)
class GpuAttention(GpuKernel[Attention]):
    @property
    def refusal(self) -> str:
        return "" if self.tactics() else f"more than {MOST_KEYS} keys of an attention"

    def tactics(self) -> Sequence[Way]:
        able = {SHARED_TILES: shared_tiles.suits(self.problem, self.gpu, self.aligned),
                QUERY_TILES: query_tiles.suits(self.problem, self.gpu, self.aligned),
                QUERY: self.problem.keys <= MOST_KEYS}
        return [way for way, suits in able.items() if suits]

    def cost(self, tactic: Way, card: Card, items: int) -> float:
        if tactic == QUERY:
            return super().cost(tactic, card, items)
        rows, keys = (shared_tiles.BLOCK, shared_tiles.KEYS) if tactic == SHARED_TILES else (QUERIES, QUERIES)
        problem = self.problem
        queries = -(-problem.queries // rows) * rows
        scores = problem.heads * queries * -(-problem.keys // keys) * keys * items
        score, macs = COUNTED[tactic, self.integers]
        instructions = scores * (score + (problem.q.shape[-1] + problem.v.shape[-1]) // macs)
        return max(card.moving(problem.bytes * items),
                   card.by_thread(instructions // PLAIN, problem.heads * queries // QUERIES * WARP * items))

    @property
    def integers(self) -> bool:
        return self.problem.precision == "int8"

    def grid(self, tactic: Way) -> Grid:
        if tactic == SHARED_TILES:
            return Grid(shared_tiles.blocks_of(self.problem), 1, shared_tiles.THREADS,
                        shared_bytes=shared_tiles.shared_bytes(self.problem))
        if tactic == QUERY_TILES:
            return Grid(tiles_of(self.problem), WARPS, WARPS * WARP)
        return Grid(self.problem.heads * self.problem.queries, WARPS, WARPS * WARP,
                    shared_bytes=WARPS * self.problem.keys * 4)

    def pack(self, tactic: Way, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Scale and zero points; the program's constants [constant][columns]."""
        columns = self.problem.y.shape[-1]
        table = np.zeros((max(self.problem.program.constants, 1), columns), np.float32)
        for row, constant in zip(table, constants["program"], strict=False):
            row[:] = constant
        return self.problem.numbers(constants), table

    def emit(self, module: GpuModule, name: str, tactic: Way) -> None:
        f, operands, rows = begin_kernel(module, name, WARPS * WARP, len(self.problem.inputs) + 3)
        thread = special(f, "tid.x")
        warp = thread.binary("lshr", WARP.bit_length() - 1)
        if tactic == SHARED_TILES:
            module.beside[name] = shared_tiles.blocks_beside(self.problem)
            block = special(f, "ctaid.x")
            SharedTile(self.problem, self.gpu, f, operands, block, thread).write(block.below(rows))
            return
        module.beside[name] = BESIDE
        row = special(f, "ctaid.x") * WARPS + warp
        if tactic == QUERY_TILES:
            tiles, tile = -(-self.problem.queries // QUERIES), row.at_most(rows - 1)
            QueryTile(self.problem, self.gpu, f, operands, tile.divided(tiles), tile.remainder(tiles) * QUERIES,
                      thread & WARP - 1).write(row.below(rows))
            return
        _Query(self, f, operands, row.at_most(rows - 1), warp, thread & WARP - 1).write(row.below(rows))


class _Query:
    """Writes the kernel. All warps take part in its barrier; those behind the last query do its work once more."""

    def __init__(self, kernel: GpuAttention, f: Function, operands: list[Value], row: Value, warp: Value,
                 lane: Value) -> None:
        self.problem, self.gpu, self.integers = kernel.problem, kernel.gpu, kernel.integers
        self.f, self.row, self.lane = f, row, lane
        *self.inputs, numbers, self.constants, self.y = operands
        self.scale, *zeros = (f.load(FLOAT, numbers + 4 * n, 4, "number") for n in range(4))
        self.zeros = zeros
        self.p_at = shared(f) + warp * (4 * self.problem.keys)
        self.head = row.divided(self.problem.queries)

    def write(self, there: Value) -> None:
        problem, f = self.problem, self.f
        scores = self._scores()
        peak = self._reduced(self.gpu.max, [self._of_lane(t, problem.keys, x, -math.inf)
                                                     for t, x in scores.items()])
        top = taken_off(peak)
        powers = {t: self._power(x, top) for t, x in scores.items()}
        total = self._reduced(lambda a, b: a + b, [self._of_lane(t, problem.keys, p, 0.0) for t, p in powers.items()])
        for t, p in powers.items():
            with f.when((self.lane + t).below(problem.keys)):
                stored = self.gpu.round(p) if self.integers else self.gpu.bits(p)
                f.store(stored, self.p_at + (self.lane + t) * 4, 4)
        barrier(f)
        part = share(peak, total)
        means = {e: (self.gpu.to_float(m) if self.integers else m) * part for e, m in self._mixed().items()}
        if self.integers and problem.mask:
            nothing = f.select(seen(peak), peak.like(0), self.zeros[2] - float(MIDDLE), "nothing")
            means = {e: mean + nothing for e, mean in means.items()}
        for e, mean in means.items():
            column = self.lane + e
            with f.when(there & column.below(problem.y.shape[-1])):
                self._store(column, mean)

    def _scores(self) -> dict[int, Value]:
        """By the lane's keys: first key of every 32."""
        problem, f, gpu = self.problem, self.f, self.gpu
        q_zero, k_zero = (gpu.round(self.zeros[0]), MIDDLE) if self.integers else self.zeros[:2]
        query = self.inputs[0] + offset_in(problem.q, self.row)
        keys = {t: self._of_head(1, problem.k) + self._index(t, problem.keys) * problem.k.strides[-2]
                for t in range(0, problem.keys, WARP)}
        acc = dict.fromkeys(keys, f.constant(0, I32 if self.integers else FLOAT))
        for d in f.loop("d", problem.q.shape[-1], acc=acc):
            factor = load_factor(gpu, problem.q, query + d * problem.q.strides[-1], q_zero, self.integers)
            for t, key in keys.items():
                other = load_factor(gpu, problem.k, key + d * problem.k.strides[-1], k_zero, self.integers)
                acc[t] = added(gpu, acc[t], factor, other)
        return {t: self._score(t, gpu.to_float(a) if self.integers else a) for t, a in acc.items()}

    def _score(self, t: int, acc: Value) -> Value:
        mask = self.problem.mask
        if mask is None:
            return acc * self.scale
        at = self.inputs[3] + offset_in(mask, self.row) + self._index(t, self.problem.keys) * mask.strides[-1]
        hidden, = load_channels(self.gpu, mask, at, 1)
        return self.gpu.fma(acc, self.scale, hidden) if self.integers else acc * self.scale + hidden

    def _power(self, x: Value, top: Value) -> Value:
        p = power(self.gpu, self.problem, x, top)
        return p - MAGIC if self.integers else p

    def _mixed(self) -> dict[int, Value]:
        """By the lane's columns: sums of p * v."""
        problem, f, gpu = self.problem, self.f, self.gpu
        zero = MIDDLE if self.integers else self.zeros[2]
        width = problem.y.shape[-1]
        columns = {e: self._of_head(2, problem.v) + self._index(e, width) * problem.v.strides[-1]
                   for e in range(0, width, WARP)}
        acc = dict.fromkeys(columns, f.constant(0, I32 if self.integers else FLOAT))
        for t in f.loop("t", problem.keys, acc=acc):
            p = f.load(I32, self.p_at + f.cast("trunc", t, I32, "t") * 4, 4, "p")
            p = p if self.integers else gpu.from_bits(p)
            for e, column in columns.items():
                value = load_factor(gpu, problem.v, column + t * problem.v.strides[-2], zero, self.integers)
                acc[e] = added(gpu, acc[e], p, value)
        return acc

    def _store(self, column: Value, mean: Value) -> None:
        problem = self.problem
        numbers = load_program_constants(self.f, self.constants, column, 1, problem.program.constants,
                                         problem.y.shape[-1])
        results = run_program(self.gpu, problem.program, [mean], [], numbers)
        at = self.y + offset_in(problem.y, self.row) + wide(column) * problem.y.strides[-1]
        store_channels(self.gpu, problem.y, results, at)

    # ---- lanes
    def _of_head(self, number: int, view: View) -> Value:
        return self.inputs[number] + pixel_offset(self.head, view.shape[:-2], view.strides[:-2], view.item)

    def _index(self, first: int, extent: int) -> Value:
        """Of the lane's element; of none that is there, the last: an i64."""
        return wide((self.lane + first).at_most(extent - 1))

    def _of_lane(self, first: int, extent: int, value: Value, neutral: float) -> Value:
        if first + WARP <= extent:
            return value
        return self.f.select((self.lane + first).below(extent), value, value.like(neutral), "here")

    def _reduced(self, combine: Callable[[Value, Value], Value], values: list[Value]) -> Value:
        """Of the largest, and of sums of whole numbers, the order makes no difference."""
        result, *others = values
        for other in others:
            result = combine(result, other)
        for distance in (16, 8, 4, 2, 1):
            result = combine(result, across(result, distance))
        return result
