"""Cells of LSTM, GRU and RNN as stages of products and updates (problems/recurrence.py)."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infer_server.engines.ir.graph import Node
from infer_server.engines.lowering.epilogue.affine import Affine, AffineWriter
from infer_server.engines.lowering.epilogue.from_onnx import write_node
from infer_server.engines.lowering.epilogue.program import ProgramBuilder
from infer_server.engines.lowering.problems.recurrence import Cell, Source, Stage, Update
from infer_server.engines.ops.recurrent import DEFAULTS, GATES, activations

# Functions with values in [-1, 1].
_BOUNDED = frozenset({"Sigmoid", "Tanh", "HardSigmoid", "Softsign"})


def bounded(node: Node) -> bool:
    """Return True if h stays in [-1, 1] when it starts there."""
    kind, names = node.attrs["cell"], [name for name, _, _ in activations(node)]
    per = len(DEFAULTS[kind])
    # LSTM: o * h(c). GRU: a weighted mean of g and the last h if f is in [0, 1]. RNN: f.
    positions = {"LSTM": (0, 2), "GRU": (0, 1), "RNN": (0,)}[kind]
    shares = {"GRU": (0,)}.get(kind, ())
    return (all(names[d + i] in _BOUNDED for d in range(0, len(names), per) for i in positions)
            and all(names[d + i] in ("Sigmoid", "HardSigmoid") for d in range(0, len(names), per) for i in shares))


def cell_of(node: Node, direction: int, peepholes: bool) -> Cell:
    """Return the cell of one direction of a Recurrence (engines/ops/recurrent.py).

    Raises NotImplementedError for an activation without an instruction.
    """
    per = len(DEFAULTS[node.attrs["cell"]])
    chosen = slice(direction * per, (direction + 1) * per)
    functions = [Node(name, (), (), {"alpha": alpha, "beta": beta}) for name, alpha, beta in activations(node)[chosen]]
    return {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}[node.attrs["cell"]](node.attrs, functions, peepholes)


class _CellWriter(AffineWriter):
    """Writer of one update."""

    def __init__(self, clip: float) -> None:
        super().__init__(ProgramBuilder(False))
        self._clip = clip
        self._operands: dict[Source, Affine] = {}

    def read(self, kind: str, index: int) -> Affine:
        source = (kind, index)
        if source not in self._operands:
            self._operands[source] = Affine.of(self.builder.operand())
        return self._operands[source]

    def gate(self, index: int) -> Affine:
        """Return x + the recurrent sum of a gate."""
        return self.read("gate", index)

    def activate(self, function: Node, x: Affine) -> Affine:
        """Apply an ONNX activation to x, clipped if the cell has a clip."""
        if self._clip:
            x = x.clip(-self._clip, self._clip)
        return self.squash(function, x)

    def squash(self, function: Node, x: Affine) -> Affine:
        """Apply an activation without clipping, as for the state that becomes the output."""
        special = _FUNCTIONS.get(function.op)
        if special:
            x = self.settled(x)
            return self.settled(special(self, x, function.attrs["alpha"], function.attrs["beta"]))
        return self.settled(write_node(self, function, [x]))

    def update(self, slot: int, value: Affine) -> Update:
        program = self.builder.program(self.settle(value))
        numbers = tuple(float(number[0]) for number in self.builder.constants)
        return Update(slot, program, tuple(self._operands), numbers)


def _threshold(w: AffineWriter, x: Affine, alpha: float, beta: float) -> Affine:
    return w.apply("where_positive", x.scaled(1.0, -alpha), x, Affine.number(0.0))


def _softsign(w: AffineWriter, x: Affine, alpha: float, beta: float) -> Affine:
    return w.apply("div", x, w.apply("abs", x).scaled(1.0, 1.0))


def _sigmoid(w: AffineWriter, x: Affine, alpha: float, beta: float) -> Affine:
    """Return (1 + tanh(x / 2)) / 2, which is shorter than by exp; relative accuracy near 0 is not needed for gates."""
    return w.apply("tanh", x.scaled(0.5)).scaled(0.5, 0.5)


# Activations that are not ONNX pointwise operators, or differ from them, as functions of (x, alpha, beta).
_FUNCTIONS: Mapping[str, Callable[[AffineWriter, Affine, float, float], Affine]] = {
    "Sigmoid": _sigmoid,
    "Affine": lambda w, x, alpha, beta: x.scaled(alpha, beta),
    "ScaledTanh": lambda w, x, alpha, beta: w.apply("tanh", x.scaled(beta)).scaled(alpha),
    "ThresholdedRelu": _threshold,
    "Softsign": _softsign,
}


def _lstm(attrs: Mapping[str, Any], functions: Sequence[Node], peepholes: bool) -> Cell:
    """Return c = f * c + i * g(new);  h = o * squash(c). Unit constants are the peepholes of i, o, f."""
    f, g, squash = functions
    i, o, forget, new = range(GATES["LSTM"])

    def gate(w: _CellWriter, index: int, peephole: int) -> Affine:
        x = w.gate(index)
        if peepholes:
            x = w.add(x, w.multiply(w.read("unit", peephole), w.read("state", 1)))
        return w.activate(f, x)

    w = _CellWriter(attrs["clip"])
    share = gate(w, i, 0)
    keep = share.scaled(-1.0, 1.0) if attrs["input_forget"] else gate(w, forget, 2)
    kept, added = w.multiply(keep, w.read("state", 1)), w.multiply(share, w.activate(g, w.gate(new)))
    c = w.update(1, w.add(kept, added))
    w = _CellWriter(attrs["clip"])
    h = w.update(0, w.multiply(gate(w, o, 1), w.squash(squash, w.read("state", 1))))
    return Cell((Stage((i, o, forget, new), 0, (c, h)),), 2, 3 if peepholes else 0)


def _gru(attrs: Mapping[str, Any], functions: Sequence[Node], peepholes: bool) -> Cell:
    """Return h = (1 - z) * g(new) + z * h = new + z * (h - new).

    The unit constant is the bias scaled by the reset gate.
    """
    f, g = functions
    z, r, new = range(GATES["GRU"])

    def blended(w: _CellWriter, share: Affine, fresh: Affine) -> Affine:
        return w.add(fresh, w.multiply(share, w.add(w.read("state", 0), fresh.scaled(-1.0))))

    if attrs["linear_before_reset"]:
        w = _CellWriter(attrs["clip"])
        reset = w.activate(f, w.gate(r))
        inner = w.multiply(reset, w.add(w.read("sum", new), w.read("unit", 0)))
        fresh = w.activate(g, w.add(w.read("x", new), inner))
        return Cell((Stage((z, r, new), 0, (w.update(0, blended(w, w.activate(f, w.gate(z)), fresh)),)),), 1, 1)
    first, second, last = (_CellWriter(attrs["clip"]) for _ in range(3))
    share = first.update(1, first.activate(f, first.gate(z)))
    scaled = second.update(2, second.multiply(second.activate(f, second.gate(r)), second.read("state", 0)))
    h = last.update(0, blended(last, last.read("state", 1), last.activate(g, last.gate(new))))
    return Cell((Stage((z, r), 0, (share, scaled)), Stage((new,), 2, (h,))), 1, 0)


def _rnn(attrs: Mapping[str, Any], functions: Sequence[Node], peepholes: bool) -> Cell:
    w = _CellWriter(attrs["clip"])
    return Cell((Stage((0,), 0, (w.update(0, w.activate(functions[0], w.gate(0))),)),), 1, 0)
