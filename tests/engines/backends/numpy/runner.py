"""Runner of a problem as a NumPy plan runs it, on tensors in place."""
from __future__ import annotations

from typing import Any

from infer_server.engines.backends.numpy.device import solve
from infer_server.engines.ir.graph import BATCH, Node
from infer_server.engines.lowering.calls.calls import ProblemCall
from infer_server.engines.lowering.calls.placement import Placement
from infer_server.engines.lowering.problems.problem import Array, Problem


class NumpyRunner:
    """Runner with a buffer for each tensor."""
    name, lanes = "numpy", 1

    def ways(self, problem: Problem) -> list[Problem]:
        return [problem]

    def execute(self, problem: Problem, inputs: list[Array], outputs: list[Array], constants: dict[str, Any],
                batch: int, pieces: int = 1) -> None:
        """Run the problem; a NumPy step is one piece."""
        memory = [*inputs, *outputs]
        placed = [Placement(i, 0, view, BATCH) for i, view in enumerate((*problem.inputs, *problem.outputs))]
        call = ProblemCall(Node("Test", (), ("y",)), problem, tuple(placed[:len(inputs)]), tuple(placed[len(inputs):]),
                           constants)
        solve(call, lambda placement: (memory[placement.buffer], 0), batch)
