"""Paired kernel of a contraction: INT8 products by vpmaddubsw, summed two at a time in 16 bits.

It serves machines without a dot product of bytes. The loops are those of tiled.py; pairing.py pairs the weights so that
no sum of two products overflows.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.access import hidden
from infer_server.engines.backends.llvm.kernels.common.cost import CYCLES_PER_BYTE_L2, EXPOSED_SHARE, Work
from infer_server.engines.backends.llvm.kernels.contraction.loops import CACHE_LINE, Part, TiledLoops
from infer_server.engines.backends.llvm.kernels.contraction.pairing import STEP, WINDOW, pair
from infer_server.engines.backends.llvm.kernels.contraction.panels import cout_panels, pack_program
from infer_server.engines.backends.llvm.kernels.contraction.tiled import Tile, TiledContraction
from infer_server.engines.backends.llvm.kernels.kernel import solves
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import I8, I32, I64, PTR, vector
from infer_server.engines.lowering.problems.convolution import Contraction, ScaledContraction
from infer_server.engines.lowering.problems.problem import Array

SOURCE = 8              # bytes of a step's offset and indices
TEMPORARIES = 4         # registers in addition to sums and weights: ones, indices, a pixel, a product


@dataclass(frozen=True)
class PairedTile(Tile):
    """Tactic of the paired kernel."""
    layout: ClassVar[str] = "paired"


@solves(ScaledContraction)
@solves(Contraction)
class PairedContraction(TiledContraction):
    """Contraction by paired products. Weights are packed as the three arrays of pairing.Paired."""
    tile = PairedTile           # taps cannot be skipped: paired weights are not in the order of taps
    packing_is_permutation = False

    def tile_shapes(self, isa: Isa) -> Sequence[tuple[int, int]]:
        return isa.paired_tiles if self.problem.precision == "int8" else ()

    def turns_and_bytes(self, isa: Isa, vectors: int) -> tuple[float, int]:
        runs = len(self.run_offsets())
        return -(-self.run // STEP) * runs + unpaired(self.run * runs, vectors) / STEP, isa.lanes * STEP

    def turn_cycles(self, isa: Isa, pixels: int, vectors: int, tile: Tile) -> float:
        """Return the cycles of one step. With prefetch, every tile reads all of the next panel from L2 once more."""
        turn = Work(2, 1, 1) * (pixels * vectors) + Work(others=pixels, loads=pixels)
        ahead = EXPOSED_SHARE * CYCLES_PER_BYTE_L2 * vectors * isa.lanes * STEP
        return max(turn.congested_cycles, 1) + tile.prefetch * ahead

    def packing_anywhere(self, tactic: Tile) -> Any:
        """Return the whole problem and the panel width: packed offsets depend on the strides of x."""
        return self.problem, tactic.vectors

    def pack(self, isa: Isa, tactic: Tile, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        panels, width = cout_panels(self.problem, isa, tactic.vectors), tactic.vectors * isa.lanes
        runs = self.runs(np.asarray(constants["weights"], np.int8))
        # Pad the last panel to full width.
        whole = [np.pad(panel.ravel(), (0, width - panel.size), constant_values=len(runs) - 1) for panel in panels]
        paired = pair(runs[np.stack(whole)], self.run_offsets())
        return paired.steps, paired.sources, paired.starts, pack_program(self.problem, panels, constants)

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tile) -> None:
        _PairedLoops(self, module, name, isa, tactic).emit()


def unpaired(weights: int, vectors: int) -> float:
    """Estimate how many of a channel's `weights` find no partner, in panels of `vectors` vectors of eight channels.

    More channels must agree in wider panels. With more weights fewer stay alone: the largest, which decides the scale,
    is then further from the others. The constants are fitted to weights of trained and of random networks.
    """
    return min(weights, 6 * vectors, 40 * vectors ** 3 / weights)


class _PairedLoops(TiledLoops):
    """Emitter of the paired kernel.

    Its micro-kernels have three more parameters: the weights of the panel's steps, the sources of their bytes of x, and
    the number of steps.
    """
    arrays = 3

    def parameters(self, part: Part) -> Mapping[str, str]:
        return dict(w=PTR, sources=PTR, count=I64)

    def panel_weights(self, f: Function, before: Value, first: Value, start: Value) -> dict[str, Value]:
        problem, (steps, sources, starts) = self.problem, self.weights
        panel = first.divided(problem.cout) * -(-problem.cout // self.panel) + start.divided(self.panel)
        begin, end = (f.cast("zext", f.load(I32, starts + panel * 4 + at, 4, "step"), I64, "step") for at in (0, 4))
        return {"w": steps + begin * self.panel * STEP, "sources": sources + begin * SOURCE, "count": end - begin}

    def sum(self, f: Function, part: Part, acc: dict[Any, Value], vectors: int) -> None:
        """Emit all steps of the panel."""
        isa, pixels = self.isa, [self.offset(i, j) for i, j in part.pixels]
        step_bytes, bytes_ = self.panel * STEP, vector(isa.bytes, I8)
        at = {key: f.parameters[key] for key in ("w", "sources")}
        panel = f.parameters["count"] * step_bytes
        keep = len(acc) + vectors + TEMPORARIES <= isa.registers

        def load_weights(w: Value) -> list[Value]:
            return [f.load(bytes_, w + v * isa.bytes, isa.bytes, "weights") for v in range(vectors)]

        for _ in f.range("step", panel.like(0), f.parameters["count"], acc=acc, at=at):     # empty if all weights are 0
            x = f.parameters["x"] + f.cast("sext", f.load(I32, at["sources"], SOURCE, "offset"), I64, "offset")
            indices = f.splat(f.load(I32, at["sources"] + 4, 4, "indices"), isa.lanes)
            indices = f.cast("bitcast", indices, bytes_, "indices")
            weights = load_weights(at["w"])
            for p, pixel in enumerate(pixels):
                window = f.shuffle(f.load(vector(WINDOW, I8), x + pixel, hint="window"), None,
                                   [i % WINDOW for i in range(isa.bytes)], "window")
                taken = isa.shuffle_bytes(window, indices)
                if p and not keep:      # too few registers to keep them; reload for each pixel
                    weights = load_weights(hidden(at["w"]))
                for v in range(vectors):
                    acc[p, v] = isa.paired_dot(acc[p, v], taken, weights[v])
            if self.tile.prefetch:
                for line in range(0, step_bytes, CACHE_LINE):
                    isa.prefetch(at["w"] + panel + line)
            at["w"] += step_bytes
            at["sources"] += SOURCE
