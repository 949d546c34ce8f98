"""Attention kernel and its tactics.

On tensor cores keys are in shared memory (shared_tiles.py) or read through the caches (query_tiles.py). The tactics of
one_query.py, a warp or a block per query, work for all types and shapes. INT8 sums are exact
(engines/lowering/problems/matmul.py).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer_server.engines.backends.cuda.codegen.gpu import WARP
from infer_server.engines.backends.cuda.codegen.module import GpuModule, begin_kernel, special_register
from infer_server.engines.backends.cuda.cost import PLAIN, Card
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from infer_server.engines.backends.cuda.kernels.matmul import one_query, query_tiles, shared_tiles
from infer_server.engines.backends.cuda.kernels.matmul.one_query import LanePartition, OneQuery, partition_of
from infer_server.engines.backends.cuda.kernels.matmul.query_tiles import QUERIES, QueryTile, tiles_of
from infer_server.engines.backends.cuda.kernels.matmul.shared_tiles import SharedTile
from infer_server.engines.lowering.problems.matmul import Attention
from infer_server.engines.lowering.problems.problem import Array

WARPS = 4               # per block
MIN_BLOCKS = 2          # minimum of resident blocks; without it ptxas may spill to fit more
WAITING = 64            # bytes in flight per lane of a tile, about


@dataclass(frozen=True)
class Way(Tactic):
    """Tactic, identified by its name."""
    name: str

    def __str__(self) -> str:
        return self.name


SHARED_TILES, QUERY_TILES, QUERY, BLOCK = (
    Way("64 queries a block, keys in shared memory"), Way("16 queries a warp"), Way("a query a warp"),
    Way("a query a block"))
# By tactic and INT8 or not, counted in SASS: instructions per score, multiply-adds per further instruction, and
# products of q and k per score (INT8 needs products by ones, too).
INSTRUCTIONS = {(SHARED_TILES, True): (23, 15, 4), (SHARED_TILES, False): (7, 26, 1), (QUERY_TILES, True): (23, 8, 4),
                (QUERY_TILES, False): (7, 8, 2)}


@solves(Attention)
class GpuAttention(GpuKernel[Attention]):
    """Kernel for attention with one of four tactics."""

    def tactics(self) -> Sequence[Way]:
        able = {SHARED_TILES: shared_tiles.suits(self.problem, self.gpu, self.aligned),
                QUERY_TILES: query_tiles.suits(self.problem, self.gpu, self.aligned),
                QUERY: True, BLOCK: True}
        return [way for way, suits in able.items() if suits]

    def cost(self, tactic: Way, card: Card, items: int) -> float:
        if tactic in (QUERY, BLOCK):
            rows = self.problem.heads * self.problem.queries * items
            return one_query.seconds(self.problem, self._cut(tactic), card, rows, items)
        rows, keys = (shared_tiles.BLOCK, shared_tiles.KEYS) if tactic == SHARED_TILES else (QUERIES, QUERIES)
        problem = self.problem
        tiles = problem.heads * -(-problem.queries // rows) * items
        scores = tiles * rows * -(-problem.keys // keys) * keys
        (score, macs, times), depth, width = INSTRUCTIONS[tactic,
                                                          self.integers], problem.q.shape[-1], problem.v.shape[-1]
        threads = tiles * rows // QUERIES * WARP
        return max(card.read_seconds(problem.bytes * items, threads, WAITING),
                   card.scalar_seconds(scores * (score + (depth + width) // macs) // PLAIN, threads),
                   card.tensor_core_seconds(problem.precision, scores * (times * depth + width), tiles))

    @property
    def integers(self) -> bool:
        return self.problem.precision == "int8"

    def grid(self, tactic: Way) -> Grid:
        if tactic == SHARED_TILES:
            return Grid(shared_tiles.blocks_of(self.problem), 1, shared_tiles.THREADS,
                        shared_bytes=shared_tiles.shared_bytes(self.problem))
        if tactic == QUERY_TILES:
            return Grid(tiles_of(self.problem), WARPS, WARPS * WARP)
        cut = self._cut(tactic)
        return Grid(self.problem.heads * self.problem.queries, WARPS // cut.warps, WARPS * WARP,
                    shared_bytes=cut.shared_bytes)

    def _cut(self, tactic: Way) -> LanePartition:
        return partition_of(self.problem, self.aligned, WARPS if tactic == BLOCK else 1)

    def pack(self, tactic: Way, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return scale and zero points, and the program's constants [constant][columns]."""
        columns = self.problem.y.shape[-1]
        table = np.zeros((max(self.problem.program.constants, 1), columns), np.float32)
        for row, constant in zip(table, constants["program"], strict=False):
            row[:] = constant
        return self.problem.numbers(constants), table

    def emit(self, module: GpuModule, name: str, tactic: Way) -> None:
        f, operands, rows = begin_kernel(module, name, WARPS * WARP, len(self.problem.inputs) + 3)
        thread = special_register(f, "tid.x")
        warp = thread.binary("lshr", WARP.bit_length() - 1)
        if tactic == SHARED_TILES:
            module.min_blocks[name] = shared_tiles.min_blocks(self.problem)
            block = special_register(f, "ctaid.x")
            SharedTile(self.problem, self.gpu, f, operands, block, thread).write(block.below(rows))
            return
        module.min_blocks[name] = MIN_BLOCKS
        row = special_register(f, "ctaid.x") * WARPS + warp
        if tactic == QUERY_TILES:
            tiles, tile = -(-self.problem.queries // QUERIES), row.at_most(rows - 1)
            QueryTile(self.problem, self.gpu, f, operands, tile.divided(tiles), tile.remainder(tiles) * QUERIES,
                      thread & WARP - 1).write(row.below(rows))
            return
        cut = self._cut(tactic)
        block, thread = (special_register(f, "ctaid.x"), thread) if cut.warps > 1 else (row, thread & WARP - 1)
        query = OneQuery(self.problem, self.gpu, cut, operands, block.at_most(rows - 1), thread, block.like(0),
                         self.problem.keys)
        *_, constants, y = operands
        if self.integers:
            peak = query.peak()
            total, columns = query.bytes_below(peak)
        else:
            peak, total, columns = query.floats()
        query.store(y, self.aligned[-1], constants, peak, total, columns, block.below(rows))
