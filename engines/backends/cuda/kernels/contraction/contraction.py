"""Convolution and matrix product: one register-tiled kernel for all precisions and GPUs.

    for block of pixels x couts:                        a thread block; the pixels of all items form one axis
      for k in stages of `depth` bytes of K:            taps and their channels in sequence
        copy x[pixels][k], w[couts][k] to shared memory     `stages - 1` of them ahead of the multiplication
        for warp tile: for 32 bytes of k:
          acc[pixel, cout] += x * w                         in registers
      epilogue program, store

INT8 is u8 x s8 in int32; float16 and bfloat16 accumulate in float32; float32 uses fma in the order of K. Without an mma
for the type (dp4a, fma), a thread computes the sums that mma would have given it.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from infer_server.engines.backends.cuda.codegen.copies import wait
from infer_server.engines.backends.cuda.codegen.gpu import WARP
from infer_server.engines.backends.cuda.codegen.module import GpuModule, barrier, begin_kernel, special_register, wide
from infer_server.engines.backends.cuda.codegen.products import fence_grouped, sums_of
from infer_server.engines.backends.cuda.cost import BlockTraffic, Card, contraction_seconds
from infer_server.engines.backends.cuda.kernels.access import (
    load_channels,
    load_constants,
    offset_in,
    run_program,
    store_channels,
    store_stored,
    vector_width,
)
from infer_server.engines.backends.cuda.kernels.contraction.copies import Copies
from infer_server.engines.backends.cuda.kernels.contraction.multiply import Sums, multiplier
from infer_server.engines.backends.cuda.kernels.contraction.packing import Depth, columns, pack
from infer_server.engines.backends.cuda.kernels.contraction.tile import Tile, tiles
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel, Grid, solves
from infer_server.engines.backends.cuda.kernels.partial import PartialSums
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import FLOAT, I32
from infer_server.engines.lowering.problems.convolution import BlockedProduct, Contraction
from infer_server.engines.lowering.problems.problem import Array

REGISTERS = 1 << 16     # per multiprocessor
MOST = 16               # channels per thread that go through the program at once
FEW = 8                 # the same with quads, where the largest warp tiles fill the registers


@solves(Contraction, BlockedProduct, PartialSums)
class GpuContraction(GpuKernel[Contraction]):
    """Kernel for convolutions, blocked products and split-K partial sums."""

    @cached_property
    def depth(self) -> Depth:
        return Depth(self.problem, self.aligned[0])

    def tactics(self) -> Sequence[Tile]:
        return list(tiles(self.gpu, self.problem.precision, self.problem.cout))

    def grid(self, tactic: Tile) -> Grid:
        problem = self.problem
        pixels = math.prod(problem.y.shape[:-1])
        return Grid(pixels, tactic.pixels, tactic.threads, columns(problem, tactic), tactic.couts, tactic.shared_bytes)

    def cost(self, tactic: Tile, card: Card, items: int) -> float:
        problem, depth = self.problem, self.depth.turns(tactic) * tactic.depth
        pixels = items * math.prod(problem.y.shape[:-1])
        work = BlockTraffic(pixels, columns(problem, tactic), depth, (tactic.pixels, tactic.couts), tactic.part,
                            tactic.threads, tactic.shared_bytes, len(problem.operands),
                            problem.bytes * items + columns(problem, tactic) * depth, tactic.grouped)
        return contraction_seconds(work, card, problem.precision, self.depth.size)

    def pack(self, tactic: Tile, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        return pack(self.problem, self.depth, tactic, constants)

    def emit(self, module: GpuModule, name: str, tactic: Tile) -> None:
        _ContractionEmitter(self, module, name, tactic).write()

    def min_blocks(self, tile: Tile) -> int:
        """Return the minimum of resident blocks that ptxas must allow (minctasm), or 0 to leave it to ptxas.

        With float16, or small INT8 tiles on sm_75, ptxas would otherwise spill to fit a few more blocks. The bound
        leaves 168 registers per thread (INT8 spills one at 128), fewer for few sums, and the maximum for the largest
        tiles.
        """
        sums, bytes_ = math.prod(tile.part), self.problem.precision == "int8"
        if tile.grouped or not self.gpu.has_mma(self.problem.precision) or (
                bytes_ and (self.gpu.int8_k != 16 or sums > 32 * 32)):
            return 0
        registers = 255 if sums > 64 * 32 else 168 if bytes_ or sums > 32 * 32 else 128
        return REGISTERS // (registers * tile.threads)

    def channels_per_store(self, tile: Tile) -> int:
        """Return how many channels of a thread are all valid or all invalid, and can be stored at once."""
        problem, (_, *others) = self.problem, self.aligned_views()
        of_group = [(view, base if problem.groups == 1 else problem.cout * view.size) for view, base in others]
        full = self.gpu.by_quads(problem.precision) and math.prod(tile.part) > 64 * 32
        return vector_width([*others, *of_group], problem.cout, min(tile.lanes, FEW if full else MOST))


class _ContractionEmitter:
    """Emitter of the kernel, in the order of the module's pseudocode."""

    def __init__(self, kernel: GpuContraction, module: GpuModule, name: str, tile: Tile) -> None:
        self.kernel, self.tile, self.problem, self.gpu = kernel, tile, kernel.problem, kernel.gpu
        problem, depth = kernel.problem, kernel.depth
        count = len(problem.inputs) + 3 + (not depth.straight)
        self.f, (x, *others), self.rows = begin_kernel(module, name, tile.threads, count)
        if blocks := kernel.min_blocks(tile):
            module.min_blocks[name] = blocks
        self.operands, (weights, self.constants, *walk, self.y) = (others[:len(problem.operands)],
                                                                  others[len(problem.operands):])
        thread = special_register(self.f, "tid.x")
        self.lane, self.warp = thread & WARP - 1, thread.binary("lshr", WARP.bit_length() - 1)
        self.pixel0 = special_register(self.f, "ctaid.x") * tile.pixels
        block = special_register(self.f, "ctaid.y")
        blocks = columns(problem, tile) // problem.groups // tile.couts         # per group
        self.column0 = block * tile.couts
        self.group = block.divided(blocks) if problem.groups > 1 else block.like(0)
        self.cout0 = block.remainder(blocks) * tile.couts if problem.groups > 1 else self.column0
        channel = wide(self.group) * (problem.cin * depth.size) if problem.groups > 1 else wide(self.group)
        self.copies = Copies(depth, tile, self.gpu, x, weights, walk[0] if walk else None, thread, self.pixel0,
                             self.column0, channel, self.rows)

    def write(self) -> None:
        f, tile, copies = self.f, self.tile, self.copies
        rows, couts = tile.part
        zero = f.constant(0, I32 if self.problem.precision == "int8" else FLOAT)
        acc: Sums = {(m, n, e): zero for m in range(rows // 16) for n in range(couts // 8) for e in range(4)}
        ahead = tile.stages - 1
        for stage in range(ahead):
            copies.copy(f.constant(stage, I32), f.constant(stage * tile.stage_bytes, I32))
        turns = self.kernel.depth.turns(tile)
        multiply = multiplier(self.gpu, self.problem.precision, tile, self.lane, self.warp, turns)
        stages = {"read": f.constant(0, I32), "write": f.constant(ahead * tile.stage_bytes, I32)}
        for turn in f.loop("k", turns, acc=acc, stage=stages):
            f.write(f"; wait for stage k; all are done with stage k - 1, whose place stage k + {ahead} takes")
            if self.gpu.async_copy:
                wait(f, ahead - 1)
            if tile.grouped:
                fence_grouped(f)
            barrier(f)
            copies.copy(f.cast("trunc", turn, I32, "k") + ahead, stages["write"])
            multiply(acc, stages["read"])
            stages.update({key: self._next(at) for key, at in stages.items()})
        if self.gpu.async_copy:
            wait(f, 0)
        self._finish(acc)

    def _next(self, stage: Value) -> Value:
        after = stage + self.tile.stage_bytes
        return self.f.select(after.compare("eq", self.tile.shared_bytes), after.like(0), after, "stage")

    # ---- sums -> y
    def _finish(self, acc: Sums) -> None:
        """Run the epilogue and store: a thread has `lanes` neighbouring couts of two rows of each 16."""
        f, tile, problem = self.f, self.tile, self.problem
        rows, couts = tile.part
        warp_row, warp_column = self.warp.remainder(tile.warps[0]), self.warp.divided(tile.warps[0])
        of_lane, apart, t = sums_of(self.gpu, problem.precision, self.lane)
        first_cout = warp_column * couts + t * tile.lanes
        row = self.pixel0 + warp_row * rows + of_lane
        step = self.kernel.channels_per_store(tile)
        for first in range(0, tile.lanes, step):
            column = first_cout + first
            numbers = load_constants(f, self.constants, self.column0 + column, step, problem.program.constants,
                                     columns(problem, tile))
            cout = self.cout0 + column
            with f.when(cout.below(problem.cout)):
                channel = wide(self.group * problem.cout + cout) if problem.groups > 1 else wide(cout)
                for m in range(rows // 16):
                    for half in (0, 1):
                        pixel = row + (16 * m + apart * half)
                        with f.when(pixel.below(self.rows)):
                            sums = [acc[m, c // 2, 2 * half + c % 2] for c in range(first, first + step)]
                            self._store(pixel, channel, sums, numbers)

    def _store(self, pixel: Value, channel: Value, sums: Sequence[Value], numbers: list[list[Value]]) -> None:
        gpu, problem = self.gpu, self.problem
        if isinstance(problem, PartialSums):
            store_stored(problem.y, sums, self.y + offset_in(problem.y, pixel) + channel * problem.y.size)
            return
        if problem.precision == "int8":
            sums = [gpu.to_float(s) for s in sums]
        others = [load_channels(gpu, view, address + offset_in(view, pixel) + channel * view.strides[-1], len(sums))
                  for view, address in zip(problem.operands, self.operands, strict=True)]
        results = run_program(gpu, problem.program, sums, others, numbers)
        store_channels(gpu, problem.y, results, self.y + offset_in(problem.y, pixel) + channel * problem.y.size)


