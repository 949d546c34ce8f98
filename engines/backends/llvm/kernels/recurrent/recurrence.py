"""Kernel of recurrent layers, and how it packs weights. tiling.py has the tiles, steps.py the code."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.kernel import solves
from infer_server.engines.backends.llvm.kernels.recurrent.steps import RecurrenceEmitter
from infer_server.engines.backends.llvm.kernels.recurrent.tiling import Panels, RecurrenceTiling
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.recurrence import Recurrence, crowded_units


@solves(Recurrence)
class RecurrenceKernel(RecurrenceTiling):
    """Kernel of recurrent layers."""

    def emit(self, module: Module, name: str, isa: Isa, tactic: Panels) -> None:
        RecurrenceEmitter(self, module, name, isa, tactic).emit()

    # ---- constants
    def pack(self, isa: Isa, tactic: Panels, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Pack the constants of all directions.

        Parameters
        ----------
        constants : "weights": [D, G H, H], float32, int16 or int8. "units": float32 arrays [D, H]; "scales": [D, G H].
            "first":
            for each constant initial state float32 [D H].

        Returns
        -------
        tuple of arrays
            Weights [direction][stage][vector of units][k][gate][lane][element]. If states have a zero point, an int32
                precedes
            the first k: the correction of the sum, or for a zero point that is found at run time, the correction for
                -1. A
            header with the int32 numbers of all crowded units precedes the weights; weights of crowded units follow the
                others
            along k. Then units and scales [direction][vector of units][constant][lane], and the initial states,
                unchanged.
        """
        problem = self.problem
        vectors = -(-problem.hidden // isa.lanes)
        arithmetic, weights = self.arithmetic(isa), np.asarray(constants["weights"])
        weights = arithmetic.store_weights(weights).reshape(len(problem.cells), -1, problem.hidden, problem.hidden)
        header, weights = self._separate_crowded(weights)
        rows = ((0, vectors * isa.lanes - problem.hidden), (0, self.turns() * arithmetic.elements - weights.shape[-1]))
        parts = [header]
        for cell, own in zip(problem.cells, weights, strict=True):
            for stage in cell.stages:
                padded = np.pad(own[list(stage.gates)], ((0, 0), *rows))
                split = padded.reshape(len(stage.gates), vectors, isa.lanes, self.turns(), arithmetic.elements)
                if self.head(isa):
                    start = np.int32(1 if problem.rounds else -self.zero(isa)) * split.sum((3, 4), np.int32)
                    split = np.concatenate([start[..., None].view(np.int8)[..., None, :], split], 3)
                parts.append(split.transpose(1, 3, 0, 2, 4).ravel())
        units = [*constants["units"], *problem.scales_by_gate(constants)]
        table = np.zeros((len(problem.cells), len(units), vectors * isa.lanes), np.float32)
        for i, constant in enumerate(units):
            table[:, i, :problem.hidden] = constant
        by_vector = table.reshape(len(problem.cells), len(units), vectors, isa.lanes).transpose(0, 2, 1, 3)
        first = (np.asarray(state, np.float32) for state in problem.first_constants(constants))
        return np.concatenate(parts), by_vector.ravel(), *first

    def _separate_crowded(self, weights: Array) -> tuple[Array, Array]:
        """Return the header, and the weights [..., k] with those of crowded units moved behind the others."""
        if not self.problem.crowded:
            return weights[:0].ravel(), weights
        units = crowded_units(weights)
        wide = np.pad(weights, ((0, 0),) * 3 + ((0, self.crowded_offset - self.problem.hidden + 2 * len(units)),))
        wide[..., self.crowded_offset::2], wide[..., units] = wide[..., units], 0
        header = np.zeros(self.header(), np.int8)
        header[:4 * len(units)] = units.astype(np.int32).view(np.int8)
        return header, wide
