"""Contraction to very few output channels (couts) as dot products: lanes are elements of x's runs.

    for tap that starts a run:
      for vector of the run:
        for cout: for pixel: acc[pixel, cout] += x[pixel, vector] * w[cout, vector]
    reduce `lanes` of these vectors to one, and take each pixel's couts from it

It serves float32: the last layers of decoders, masks, super-resolution, scores. One cout with 250 products takes 16
iterations with vectors of 16, where kernels that broadcast x take 250.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.access import lane_sums
from infer_server.engines.backends.llvm.kernels.common.cost import LATENCY, Work
from infer_server.engines.backends.llvm.kernels.contraction.loops import Part, TiledLoops
from infer_server.engines.backends.llvm.kernels.contraction.panels import cout_panels, pack_program
from infer_server.engines.backends.llvm.kernels.contraction.tiled import Tile, TiledContraction
from infer_server.engines.backends.llvm.kernels.kernel import solves
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import FLOAT, I64, PTR, vector
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.problem import Array

SUMS = 4            # least number of independent accumulators, to hide the latency of a product
SHARE = 5 / 8       # share of the registers for accumulators; the others hold x and weights


@dataclass(frozen=True)
class DotTile(Tile):
    """Tactic of the dot-product kernel."""
    layout: ClassVar[str] = "dots"


@solves(Contraction)
class DotContraction(TiledContraction):
    """Contraction by dot products. Weights are packed [run][vector][cout][lane], with zeros past a run.

    Taps in the border are skipped by whole rows.
    """
    tile = DotTile
    skips_taps = True

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
        """Return the cycles of an iteration, with its share of the reductions over lanes.

        A vector of x mostly crosses a cache line, which takes two loads.
        """
        couts = self.problem.cout
        sums = Work(others=3 * isa.lanes * -(-pixels // pixels_of_a_vector(isa, couts)) + pixels)
        turn = Work(pixels * couts, 0, 2 * pixels + couts) + sums * (1 / self.turns_and_bytes(isa, vectors)[0])
        live = self.axes[0].live_share(self.image.rows) if tile.skip and tile.rows == 1 else 1
        return live * max(turn.congested_cycles, LATENCY * min(pixels * couts / SUMS, 1))

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
    """Return the number of pixels whose sums one vector holds; each has a power of two of lanes."""
    return isa.lanes // _lanes_of(couts)


def _lanes_of(couts: int) -> int:
    return 1 << (couts - 1).bit_length()


class _DotLoops(TiledLoops):
    """Emitter of the dot-product kernel.

    Its micro-kernels have more parameters: the weights, and if taps are skipped, the number of live rows of taps.
    """
    kernel: DotContraction
    arrays = 1

    @property
    def _bytes_of_a_run(self) -> int:
        """Return the bytes of a run's weights."""
        return self.kernel.vectors_of_a_run(self.isa) * self.problem.cout * self.isa.bytes

    @property
    def _runs_of_a_row(self) -> int:
        return 1 if self.kernel.one_run else self.kernel.image.taps[1]

    def parameters(self, part: Part) -> Mapping[str, str]:
        return dict(w=PTR) | ({"tap_rows": I64} if part.tap_rows else {})

    def tile_arguments(self, part: Part, x: Value, arguments: dict[str, Value], tile: Value,
                       channels: int) -> tuple[Value, dict[str, Value]]:
        if part.tap_rows:
            first, arguments["tap_rows"] = part.tap_rows
            x += first * (self.problem.x.strides[0] * self.problem.dilation[0])
            arguments["w"] += first * (self._runs_of_a_row * self._bytes_of_a_run)
        return x, arguments

    def panel_weights(self, f: Function, before: Value, first: Value, start: Value) -> dict[str, Value]:
        return {"w": self.weights[0]}       # the only panel

    def sum(self, f: Function, part: Part, acc: dict[Any, Value], vectors: int) -> None:
        problem, planes = self.kernel.image, self.kernel.planes
        pixels = [self.offset(i, j) for i, j in part.pixels]
        chains = -(-SUMS // (len(pixels) * problem.cout))       # independent accumulators of each sum
        sums = {(p, cout, chain): f.constant(0, self.isa.floats) for p in range(len(pixels))
                for cout in range(problem.cout) for chain in range(chains)}
        at = {key: f.parameters[key] for key in ("x", "w")}
        live_rows = f.parameters.get("tap_rows")
        for _ in f.loop("tap plane", planes.taps, sums=sums, at=at):
            plane = at["x"]
            rows = f.loop("tap row", problem.taps[0], sums=sums, at=at) if live_rows is None else \
                f.range("tap row", live_rows.like(0), live_rows, sums=sums, at=at)
            for _ in rows:
                row = at["x"]
                for _ in f.loop("tap column", self._runs_of_a_row, sums=sums, at=at):
                    self._run(f, sums, at, pixels, chains)
                    at["w"] += self._bytes_of_a_run
                    at["x"] += problem.x.strides[1] * problem.dilation[1]
                at["x"] = row + problem.x.strides[0] * problem.dilation[0]
            at["x"] = plane + planes.tap_step
        for chain in range(1, chains):
            for p, cout in ((p, cout) for p, cout, of in list(sums) if of == 0):
                sums[p, cout, 0] += sums[p, cout, chain]
        self._spread(f, {key[:2]: value for key, value in sums.items() if not key[2]}, acc)

    def _run(self, f: Function, sums: dict[Any, Value], at: Mapping[str, Value], pixels: Sequence[int],
             chains: int) -> None:
        """Emit the products of one run, for pixels at these byte offsets from the first."""
        lanes, couts = self.isa.lanes, self.problem.cout
        for k, count in f.tiles("run", self.kernel.run, lanes * chains, sums=sums):
            for chain, first in enumerate(range(0, count, lanes)):
                x, w = at["x"] + (k + first) * 4, at["w"] + (k + first) * (4 * couts)
                self._turn(sums, chain, [x + pixel for pixel in pixels], w, min(lanes, count - first))

    def _turn(self, sums: dict[Any, Value], chain: int, pixels: Sequence[Value], w: Value, count: int) -> None:
        """Emit the products of `count` elements of a run. The factor with fewer vectors stays in registers."""
        isa, couts = self.isa, range(self.problem.cout)

        def weight(cout: int) -> Value:
            return w.f.load(isa.floats, w + cout * isa.bytes, isa.bytes, "weights")

        if len(couts) < len(pixels):
            weights = [weight(cout) for cout in couts]
            for p, pixel in enumerate(pixels):
                part = _loaded(isa, pixel, count)
                for cout in couts:
                    sums[p, cout, chain] = isa.fma(part, weights[cout], sums[p, cout, chain])
            return
        parts = [_loaded(isa, pixel, count) for pixel in pixels]
        for cout in couts:
            row = weight(cout)
            for p, part in enumerate(parts):
                sums[p, cout, chain] = isa.fma(part, row, sums[p, cout, chain])

    def _spread(self, f: Function, sums: Mapping[tuple[int, int], Value], acc: dict[Any, Value]) -> None:
        """Reduce {(pixel, cout): vector} over lanes, and put each pixel's couts into the lanes of its accumulator."""
        isa, couts = self.isa, self.problem.cout
        width, together = _lanes_of(couts), pixels_of_a_vector(isa, couts)
        zero = f.constant(0, isa.floats)
        for first in range(0, len(acc), together):
            made = lane_sums([sums.get((first + j, cout), zero) for j in range(together) for cout in range(width)])
            for j in range(min(together, len(acc) - first)):
                lanes = [j * width + lane % width for lane in range(isa.lanes)]
                acc[first + j, 0] = f.shuffle(made, None, lanes, "pixel") if j else made


def _loaded(isa: Isa, address: Value, count: int) -> Value:
    """Load `count` floats; the other lanes are 0."""
    f = address.f
    part = f.load(vector(count, FLOAT), address, hint="x")
    lanes = [min(i, count) for i in range(isa.lanes)]
    return part if count == isa.lanes else f.shuffle(part, part.like(0), lanes, "x")
