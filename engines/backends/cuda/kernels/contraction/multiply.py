"""The inner step of a contraction: a stage in shared memory -> products of a lane, of a warp or of four warps."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.backends.cuda.codegen.copies import CHUNK
from engines.backends.cuda.codegen.gpu import Gpu
from engines.backends.cuda.codegen.module import elements, shared
from engines.backends.cuda.codegen.products import (
    STEP,
    descriptor,
    dot,
    load_tiles,
    multiply,
    multiply_grouped,
    multiply_quads,
    quad_rows,
)
from engines.backends.cuda.kernels.contraction.copies import swizzled
from engines.backends.cuda.kernels.contraction.tile import Tile
from engines.codegen.ir_builder import Value
from engines.codegen.types import I32, vector

# Of a warp's tile: (16 pixels, 8 couts, element of products.multiply's sums); products.sums_of says which a lane has.
Sums = dict[tuple[int, int, int], Value]
Multiply = Callable[[Sums, Value], None]        # of the stage at that offset in shared memory


def multiplier(gpu: Gpu, precision: str, tile: Tile, lane: Value, warp: Value, stages: int) -> Multiply:
    """What adds the products of a stage to a warp's sums. stages: of all of K."""
    way = (_Grouped if tile.grouped else _ByWarp if gpu.by_warp(precision) else
           _ByQuads if gpu.by_quads(precision) else _ByLane)
    return way(gpu, precision, tile, lane, warp, stages)


@dataclass(frozen=True)
class _Way:
    gpu: Gpu
    precision: str
    tile: Tile
    lane: Value
    warp: Value
    stages: int

    @property
    def weights(self) -> int:
        """Bytes from a stage's pixels to its weights."""
        return self.tile.pixels * self.tile.depth

    @property
    def corner(self) -> tuple[Value, Value]:
        """First pixel and cout of the warp in its block."""
        rows, couts = self.tile.part
        return self.warp.remainder(self.tile.warps[0]) * rows, self.warp.divided(self.tile.warps[0]) * couts

    def offset(self, row: Value, chunk: Value) -> Value:
        return row * self.tile.depth + swizzled(chunk, row, self.tile.depth) * CHUNK

    def words(self, at: Value) -> list[Value]:
        """A chunk, from its address."""
        return elements(at.f.load(vector(4, I32), at, CHUNK, "words"))


class _ByWarp(_Way):
    """mma: each lane's words of x and of the weights come by ldmatrix."""

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
        """Where this lane finds its rows of the warp's first tiles of x and weights, for each STEP of a stage."""
        pixel, cout = self.corner
        x = self.offset(pixel + (self.lane & 15), self.lane.binary("lshr", 4))
        row = (self.lane & 7) + (self.lane.binary("lshr", 4) << 3)
        w = self.offset(cout + row, self.lane.binary("lshr", 3) & 1) + self.weights
        steps = range(0, self.tile.depth, STEP)     # an offset's bits of the chunk are turned alike in all of them
        return [x ^ at for at in steps], [w ^ at for at in steps]


class _ByQuads(_Way):
    """mma.m8n8k4: each lane brings its chunk of a row and of a cout, two products of it."""

    def __call__(self, acc: Sums, stage: Value) -> None:
        rows, couts = self.tile.part
        first = self.lane.like(0)
        x_at, w_at = (self.offset(corner + row, first) for corner, row in zip(
            self.corner, quad_rows(self.lane), strict=True))
        depth = self.tile.depth
        for at in range(0, depth, CHUNK):       # an offset's bits of the chunk are turned alike in all of them
            x_first, w_first = (shared(stage.f) + (stage + (offset ^ at)) for offset in (x_at, w_at))
            x = [self.words(x_first + 16 * m * depth) for m in range(rows // 16)]
            for pair in range(couts // 16):
                w = self.words(w_first + (self.weights + 16 * pair * depth))
                for m, part in enumerate(x):
                    keys = [(m, 2 * pair + i // 4, i % 4) for i in range(8)]
                    for k in (0, 2):
                        sums = multiply_quads([acc[key] for key in keys], part[k:k + 2], w[k:k + 2])
                        acc.update(zip(keys, sums, strict=True))


class _ByLane(_Way):
    """dp4a and fma: a lane makes the sums that it would have of mma, from 16 bytes of its rows and couts at a time.

    Eight lanes read one row, four one cout: a read is one turn of the banks.
    """

    def __call__(self, acc: Sums, stage: Value) -> None:
        chunks = self.tile.depth // CHUNK
        if self.stages > 1 or self.precision == "int8":
            for number in range(chunks):
                self._multiply(acc, stage, stage.like(number))
            return
        # Without a loop over K the assembler would unpack the halves of all chunks first, and spill.
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


class _Grouped(_Way):
    """wgmma: four warps, 64 pixels by all couts, read from shared memory by the tensor cores themselves."""

    def __call__(self, acc: Sums, stage: Value) -> None:
        tile, f = self.tile, stage.f
        first = self.warp.binary("lshr", 2) * (64 * tile.depth)
        x, w = (descriptor(shared(f) + (stage + at)) for at in (first, first.like(self.weights)))
        pairs = [(x + (at >> 4), w + (at >> 4)) for at in range(0, tile.depth, STEP)]
        acc.update(zip(acc, multiply_grouped(self.precision, tile.couts, [*acc.values()], pairs), strict=True))
