"""Inner step of a contraction: multiplies a stage in shared memory by lanes, warps (mma) or four warps (wgmma)."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infer_server.engines.backends.cuda.codegen.copies import CHUNK
from infer_server.engines.backends.cuda.codegen.gpu import Gpu
from infer_server.engines.backends.cuda.codegen.module import elements, shared
from infer_server.engines.backends.cuda.codegen.products import (
    STEP,
    descriptor,
    dot,
    load_tiles,
    multiply,
    multiply_grouped,
    multiply_quads,
    quad_rows,
)
from infer_server.engines.backends.cuda.kernels.contraction.copies import swizzled
from infer_server.engines.backends.cuda.kernels.contraction.tile import Tile
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import I32, vector

# Sums of a warp tile by (16 pixels, 8 couts, element of products.multiply's sums); see products.sums_of.
Sums = dict[tuple[int, int, int], Value]
Multiply = Callable[[Sums, Value], None]        # adds the stage at an offset of shared memory


def multiplier(gpu: Gpu, precision: str, tile: Tile, lane: Value, warp: Value, stages: int) -> Multiply:
    """Return a function that adds the products of a stage to a warp's sums. `stages` is their number for all of K."""
    way = (_Grouped if tile.grouped else _ByWarp if gpu.by_warp(precision) else
           _ByQuads if gpu.by_quads(precision) else _ByLane)
    return way(gpu, precision, tile, lane, warp, stages)


@dataclass(frozen=True)
class _Multiplier:
    """Base of the ways to multiply a stage."""
    gpu: Gpu
    precision: str
    tile: Tile
    lane: Value
    warp: Value
    stages: int

    @property
    def weights(self) -> int:
        """Offset in bytes from a stage's pixels to its weights."""
        return self.tile.pixels * self.tile.depth

    @property
    def corner(self) -> tuple[Value, Value]:
        """First pixel and cout of the warp in its block."""
        rows, couts = self.tile.part
        return self.warp.remainder(self.tile.warps[0]) * rows, self.warp.divided(self.tile.warps[0]) * couts

    def offset(self, row: Value, chunk: Value) -> Value:
        return row * self.tile.depth + swizzled(chunk, row, self.tile.depth) * CHUNK

    def words(self, at: Value) -> list[Value]:
        """Load a chunk as four words."""
        return elements(at.f.load(vector(4, I32), at, CHUNK, "words"))


class _ByWarp(_Multiplier):
    """Multiplier with mma; ldmatrix loads the fragments of x and of the weights."""

    def __call__(self, acc: Sums, stage: Value) -> None:
        tile, f = self.tile, stage.f
        rows, couts = tile.part
        for x_at, w_at in zip(*self._offsets(), strict=True):
            x, w = shared(f) + (stage + x_at), shared(f) + (stage + w_at)
            a = [load_tiles(x + m * 16 * tile.depth) for m in range(rows // 16)]
            for pair in range(couts // 16):
                b = load_tiles(w + pair * 16 * tile.depth)
                for half in (0, 1):
                    n = 2 * pair + half
                    for m, part in enumerate(a):
                        sums = [acc[m, n, e] for e in range(4)]
                        sums = multiply(self.gpu, self.precision, sums, part, b[2 * half:2 * half + 2])
                        acc.update({(m, n, e): value for e, value in enumerate(sums)})

    def _offsets(self) -> tuple[list[Value], list[Value]]:
        """Return this lane's ldmatrix offsets for x and the weights, one per STEP bytes of a stage."""
        pixel, cout = self.corner
        x = self.offset(pixel + (self.lane & 15), self.lane.binary("lshr", 4))
        row = (self.lane & 7) + (self.lane.binary("lshr", 4) << 3)
        w = self.offset(cout + row, self.lane.binary("lshr", 3) & 1) + self.weights
        steps = range(0, self.tile.depth, STEP)     # xor, as the swizzle does not depend on the step
        return [x ^ at for at in steps], [w ^ at for at in steps]


class _ByQuads(_Multiplier):
    """Multiplier with mma.m8n8k4: each lane loads its chunk of a row and of a cout for two products."""

    def __call__(self, acc: Sums, stage: Value) -> None:
        rows, couts = self.tile.part
        first = self.lane.like(0)
        x_at, w_at = (self.offset(corner + row, first) for corner, row in zip(
            self.corner, quad_rows(self.lane), strict=True))
        depth = self.tile.depth
        for at in range(0, depth, CHUNK):       # xor, as the swizzle does not depend on the step
            x_first, w_first = (shared(stage.f) + (stage + (offset ^ at)) for offset in (x_at, w_at))
            x = [self.words(x_first + 16 * m * depth) for m in range(rows // 16)]
            for pair in range(couts // 16):
                w = self.words(w_first + (self.weights + 16 * pair * depth))
                for m, part in enumerate(x):
                    keys = [(m, 2 * pair + i // 4, i % 4) for i in range(8)]
                    for k in (0, 2):
                        sums = multiply_quads([acc[key] for key in keys], part[k:k + 2], w[k:k + 2])
                        acc.update(zip(keys, sums, strict=True))


class _ByLane(_Multiplier):
    """Multiplier with dp4a or fma: a lane computes the sums that mma would give it, from 16 bytes of K at a time.

    Eight lanes read the same row and four the same cout, so a read needs one pass over the banks.
    """

    def __call__(self, acc: Sums, stage: Value) -> None:
        chunks = self.tile.depth // CHUNK
        if self.stages > 1 or self.precision == "int8":
            for number in range(chunks):
                self._multiply(acc, stage, stage.like(number))
            return
        # Unrolled, ptxas would unpack the halves of all chunks first, and spill.
        for chunk in stage.f.loop("chunk", chunks, acc=acc):
            self._multiply(acc, stage, stage.f.cast("trunc", chunk, I32, "chunk"))

    def _multiply(self, acc: Sums, stage: Value, chunk: Value) -> None:
        rows, couts = self.tile.part
        pixel, cout = self.corner
        group, t = self.lane.binary("lshr", 2), self.lane & 3
        x = {(m, half): self._words(stage, pixel + group + (16 * m + 8 * half), chunk, 0)
             for m in range(rows // 16) for half in (0, 1)}
        for n in range(couts // 8):
            for c in (0, 1):
                w = self._words(stage, cout + t * 2 + (8 * n + c), chunk, self.weights)
                for (m, half), part in x.items():
                    key = m, n, 2 * half + c
                    for a, b in zip(part, w, strict=True):
                        acc[key] = dot(self.gpu, self.precision, acc[key], a, b)

    def _words(self, stage: Value, row: Value, chunk: Value, base: int) -> list[Value]:
        return self.words(shared(stage.f) + (stage + self.offset(row, chunk) + base))


class _Grouped(_Multiplier):
    """Multiplier with wgmma: four warps multiply 64 pixels by all couts; tensor cores read shared memory themselves."""

    def __call__(self, acc: Sums, stage: Value) -> None:
        tile, f = self.tile, stage.f
        first = self.warp.binary("lshr", 2) * (64 * tile.depth)
        x, w = (descriptor(shared(f) + (stage + at)) for at in (first, first.like(self.weights)))
        pairs = [(x + (at >> 4), w + (at >> 4)) for at in range(0, tile.depth, STEP)]
        acc.update(zip(acc, multiply_grouped(self.precision, tile.couts, [*acc.values()], pairs), strict=True))
