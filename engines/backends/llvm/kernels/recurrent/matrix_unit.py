"""Kernel of recurrent layers on a matrix unit, and how it packs weights. matrix_tiling.py has the tiles."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.tiles import AMX
from infer_server.engines.backends.llvm.kernels.kernel import solves
from infer_server.engines.backends.llvm.kernels.recurrent.matrix_steps import MatrixUnitEmitter
from infer_server.engines.backends.llvm.kernels.recurrent.matrix_tiling import MatrixPanels, MatrixTiling
from infer_server.engines.backends.llvm.kernels.recurrent.recurrence import RecurrenceKernel
from infer_server.engines.backends.llvm.kernels.recurrent.tiling import Panels
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.recurrence import Recurrence


@solves(Recurrence)
class MatrixUnitRecurrence(MatrixTiling, RecurrenceKernel):
    """Kernel of recurrent layers whose integer products a matrix unit computes, for the items of a block at once."""

    def emit(self, module: Module, name: str, isa: Isa, tactic: Panels) -> None:
        assert isinstance(tactic, MatrixPanels)
        MatrixUnitEmitter(self, module, name, isa, tactic).emit()

    def pack(self, isa: Isa, tactic: Panels, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Pack the constants as RecurrenceKernel does, and append the planes of weights of 16 bits.

        Planes are packed [direction][stage][vector of units][gate][block of K][plane][row][lane][4].
        """
        weights, *others = super().pack(isa, tactic, constants)
        if not self.in_planes:
            return weights, *others
        problem, parts = self.problem, [weights]
        vectors = -(-problem.hidden // isa.lanes)
        rows = ((0, vectors * isa.lanes - problem.hidden), (0, self.blocks * self.depth - problem.hidden))
        words = np.asarray(constants["weights"], "<i2").reshape(len(problem.cells), -1, *[problem.hidden] * 2)
        for cell, own in zip(problem.cells, words, strict=True):
            for stage in cell.stages:
                planes = np.pad(own[list(stage.gates)], ((0, 0), *rows)).view(np.uint8).reshape(
                    len(stage.gates), vectors, isa.lanes, self.blocks, self.rows, AMX.group, self.planes[1])
                parts.append(np.ascontiguousarray(planes.transpose(1, 0, 3, 6, 4, 2, 5)).view(weights.dtype).ravel())
        return np.concatenate(parts), *others
