"""Problems of recurrent layers, with drawn constants and inputs."""
from __future__ import annotations

from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Node
from infer_server.engines.lowering.epilogue.program import ProgramBuilder
from infer_server.engines.lowering.problems.recurrence import Recurrence, integer_weights
from infer_server.engines.lowering.problems.view import View
from infer_server.engines.lowering.rules.cells import cell_of
from infer_server.engines.ops.recurrent import DEFAULTS, GATES
from scripts.testing.suite import gapped

STEPS = 5


def node_of(cell: str = "LSTM", direction: str = "forward", **attrs: Any) -> Node:
    count = 2 if direction == "bidirectional" else 1
    names = attrs.pop("activations", DEFAULTS[cell]) * count
    zeros = (0.0,) * len(names)
    return Node("Recurrence", (), (), {
        "cell": cell, "direction": direction, "activations": " ".join(names), "activation_alpha": zeros,
        "activation_beta": zeros, "clip": 0.0, "input_forget": 0, "linear_before_reset": 0, **attrs})


class Case:
    """A spec of a node, with drawn constants and inputs."""

    def __init__(self, node: Node, hidden: int, precision: str = "fp32", batch: int = 3, *, peepholes: bool = False,
                 states: bool = False, given: bool = False, lengths: bool = False, y: str = "float32",
                 gates: str = "float32", steps: int = STEPS, rounds: bool = False) -> None:
        random = np.random.default_rng(0)
        backwards = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[node.attrs["direction"]]
        count, kind = len(backwards), node.attrs["cell"]
        rows = GATES[kind] * hidden
        cells = tuple(cell_of(node, d, peepholes) for d in range(count))
        builder, numbers = ProgramBuilder(True), ()
        if y == "uint8":
            builder.add("fma", builder.accumulator, 100.0, 120.0)
            numbers = (100.0, 120.0)
        kept = cells[0].kept
        state = View("float32", (count * hidden,), (4,), 4 * count * hidden + 8)
        self.spec = Recurrence(
            gapped(gates, (steps, count * rows)), hidden, cells, backwards, gapped(y, (steps, count * hidden)),
            (state if states else None,) * kept, (state if states else None,) * kept,
            View("int32", (), (), 4) if lengths else None, tuple(range(kept)) if given else (), builder.program(),
            numbers, precision, rounds)
        weights = (random.standard_normal((count, rows, hidden)) / np.sqrt(hidden)).astype(np.float32)
        units = [random.standard_normal((count, hidden)).astype(np.float32) for _ in range(cells[0].units)]
        self.constants: dict[str, Any] = {
            "weights": weights, "units": units,
            "first": [random.standard_normal(count * hidden).astype(np.float32) for _ in self.spec.given]}
        if precision != "fp32":
            self.constants["weights"], self.constants["scales"] = integer_weights(weights, precision)
        self.inputs = [random.standard_normal((batch, *view.shape)).astype(np.float32) for view in self.spec.inputs]
        if gates == "bfloat16":
            self.inputs[0] = (self.inputs[0].view(np.uint32) >> 16).astype(np.uint16)
        if lengths:
            self.inputs[-1] = np.minimum(np.resize(np.array([3, 0, STEPS, 1], np.int32), batch), steps)
        self.node, self.real = node, [weights, *units]      # constants in the operator's layout
