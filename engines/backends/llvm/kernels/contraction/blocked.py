"""Matrix product with 4-bit weights, which are dequantised on their way into registers.

    for block of K: scale, offset of each cout
      for k, k + 1: a byte holds the weights of both
        w = scale * q + offset;   acc[pixel] += x[pixel] * w           for all pixels of the tile

If x is quantised in the same blocks, both factors are bytes, and the sum over a block is exact:

    for block of K: scale of each cout, scale and sum of the row's block
      for eight of K: four bytes hold the weights of all, those of the first four in the lower bits
        sum[pixel] += x[pixel] * q                              by four, in int32
      acc[pixel] += scales * (sum[pixel] - 8 * sum of x)        or offset * sum of x apart

A product of few rows is bound by the memory bandwidth of its weights; with more rows, the pixels of a tile share the
cost of dequantising. The outer loops are those of tiled.py.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.arithmetic import Arithmetic, arithmetic_for
from infer_server.engines.backends.llvm.kernels.common.cost import LATENCY, Work
from infer_server.engines.backends.llvm.kernels.contraction.direct import usual_tile_shapes
from infer_server.engines.backends.llvm.kernels.contraction.loops import CACHE_LINE, Part, TiledLoops
from infer_server.engines.backends.llvm.kernels.contraction.panels import cout_panels, pack_program, rows_with_zeros
from infer_server.engines.backends.llvm.kernels.contraction.tiled import Tile, TiledContraction
from infer_server.engines.backends.llvm.kernels.kernel import solves
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import FLOAT, I8, I32, PTR, vector
from infer_server.engines.ir.rounding import HEAD
from infer_server.engines.lowering.problems.convolution import BlockedProduct, RoundedProduct
from infer_server.engines.lowering.problems.problem import Array

UNPACKING = 5           # instructions to convert a vector of bytes to floats: widen, mask, shift, two conversions
EIGHT = 8               # elements of K in four bytes of weights
TOGETHER = 4            # steps of EIGHT in an iteration of the loop
# (pixels, vectors). Each vector of a pixel has two accumulators: the sum of a block, and the sum of all blocks.
ROUNDED_TILES = ((1, 4), (2, 4), (4, 2), (6, 2), (2, 2), (3, 2), (4, 1), (6, 1), (12, 1), (1, 2))


@solves(BlockedProduct)
class BlockedKernel(TiledContraction):
    """Product of a float x and 4-bit weights.

    Weights are packed [panel][block]: [vector][lane] scales, [vector][lane] offsets unless the weights are centred,
    then [pair of k][vector][lane] bytes.
    """
    problem: BlockedProduct
    packing_is_permutation = False

    def tile_shapes(self, isa: Isa) -> Sequence[tuple[int, int]]:
        return usual_tile_shapes(isa, self.problem.precision)

    @property
    def blocks(self) -> list[int]:
        """Return the length along K of each quantisation block."""
        depth, block = self.problem.cin, self.problem.block
        return [min(block, depth - first) for first in range(0, depth, block)]

    @property
    def head(self) -> int:
        """Return the bytes of scale and offset that precede a block in each lane."""
        return 4 if self.problem.centred else 8

    @property
    def bytes_of_cout(self) -> int:
        return sum(self.head + -(-count // 2) for count in self.blocks)

    def turns_and_bytes(self, isa: Isa, vectors: int) -> tuple[float, int]:
        turns = sum(-(-count // 2) for count in self.blocks)
        return turns, round(self.bytes_of_cout * isa.lanes / turns)

    def turn_cycles(self, isa: Isa, pixels: int, vectors: int, tile: Tile) -> float:
        turn = Work(2 * vectors * (pixels + 1), UNPACKING * vectors, vectors + 2 * pixels + tile.prefetch)
        return max(turn.congested_cycles, LATENCY * 2)

    def pack(self, isa: Isa, tactic: Tile, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        panels = cout_panels(self.problem, isa, tactic.vectors)
        q, scales, offsets = (rows_with_zeros(np.asarray(constants[name])) for name in (
            "weights", "scales", "offsets"))
        heads = [scales] if self.problem.centred else [scales, offsets]
        packed: list[Array] = []
        for _, alike in groupby(panels, np.shape):
            some, parts = np.stack([*alike]), list[Array]()
            for number, count in enumerate(self.blocks):
                first = number * self.problem.block
                parts += [head[some, number].astype(np.float32).reshape(len(some), -1).view(np.uint8)
                          for head in heads]
                parts.append(self.packed_block(q[some, first:first + count].astype(np.uint8)).reshape(len(some), -1))
            packed.append(np.concatenate(parts, axis=1).ravel())
        return np.concatenate(packed), pack_program(self.problem, panels, constants)

    def packed_block(self, q: Array) -> Array:
        """Pack a block of each panel, [panel][vector][lane][k], into bytes, two weights each."""
        bits = np.pad(q, ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] % 2)))
        return np.asarray((bits[..., ::2] | bits[..., 1::2] << 4).transpose(0, 3, 1, 2))

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tile) -> None:
        _BlockedLoops(self, module, name, isa, tactic).emit()


@solves(RoundedProduct)
class RoundedKernel(BlockedKernel):
    """Product of x and 4-bit weights that are quantised in the same blocks.

    Weights are packed [panel][block]: the scales and offsets of BlockedKernel, then [eight of K][vector][lane] four
    bytes.
    """
    problem: RoundedProduct

    def arithmetic(self, isa: Isa) -> Arithmetic:
        """Return the arithmetic of the sums over all blocks."""
        return arithmetic_for("fp32", isa)

    def tile_shapes(self, isa: Isa) -> Sequence[tuple[int, int]]:
        return [(pixels, vectors) for pixels, vectors in ROUNDED_TILES
                if 2 * (pixels + 1) * vectors + pixels < isa.registers]

    @property
    def blocks(self) -> list[int]:
        return [self.problem.block] * (self.problem.cin // self.problem.block)

    def turns_and_bytes(self, isa: Isa, vectors: int) -> tuple[float, int]:
        turns = self.problem.cin / EIGHT
        return turns, round(self.bytes_of_cout * isa.lanes / turns)

    def turn_cycles(self, isa: Isa, pixels: int, vectors: int, tile: Tile) -> float:
        turn = Work(2 * vectors * pixels, 3 * vectors, vectors + 2 * pixels + tile.prefetch)
        return max(turn.congested_cycles, LATENCY * 2)

    def packed_block(self, q: Array) -> Array:
        eights = np.pad(q, ((0, 0), (0, 0), (0, 0), (0, self.problem.block - q.shape[-1])))
        eights = eights.reshape(*q.shape[:3], -1, 2, EIGHT // 2)
        return np.asarray((eights[..., 0, :] | eights[..., 1, :] << 4).transpose(0, 3, 1, 2, 4))

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tile) -> None:
        _RoundedLoops(self, module, name, isa, tactic).emit()


class _BlockedLoops(TiledLoops):
    """Emitter of BlockedKernel. Its micro-kernels have one more parameter, the panel's weights."""
    kernel: BlockedKernel
    arrays = 1

    def parameters(self, part: Part) -> Mapping[str, str]:
        return dict(w=PTR)

    def panel_weights(self, f: Function, before: Value, first: Value, start: Value) -> dict[str, Value]:
        return {"w": self.weights[0] + before * self.kernel.bytes_of_cout}

    def sum(self, f: Function, part: Part, acc: dict[Any, Value], vectors: int) -> None:
        at = {key: f.parameters[key] for key in ("x", "w")}
        pixels = {p: self.offset(i, j) for p, (i, j) in enumerate(part.pixels)}
        whole, rest = divmod(self.problem.cin, self.kernel.problem.block)
        for _ in f.loop("block", whole, acc=acc, at=at):
            self._block(f, self.kernel.problem.block, acc, at, pixels, vectors)
        if rest:
            self._block(f, rest, acc, at, pixels, vectors)

    def _block(self, f: Function, count: int, acc: dict[Any, Value], at: dict[str, Value], pixels: Mapping[int, int],
               vectors: int) -> None:
        isa = self.isa
        scales = self._heads(f, at, vectors)
        offsets = [scale * -8.0 for scale in scales] if self.kernel.problem.centred else self._heads(f, at, vectors)
        if pairs := count // 2:
            for _ in f.loop("k", pairs, acc=acc, at=at):
                self._pair(f, 2, acc, at, pixels, scales, offsets)
                if self.tile.prefetch:
                    isa.prefetch(at["w"] + self.panel * self.kernel.bytes_of_cout)
        if count % 2:
            self._pair(f, 1, acc, at, pixels, scales, offsets)

    def _heads(self, f: Function, at: dict[str, Value], vectors: int) -> list[Value]:
        start, size = at["w"], self.isa.bytes
        at["w"] = start + vectors * size
        return [f.load(self.isa.floats, start + v * size, 4, "head") for v in range(vectors)]

    def _pair(self, f: Function, count: int, acc: dict[Any, Value], at: dict[str, Value], pixels: Mapping[int, int],
              scales: Sequence[Value], offsets: Sequence[Value]) -> None:
        """Multiply one or two elements of K by their weights."""
        isa, size = self.isa, self.problem.x.size
        wide = [f.cast("zext", f.load(vector(isa.lanes, I8), at["w"] + v * isa.lanes, 4, "bits"), isa.ints, "wide")
                for v in range(len(scales))]
        for k in range(count):
            numbers = [isa.to_float(bits >> 4 if k else bits & 15) for bits in wide]
            weights = [isa.fma(*one) for one in zip(numbers, scales, offsets, strict=True)]
            for p, offset in pixels.items():
                (pixel,) = self.arithmetic.pixel(isa, at["x"] + (offset + k * size))
                for v, weight in enumerate(weights):
                    acc[p, v] = isa.fma(pixel, weight, acc[p, v])
        at["x"] += count * size
        at["w"] += len(scales) * isa.lanes


class _RoundedLoops(_BlockedLoops):
    """Emitter of RoundedKernel."""
    kernel: RoundedKernel

    def sum(self, f: Function, part: Part, acc: dict[Any, Value], vectors: int) -> None:
        at, block = {key: f.parameters[key] for key in ("x", "w")}, self.kernel.problem.block
        pixels = {p: self.offset(i, j) for p, (i, j) in enumerate(part.pixels)}
        for _ in f.loop("block", self.problem.cin // block, acc=acc, at=at):
            scales = self._heads(f, at, vectors)
            offsets = [] if self.kernel.problem.centred else self._heads(f, at, vectors)
            sums = self._sums(f, at, pixels, vectors)
            for p, offset in pixels.items():
                scale = f.splat(f.load(FLOAT, at["x"] + offset, 4, "scale"), self.isa.lanes)
                for v in range(vectors):
                    acc[p, v] = self.isa.fma(self.isa.to_float(sums[p, v]), scales[v] * scale, acc[p, v])
                if offsets:
                    total = self.isa.to_float(self._total(f, at["x"] + offset)) * scale
                    for v in range(vectors):
                        acc[p, v] = self.isa.fma(offsets[v], total, acc[p, v])
            at["x"] += HEAD + block

    def _total(self, f: Function, row: Value) -> Value:
        """Load the sum of a block of x into all lanes."""
        return f.splat(f.load(I32, row + HEAD // 2, 4, "total"), self.isa.lanes)

    def _sums(self, f: Function, at: dict[str, Value], pixels: Mapping[int, int],
              vectors: int) -> dict[Any, Value]:
        """Return the sums of x * q over a block, or of x * (q - 8) if the weights are centred."""
        sums: dict[Any, Value] = {}
        for p, offset in pixels.items():
            first = f.constant(0, self.isa.ints)
            if self.kernel.problem.centred:
                first = first - (self._total(f, at["x"] + offset) << 3)
            sums |= {(p, v): first for v in range(vectors)}
        steps = self.kernel.problem.block // EIGHT
        together = next(n for n in range(TOGETHER, 0, -1) if steps % n == 0)
        inside = {"x": at["x"] + HEAD, "w": at["w"]}
        for _ in f.loop("k", steps // together, acc=sums, at=inside):
            for _ in range(together):
                self._eight(f, sums, inside, pixels, vectors)
        at["w"] = inside["w"]
        return sums

    def _eight(self, f: Function, sums: dict[Any, Value], at: dict[str, Value], pixels: Mapping[int, int],
               vectors: int) -> None:
        isa = self.isa
        for v in range(vectors):
            bytes_ = f.load(vector(isa.bytes, I8), at["w"] + v * isa.bytes, 4, "bits")
            for half, q in enumerate((bytes_ & 15, bytes_.binary("lshr", 4))):
                for p, offset in pixels.items():
                    word = f.splat(f.load(I32, at["x"] + (offset + half * EIGHT // 2), 4, "word"), isa.lanes)
                    x = f.cast("bitcast", word, bytes_.type, "x")
                    sums[p, v] = isa.small_dot(sums[p, v], q, x)
        if self.tile.prefetch:
            for v in range(0, vectors * isa.bytes, CACHE_LINE):
                isa.prefetch(at["w"] + (self.panel * self.kernel.bytes_of_cout + v))
        at["x"] += EIGHT
        at["w"] += vectors * isa.bytes
