"""A contraction to very few couts as dot products: lanes are elements of x's runs, not couts.

    for tap that starts a run:
      for vector of the run:
        for cout: for pixel: acc[pixel, cout] += x[pixel, vector] * w[cout, vector]
    sums of `lanes` of these as one vector, from which each pixel's couts are taken

In float32: the last layers of decoders, masks, super-resolution, scores. One cout of 250 products takes 16 turns of
vectors of 16, where those that broadcast take 250.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.common.access import lane_sums
from engines.backends.llvm.kernels.contraction.loops import Part, TiledLoops
from engines.backends.llvm.kernels.contraction.panels import cout_panels, pack_program
from engines.backends.llvm.kernels.contraction.tiled import Tile, TiledContraction
from engines.backends.llvm.kernels.kernel import solves
from engines.backends.llvm.tuning.cost import LATENCY, Work
from engines.codegen.ir_builder import Function, Module, Value
from engines.codegen.types import FLOAT, PTR, vector
from engines.lowering.problems.convolution import Contraction
from engines.lowering.problems.problem import Array

SUMS = 4            # that are made at once, at least: a sum waits for its last product as long as four take
SHARE = 5 / 8       # of the registers, for sums: beside them vectors of x and of the weights


@dataclass(frozen=True)
class DotTile(Tile):
    layout: ClassVar[str] = "dots"


@solves(Contraction)
class DotContraction(TiledContraction):
    """Weights are packed [run][vector][cout][lane], zeros behind a run."""
    tile = DotTile

    def tile_shapes(self, isa: Isa) -> Sequence[tuple[int, int]]:
        problem = self.problem
        near = problem.x.strides[-1] == problem.x.size
        if (problem.precision != "fp32" or problem.weights or problem.groups > 1 or problem.cout >= isa.lanes
                or not near):
            return ()
        most = max(int(isa.registers * SHARE) // problem.cout, 1)
        return tuple((pixels, 1) for pixels in dict.fromkeys((most, max(most // 2, 1))))

    def vectors_of_a_run(self, isa: Isa) -> int:
        return -(-self.run // isa.lanes)

    def turns_and_bytes(self, isa: Isa, vectors: int) -> tuple[float, int]:
        return self.vectors_of_a_run(isa) * len(self.run_offsets()), self.problem.cout * isa.bytes

    def turn_cycles(self, isa: Isa, pixels: int, vectors: int, tile: Tile) -> float:
        """With its share of the sums over lanes. A vector of x mostly lies in two lines, which takes two loads."""
        couts = self.problem.cout
        sums = Work(others=3 * isa.lanes * -(-pixels // pixels_of_a_vector(isa, couts)) + pixels)
        turn = Work(pixels * couts, 0, 2 * pixels + couts) + sums * (1 / self.turns_and_bytes(isa, vectors)[0])
        return max(turn.congested_cycles, LATENCY * min(pixels * couts / SUMS, 1))

    def packing_anywhere(self, tactic: Tile) -> Any:
        problem = self.problem
        return self.tile.layout, problem.cin, problem.cout, problem.taps, self.run

    def pack(self, isa: Isa, tactic: Tile, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        runs = self.runs(np.asarray(constants["weights"], np.float32))[:self.problem.cout]
        whole = np.pad(runs, ((0, 0), (0, 0), (0, -self.run % isa.lanes)))
        weights = whole.reshape(*runs.shape[:2], -1, isa.lanes).transpose(1, 2, 0, 3)
        program = pack_program(self.problem, cout_panels(self.problem, isa, tactic.vectors), constants)
        return np.ascontiguousarray(weights).ravel(), program

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tile) -> None:
        _DotLoops(self, module, name, isa, tactic).emit()


def pixels_of_a_vector(isa: Isa, couts: int) -> int:
    """Of how many pixels one vector holds the sums: each one's couts in as many lanes, or a power of two."""
    return isa.lanes // _lanes_of(couts)


def _lanes_of(couts: int) -> int:
    return 1 << (couts - 1).bit_length()


class _DotLoops(TiledLoops):
    """The parameter of a micro-kernel beside those of every tile: the weights."""
    kernel: DotContraction
    arrays = 1

    def parameters(self, part: Part) -> Mapping[str, str]:
        return dict(w=PTR)

    def panel_weights(self, f: Function, before: Value, first: Value, start: Value) -> dict[str, Value]:
        return {"w": self.weights[0]}       # there is one panel

    def sum(self, f: Function, part: Part, acc: dict[Any, Value], vectors: int) -> None:
        problem, kernel, planes = self.kernel.image, self.kernel, self.kernel.planes
        pixels = [self.offset(i, j) for i, j in part.pixels]
        chains = -(-SUMS // (len(pixels) * problem.cout))       # of products that do not wait for each other
        sums = {(p, cout, chain): f.constant(0, self.isa.floats) for p in range(len(pixels))
                for cout in range(problem.cout) for chain in range(chains)}
        at = {key: f.parameters[key] for key in ("x", "w")}
        columns = 1 if kernel.one_run else problem.taps[1]
        for _ in f.loop("tap plane", planes.taps, sums=sums, at=at):
            plane = at["x"]
            for _ in f.loop("tap row", problem.taps[0], sums=sums, at=at):
                row = at["x"]
                for _ in f.loop("tap column", columns, sums=sums, at=at):
                    self._run(f, sums, at, pixels, chains)
                    at["w"] += kernel.vectors_of_a_run(self.isa) * problem.cout * self.isa.bytes
                    at["x"] += problem.x.strides[1] * problem.dilation[1]
                at["x"] = row + problem.x.strides[0] * problem.dilation[0]
            at["x"] = plane + planes.tap_step
        for chain in range(1, chains):
            for p, cout in ((p, cout) for p, cout, of in list(sums) if of == 0):
                sums[p, cout, 0] += sums[p, cout, chain]
        self._spread(f, {key[:2]: value for key, value in sums.items() if not key[2]}, acc)

    def _run(self, f: Function, sums: dict[Any, Value], at: Mapping[str, Value], pixels: Sequence[int],
             chains: int) -> None:
        """The products of one run, of pixels so many bytes from the first."""
        isa, couts = self.isa, self.problem.cout
        for k, count in f.tiles("run", self.kernel.run, isa.lanes * chains, sums=sums):
            x, w = at["x"] + k * 4, at["w"] + k * (4 * couts)
            for chain, first in enumerate(range(0, count, isa.lanes)):
                def weight(cout: int, chain: int = chain) -> Value:
                    return f.load(isa.floats, w + (chain * couts + cout) * isa.bytes, isa.bytes, "weights")

                def part(p: int, first: int = first) -> Value:
                    return _loaded(isa, x + (pixels[p] + first * 4), min(isa.lanes, count - first))

                # the fewer factors stay in registers, the more come one by one
                if couts < len(pixels):
                    kept = [weight(cout) for cout in range(couts)]
                    products = ((p, cout, x_part, kept[cout]) for p in range(len(pixels)) for x_part in [part(p)]
                                for cout in range(couts))
                else:
                    kept = [part(p) for p in range(len(pixels))]
                    products = ((p, cout, kept[p], w_part) for cout in range(couts) for w_part in [weight(cout)]
                                for p in range(len(pixels)))
                for p, cout, x_part, w_part in products:
                    sums[p, cout, chain] = isa.fma(x_part, w_part, sums[p, cout, chain])

    def _spread(self, f: Function, sums: Mapping[tuple[int, int], Value], acc: dict[Any, Value]) -> None:
        """{(pixel, cout): vector of which the lanes are to be summed} -> each pixel's couts, a lane each."""
        isa, couts = self.isa, self.problem.cout
        width, together = _lanes_of(couts), pixels_of_a_vector(isa, couts)
        zero = f.constant(0, isa.floats)
        for first in range(0, len(acc), together):
            made = lane_sums([sums.get((first + j, cout), zero) for j in range(together) for cout in range(width)])
            for j in range(min(together, len(acc) - first)):
                lanes = [j * width + lane % width for lane in range(isa.lanes)]
                acc[first + j, 0] = f.shuffle(made, None, lanes, "pixel") if j else made


def _loaded(isa: Isa, address: Value, count: int) -> Value:
    """`count` floats, zeros behind them."""
    f = address.f
    part = f.load(vector(count, FLOAT), address, hint="x")
    lanes = [min(i, count) for i in range(isa.lanes)]
    return part if count == isa.lanes else f.shuffle(part, part.like(0), lanes, "x")
