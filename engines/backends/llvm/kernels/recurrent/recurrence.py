"""Recurrent cells from step to step on a CPU: how tiles are cut, how weights and states lie. steps.py is their code.

Pairs of 16 bits are multiplied at a time (vpmaddwd, vpdpwssd), four of 8 (vpdpbusd).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import Module
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.common.arithmetic import FP32, INT16, QUADS, Arithmetic
from engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, solves
from engines.backends.llvm.kernels.recurrent.steps import BLOCK, STEPS, RecurrenceEmitter
from engines.lowering.problems.problem import Array
from engines.lowering.problems.recurrence import QUANTIZED_STATES, SECOND_LEVEL, Recurrence, Stage

ARITHMETIC: dict[str, Arithmetic] = {"fp32": FP32, "int16": INT16, "int8": QUADS}
FIRST_LEVEL = 1 << 15   # bytes of cache that most machines have there


@dataclass(frozen=True)
class Panels(Tactic):
    """Vectors of units that one item's micro-kernel computes; larger tiles of items take what registers are left."""
    vectors: int
    prefetch: bool = False      # ask for the next panel's weights, a line at every k

    def __str__(self) -> str:
        return f"panels of {self.vectors} vectors{' prefetch' if self.prefetch else ''}"


@solves(Recurrence)
class RecurrenceKernel(Kernel[Recurrence]):
    @property
    def step_bytes(self) -> int:
        """Of the weights that one step of one direction reads."""
        return self.problem.cells[0].gates * self.problem.hidden * self.turns() * self.arithmetic.step_bytes

    @property
    def arithmetic(self) -> Arithmetic:
        return ARITHMETIC[self.problem.precision]

    @property
    def scales(self) -> int:
        """Constants of a unit that make real numbers of its integer sums."""
        return self.problem.cells[0].gates if self.problem.precision in QUANTIZED_STATES else 0

    @property
    def zero(self) -> int:
        """The zero point of the state in integers."""
        return QUANTIZED_STATES[self.problem.precision].zero if self.scales else 0

    # ---- tiles
    def tile_items(self, isa: Isa) -> int:
        """Of the largest tile. Weights that stay in the first level of cache are read for one item as fast as they are
        multiplied; others are read once for as many items as there are registers."""
        if self.problem.lengths is not None or self.step_bytes <= FIRST_LEVEL:
            return 1
        most = max(len(stage.gates) for stage in self.problem.cells[0].stages)
        return max(items for items in range(1, BLOCK + 1) if items == 1 or self._fits(isa, items, most))

    def vectors(self, isa: Isa, tactic: Panels, stage: Stage, items: int) -> int:
        """Of units, in a tile of that many items."""
        return max(v for v in range(1, tactic.vectors + 1) if v == 1 or self._fits(isa, items, v * len(stage.gates)))

    def _fits(self, isa: Isa, items: int, weights: int) -> bool:
        """Where dot2 is two instructions, their products need a register; a factor of dot4 may take several."""
        each = isa.ready_bytes // isa.bytes if self.problem.precision == "int8" else 1
        return fits(isa, items, weights, int(bool(self.scales) and items > 1 and not isa.one_dot2), each)

    def tactics(self, isa: Isa) -> Sequence[Panels]:
        most = max(len(stage.gates) for stage in self.problem.cells[0].stages)
        vectors = range(1, -(-self.problem.hidden // isa.lanes) + 1)
        widest = max(v for v in vectors if v == 1 or self._fits(isa, 1, v * most))
        return tuple(Panels(v) for v in dict.fromkeys((widest, max(widest // 2, 1), 1)))

    def refinements(self, isa: Isa, best: Panels) -> Sequence[Panels]:
        return (replace(best, prefetch=True),) if self.step_bytes >= SECOND_LEVEL else ()

    def packing(self, tactic: Panels) -> None:
        """Weights lie vector by vector, whatever the panels."""
        return

    def grid(self, isa: Isa, tactic: Panels) -> Grid:
        return Grid(1, self.tile_items(isa), len(self.problem.cells))

    # ---- how weights and states lie
    def turns(self) -> int:
        """Of the K loop."""
        return -(-self.problem.hidden // (self.arithmetic.elements * STEPS)) * STEPS

    @property
    def head(self) -> int:
        """Turns before the K loop's: where the state has a zero point, a turn's bytes hold what a sum begins with."""
        return int(self.zero != 0)

    def stage_vector(self, isa: Isa, stage: Stage) -> int:
        """Bytes of the weights of one vector of units."""
        return (self.head + self.turns()) * len(stage.gates) * self.arithmetic.weight_bytes(isa)

    def room(self, isa: Isa) -> int:
        """Elements of a state: whole vectors, and all that the K loop reads."""
        step = max(isa.lanes, self.arithmetic.elements * STEPS)
        return -(-self.problem.hidden // step) * step

    def emit(self, module: Module, name: str, isa: Isa, tactic: Panels) -> None:
        RecurrenceEmitter(self, module, name, isa, tactic).emit()

    # ---- constants
    def pack(self, isa: Isa, tactic: Panels, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """"weights": [D, G H, H], float32, int16, int8 -> [direction][stage][vector of units][k][gate][lane][element],
        where there is a zero point, before the first k the int32 that makes up for it;
        "units": a sequence of float32 [D, H], "scales": [D, G H] -> [direction][vector of units][constant][lane];
        "first": for each given state float32 [D H], as it is."""
        problem = self.problem
        vectors = -(-problem.hidden // isa.lanes)
        arithmetic, weights = self.arithmetic, np.asarray(constants["weights"])
        weights = arithmetic.store_weights(weights).reshape(len(problem.cells), -1, problem.hidden, problem.hidden)
        rows = ((0, vectors * isa.lanes - problem.hidden), (0, self.turns() * arithmetic.elements - problem.hidden))
        parts = []
        for cell, own in zip(problem.cells, weights, strict=True):
            for stage in cell.stages:
                padded = np.pad(own[list(stage.gates)], ((0, 0), *rows))
                split = padded.reshape(len(stage.gates), vectors, isa.lanes, self.turns(), arithmetic.elements)
                if self.head:
                    start = np.int32(-self.zero) * split.sum((3, 4), np.int32)
                    split = np.concatenate([start[..., None].view(np.int8)[..., None, :], split], 3)
                parts.append(split.transpose(1, 3, 0, 2, 4).ravel())
        units = [*constants["units"], *problem.scales_by_gate(constants)]
        table = np.zeros((len(problem.cells), len(units), vectors * isa.lanes), np.float32)
        for i, constant in enumerate(units):
            table[:, i, :problem.hidden] = constant
        by_vector = table.reshape(len(problem.cells), len(units), vectors, isa.lanes).transpose(0, 2, 1, 3)
        first = (np.asarray(state, np.float32) for state in problem.first_constants(constants))
        return np.concatenate(parts), by_vector.ravel(), *first


def fits(isa: Isa, items: int, weights: int, spare: int = 0, each: int = 1) -> bool:
    """Whether a tile's accumulators fit the registers, beside the fewer of its two sides and one of the other, each in
    so many registers, and what the arithmetic needs to spare."""
    return items * weights + each * (min(items, weights) + 1) + spare <= isa.registers
