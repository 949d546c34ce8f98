"""The matrix product by weights of four bits: they are made floats on their way to registers.

    for block of K: scale, offset of each cout
      for k, k + 1: a byte holds the weights of both
        w = scale * q + offset;   acc[pixel] += x[pixel] * w           for all pixels of the tile

A product of few rows takes as long as its weights take to read; with more rows, what a weight costs here is shared by
the pixels of a tile. The loops around are those of tiled.py.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.contraction.direct import usual_tile_shapes
from engines.backends.llvm.kernels.contraction.loops import Part, TiledLoops
from engines.backends.llvm.kernels.contraction.panels import cout_panels, pack_program, rows_with_zeros
from engines.backends.llvm.kernels.contraction.tiled import Tile, TiledContraction
from engines.backends.llvm.kernels.kernel import solves
from engines.backends.llvm.tuning.cost import LATENCY, Work
from engines.codegen.ir_builder import Function, Module, Value
from engines.codegen.types import I8, PTR, vector
from engines.lowering.problems.convolution import BlockedProduct
from engines.lowering.problems.problem import Array

UNPACKING = 5           # instructions that make floats of a vector of bytes: widen, mask, shift, twice convert


@solves(BlockedProduct)
class BlockedKernel(TiledContraction):
    """Weights are packed [panel][block]: [vector][lane] scales, offsets where they are given, then
    [pair of k][vector][lane] bytes."""
    problem: BlockedProduct
    packing_is_permutation = False

    def tile_shapes(self, isa: Isa) -> Sequence[tuple[int, int]]:
        return usual_tile_shapes(isa, self.problem.precision)

    @property
    def blocks(self) -> list[int]:
        """How many of K each of them has."""
        depth, block = self.problem.cin, self.problem.block
        return [min(block, depth - first) for first in range(0, depth, block)]

    @property
    def head(self) -> int:
        """Bytes of a lane before a block."""
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
        parts: list[Array] = []
        for panel in panels:
            for number, count in enumerate(self.blocks):
                first = number * self.problem.block
                heads = [scales] if self.problem.centred else [scales, offsets]
                parts += [head[panel, number].astype(np.float32).ravel().view(np.uint8) for head in heads]
                bits = np.pad(q[panel, first:first + count], ((0, 0), (0, 0), (0, count % 2))).astype(np.uint8)
                parts.append((bits[..., ::2] | bits[..., 1::2] << 4).transpose(2, 0, 1).ravel())
        return np.concatenate(parts), pack_program(self.problem, panels, constants)

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tile) -> None:
        _BlockedLoops(self, module, name, isa, tactic).emit()


class _BlockedLoops(TiledLoops):
    """A micro-kernel has the panel's weights as a parameter."""
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
        """One or two of K."""
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
