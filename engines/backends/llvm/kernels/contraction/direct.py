"""Direct kernel of a contraction: a register-tiled sum of products, for every arithmetic.

The loops are those of tiled.py. This module has the innermost two, the packing of weights, and their cost.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.arithmetic import UPCAST, Arithmetic, add_step, k_turns
from infer_server.engines.backends.llvm.kernels.common.cost import LATENCY, Work
from infer_server.engines.backends.llvm.kernels.contraction.loops import CACHE_LINE, Part, TiledLoops
from infer_server.engines.backends.llvm.kernels.contraction.panels import cout_panels, pack_program
from infer_server.engines.backends.llvm.kernels.contraction.tiled import Tile, TiledContraction
from infer_server.engines.backends.llvm.kernels.contraction.widen import widened
from infer_server.engines.backends.llvm.kernels.kernel import solves
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import I64, PTR
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.lowering.problems.convolution import Contraction, ScaledContraction
from infer_server.engines.lowering.problems.problem import Array, Problem

MOST_SHARES = 3     # log2 of the most iterations that prefetch the same cache line


def usual_tile_shapes(isa: Isa, precision: str) -> Sequence[tuple[int, int]]:
    """Return (pixels, vectors) of tiles worth trying on a machine, the usual winner first."""
    return isa.tiles if precision == "int8" else isa.float_tiles or isa.tiles


@solves(ScaledContraction)
@solves(Contraction)
class DirectContraction(TiledContraction):
    """Contraction in the order of memory. Weights are packed [panel][tap][k][vector][lane][element of a step]."""
    skips_taps = True

    # ---- tactics and cost
    def tile_shapes(self, isa: Isa) -> Sequence[tuple[int, int]]:
        return usual_tile_shapes(isa, self.problem.precision)

    def turns_and_bytes(self, isa: Isa, vectors: int) -> tuple[float, int]:
        return self.turns(isa), self.arithmetic(isa).weight_bytes(isa)

    def parts(self, isa: Isa) -> int:
        """Return the products in a dot product of a vector: more than one if its weights are wider than a register."""
        return -(-self.arithmetic(isa).weight_bytes(isa) // isa.bytes)

    def turn_cycles(self, isa: Isa, pixels: int, vectors: int, tile: Tile) -> float:
        dots = pixels * vectors
        parts, latency = self.parts(isa), 1      # latency of an accumulation, in cycles
        if parts == 1:
            turn, latency = Work(dots, 0, pixels + vectors), LATENCY
        else:
            turn = Work(dots * parts, (dots + pixels) * parts, pixels + dots * parts)
        turn += Work(loads=tile.prefetch)
        return max(turn.congested_cycles, latency) * (self._live(isa, tile.rows) if tile.skip else 1)

    def _live(self, isa: Isa, rows: int) -> float:
        """Return the share of the taps that are not skipped."""
        counted = (rows == 1, self.whole_taps(isa))
        axes = zip(self.axes, self.image.y.shape, counted, strict=False)
        return math.prod(axis.live_share(outputs) for axis, outputs, counts in axes if counts)

    def whole_taps(self, isa: Isa) -> bool:
        """Return True if no step holds channels of two taps, so that single taps can be skipped."""
        return not self.one_run or self.problem.cin % self.arithmetic(isa).elements == 0

    # ---- constants
    def packing_anywhere(self, tactic: Tile) -> Any:
        """Return all that `pack` reads of the problem.

        The number of pixels and their strides are not part of it, except through `run`.
        """
        problem = self.problem
        return (problem.precision, problem.weights, problem.groups, problem.cin, problem.cout, problem.taps,
                problem.y.dtype, problem.y.shape[-1], self.run, tactic.vectors)

    def pack(self, isa: Isa, tactic: Tile, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        arithmetic, panels = self.arithmetic(isa), cout_panels(self.problem, isa, tactic.vectors)
        runs = self.runs(arithmetic.store_weights(constants["weights"]))
        runs = np.ascontiguousarray(np.pad(runs, ((0, 0), (0, 0), (0, -self.run % arithmetic.elements))))
        # View the elements of a step as one integer, to move them together: [cout][turn]
        steps = runs.reshape(len(runs), -1).view(f"u{arithmetic.elements * runs.itemsize}")
        turned = [np.ascontiguousarray(steps[panel].transpose(2, 0, 1))[..., None].view(runs.dtype)
                  for panel in panels]                                  # [turn][vector][lane][element]
        weights = np.concatenate([arithmetic.ready(isa, panel).ravel() for panel in turned])
        return weights, pack_program(self.problem, panels, constants)

    def expansions(self, isa: Isa, tactic: Tile) -> Mapping[int, Problem]:
        return widened(isa) if self.problem.precision == "int8" else {}

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tile) -> None:
        _DirectLoops(self, module, name, isa, tactic).emit()


@dataclass(frozen=True)
class UpcastTile(Tile):
    """Tactic of a contraction in float32 of bfloat16 operands."""
    layout: ClassVar[str] = "float32"


@solves(Contraction)
class UpcastContraction(DirectContraction):
    """Contraction of bfloat16 by float32 products, on CPUs that also have products of bfloat16.

    A Xeon of model 143, 167 or 207 does 16 multiply-accumulates a cycle by vdpbf16ps, and 30 by two FMA in float32.
    """
    tile = UpcastTile

    def tile_shapes(self, isa: Isa) -> Sequence[tuple[int, int]]:
        problem = self.problem
        return super().tile_shapes(isa) if isa.bf16 and problem.precision == "bf16" and not problem.weights else ()

    def arithmetic(self, isa: Isa) -> Arithmetic:
        return UPCAST

    def packing_anywhere(self, tactic: Tile) -> Any:
        return (*super().packing_anywhere(tactic), tactic.layout)


class _DirectLoops(TiledLoops):
    """Emitter of the direct kernel.

    Its micro-kernels have more parameters: the panel's weights, the next panel's to be prefetched, and if taps are
    skipped, the number of live rows of taps.
    """
    kernel: DirectContraction
    arrays = 1

    @property
    def _bytes_a_turn(self) -> int:
        """Return the bytes of a panel's weights in one iteration of the K loop."""
        return self.tile.vectors * self.arithmetic.weight_bytes(self.isa)

    @cached_property
    def _turns_a_line(self) -> int:
        """Return how many iterations prefetch the same cache line of the next panel.

        All tiles before the next panel share the prefetches. Memory does not deliver a burst sooner, and lines
        prefetched beyond the next panel would evict it.
        """
        tiles = self.kernel.block(self.tile)
        if self.problem.rows != 1:
            tiles *= -(-self.problem.cols // self.tile.cols)
        if self.kernel.by_batch or isinstance(tiles, SymbolicInt):
            return 1
        shares = tiles * CACHE_LINE // self._bytes_a_turn
        return 1 << min(max(shares, 1).bit_length() - 1, MOST_SHARES)

    @property
    def form(self) -> str:
        return f"{super().form} {self._turns_a_line}" if self.tile.prefetch else super().form

    def parameters(self, part: Part) -> Mapping[str, str]:
        return dict(w=PTR, ahead=PTR) | ({"tap_rows": I64} if part.tap_rows else {})

    def panel_weights(self, f: Function, before: Value, first: Value, start: Value) -> dict[str, Value]:
        bytes_of_cout = self.kernel.turns(self.isa) * self.arithmetic.weight_bytes(self.isa) // self.isa.lanes
        weights = self.weights[0] + before * bytes_of_cout
        return {"w": weights, "ahead": weights + self.panel * bytes_of_cout}

    def tile_arguments(self, part: Part, x: Value, arguments: dict[str, Value], tile: Value,
                       channels: int) -> tuple[Value, dict[str, Value]]:
        problem, turns = self.problem, self.kernel.turns(self.isa)
        if self.tile.prefetch:
            line = CACHE_LINE // self._turns_a_line
            tiles = max(self._bytes_a_turn // line, 1)      # after these all of the next panel has been prefetched
            arguments["ahead"] += tile.at_most(tiles) * (turns * line)
        if part.tap_rows:
            first, arguments["tap_rows"] = part.tap_rows
            x += first * (problem.x.strides[0] * problem.dilation[0])
            turns //= self.kernel.planes.taps * problem.taps[0]
            arguments["w"] += first * (self.isa.vectors_for(channels) * turns * self.arithmetic.weight_bytes(self.isa))
        return x, arguments

    def sum(self, f: Function, part: Part, acc: dict[Any, Value], vectors: int) -> None:
        """Emit the sums over all of K, or over its live taps."""
        at, planes = {key: f.parameters[key] for key in ("x", "w", "ahead")}, self.kernel.planes
        if not planes.of_volumes:
            self._plane(f, part, acc, at, vectors)
            return
        bytes_of_taps = self.kernel.turns(self.isa) // planes.taps * vectors * self.arithmetic.weight_bytes(self.isa)
        for _ in f.loop("tap plane", planes.taps, acc=acc, at=at):
            x, w = at["x"], at["w"]
            self._plane(f, part, acc, at, vectors)
            at["x"], at["w"] = x + planes.tap_step, w + bytes_of_taps

    def _plane(self, f: Function, part: Part, acc: dict[Any, Value], at: dict[str, Value], vectors: int) -> None:
        """Emit the sums over the taps of one plane, or over those that are live."""
        problem, arithmetic, steps = self.problem, self.arithmetic, self.kernel.steps(self.isa)
        x_row, x_pixel, _ = problem.x.strides
        live_rows = f.parameters.get("tap_rows")
        rows = f.loop("tap row", problem.taps[0], acc=acc, at=at) if live_rows is None else \
            f.range("tap row", live_rows.like(0), live_rows, acc=acc, at=at)
        for _ in rows:
            start = at["x"]
            for columns, live in self._tap_columns(part):
                alive = {p: self.offset(i, j) for p, (i, j) in enumerate(part.pixels) if j in live}
                if self.kernel.one_run:
                    of_columns = columns * problem.cin // arithmetic.elements
                    self._k_loop(f, steps if columns == problem.taps[1] else of_columns, acc, at, alive, vectors)
                    continue
                for _ in f.loop("tap column", columns, acc=acc, at=at):
                    self._k_loop(f, steps, acc, at, alive, vectors)
                    at["x"] += x_pixel * problem.dilation[1] - steps * arithmetic.step_bytes
            at["x"] = start + x_row * problem.dilation[0]

    def _tap_columns(self, part: Part) -> list[tuple[int, frozenset[int]]]:
        """Return the taps of a kernel row as runs of (number of taps, columns of the tile for which they are live)."""
        if part.column is None or not self.kernel.whole_taps(self.isa):
            return [(self.problem.taps[1], frozenset(range(part.cols)))]
        runs = self.kernel.axes[1].runs(range(part.column, part.column + part.cols))
        return [(taps, frozenset(column - part.column for column in live)) for taps, live in runs]

    def _k_loop(self, f: Function, steps: int, acc: dict[Any, Value], at: dict[str, Value],
                pixels: Mapping[int, int], vectors: int) -> None:
        """Emit `steps` iterations for pixels at these byte offsets.

        The last one is separate if the arithmetic has exact_end.
        """
        arithmetic = self.arithmetic
        apart = arithmetic.exact_end and self.kernel.run % arithmetic.elements != 0
        if steps > apart:
            products = len(pixels) * vectors * self.kernel.parts(self.isa)
            for _ in k_turns(f, steps - apart, products, acc=acc, at=at):
                self._turn(acc, at, pixels, vectors)
        if apart:
            self._turn(acc, at, pixels, vectors, last=True)

    def _turn(self, acc: dict[Any, Value], at: dict[str, Value], pixels: Mapping[int, int], vectors: int,
              last: bool = False) -> None:
        isa, arithmetic, step = self.isa, self.arithmetic, self.arithmetic.weight_bytes(self.isa)
        add_step(arithmetic, isa, acc, at["x"], pixels, at["w"],
                 lambda w: [arithmetic.weights(isa, w + v * step) for v in range(vectors)], last)
        at["x"] += arithmetic.step_bytes
        at["w"] += vectors * step
        if self.tile.prefetch:
            isa.prefetch(at["ahead"])
            at["ahead"] += CACHE_LINE // self._turns_a_line
