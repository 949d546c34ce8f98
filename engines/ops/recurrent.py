"""Recurrent layers of ONNX, and the recurrence that they are decomposed into.

    LSTM, GRU, RNN    ONNX operators 14: the projection X W' + b of all steps, then a cell over time
    Recurrence        the cells alone, on tensors with a leading batch (created by passes/recurrent.py)

The equations of a cell are those of the ONNX specification. With `direction` "bidirectional" there are two cells, the
second of which runs backwards. Items shorter than the longest are followed by zeros.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Dim, Node, TensorType
from infer_server.engines.ir.shapes import text
from infer_server.engines.ops.items import ItemAxes, Mixed
from infer_server.engines.ops.op import Inputs, Op, Stored, Types, Values, present

GATES: Mapping[str, int] = {"LSTM": 4, "GRU": 3, "RNN": 1}      # in ONNX's order: i o f c, z r h, and a single one
DEFAULTS: Mapping[str, tuple[str, ...]] = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"),
                                           "RNN": ("Tanh",)}

Function = Callable[[Any, float, float], Any]
# y = f(x, alpha, beta) by ONNX's names. PARAMETERS has the defaults of alpha and beta.
ACTIVATIONS: Mapping[str, Function] = {
    "Sigmoid": lambda x, a, b: 1 / (1 + np.exp(-x)),
    "Tanh": lambda x, a, b: np.tanh(x),
    "Relu": lambda x, a, b: np.maximum(x, 0),
    "Affine": lambda x, a, b: a * x + b,
    "LeakyRelu": lambda x, a, b: np.where(x < 0, a * x, x),
    "ThresholdedRelu": lambda x, a, b: np.where(x > a, x, 0),
    "ScaledTanh": lambda x, a, b: a * np.tanh(b * x),
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "Elu": lambda x, a, b: np.where(x < 0, a * np.expm1(np.minimum(x, 0)), x),
    "Softsign": lambda x, a, b: x / (1 + np.abs(x)),
    "Softplus": lambda x, a, b: np.logaddexp(x, 0),
}
# Defaults of alpha and beta, those of the ONNX operators of the same name.
PARAMETERS: Mapping[str, tuple[float, ...]] = {
    "Affine": (1.0, 0.0), "LeakyRelu": (0.01,), "ThresholdedRelu": (1.0,), "ScaledTanh": (1.0, 1.0),
    "HardSigmoid": (0.2, 0.5), "Elu": (1.0,)}


def directions(node: Node) -> tuple[bool, ...]:
    """Return, for each cell of the layer, True if it runs backwards."""
    return {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[node.attrs["direction"]]


def activations(node: Node) -> list[tuple[str, float, float]]:
    """Return (name, alpha, beta) of each function, first direction first.

    The attribute `activations` is one string of names, because a tuple of strings would be taken for extents.
    """
    return list(zip(node.attrs["activations"].split(), node.attrs["activation_alpha"], node.attrs["activation_beta"],
                    strict=True))


def functions(node: Node, direction: int) -> list[Callable[[Any], Any]]:
    """Return the activations of one direction's cell with their parameters bound."""
    each = len(DEFAULTS[node.attrs.get("cell", node.op)])
    chosen = slice(direction * each, (direction + 1) * each)
    return [lambda x, f=ACTIVATIONS[name], a=a, b=b: f(x, a, b)     # type: ignore[misc]
            for name, a, b in activations(node)[chosen]]


class _Layer(Op, abstract=True):
    """Base of recurrent layers.

    Inputs are X, W, R, B, sequence_lens, initial_h (LSTM: initial_c, P); outputs are Y, Y_h (LSTM: Y_c). Layout 0: X
    [T, N, F], Y [T, D, N, H], states [D, N, H]; layout 1: X [N, T, F], Y [N, T, D, H], states [N, D, H]. Without W,
    which ONNX requires, X is the projection: F = D G H.
    """

    @classmethod
    def types_with(cls, node: Node, inputs: Inputs, values: Values) -> Types:
        x, *weights = present(inputs[:3])
        if any(len(given.shape) != 3 for given in (x, *weights)):
            raise GraphError("X, W and R must have three axes")
        first, r = node.attrs["layout"], weights[-1]
        (batch, steps), (count, rows), hidden = x.shape[:2][::2 * first - 1], weights[0].shape[:2], r.shape[2]
        width = weights[0].shape[2] if len(weights) > 1 else int(count) * int(rows)
        if isinstance(steps, str):
            raise GraphError(f"the number of steps, axis {1 if first else 0}, depends on the batch; "
                             "give that input its length with --shape")
        wanted = len(directions(node)), GATES[cls.__name__] * int(hidden)
        if (count, rows) != wanted or r.shape[:2] != wanted or width != x.shape[2]:
            raise GraphError(f"the weights do not fit {wanted[0]} direction(s) of {hidden} hidden units")
        for at, vectors in ((3, 2 * rows), (7, 3 * hidden)):        # B and P
            given = inputs[at] if len(inputs) > at else None
            if given is not None and given.shape != (count, vectors):
                raise GraphError(f"input {at} has shape {text(given.shape)}, but must have {text((count, vectors))}")
        y = (batch, steps, count, hidden) if first else (steps, count, batch, hidden)
        state = (batch, count, hidden) if first else (count, batch, hidden)
        _check_states(state, inputs[5:7], values[5:7], items=0 if first else 1)
        lengths = inputs[4] if len(inputs) > 4 else None
        if lengths is not None and lengths.shape != (batch,):
            raise GraphError(f"sequence_lens has shape {text(lengths.shape)}, but there are {batch} items")
        return (TensorType(x.dtype, y), *(TensorType(x.dtype, state) for _ in range(_states(cls.__name__))))

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        first = node.attrs["layout"]
        expected = (0 if first else 1, None, None, None, 0, *(0 if first else 1,) * 2, None)
        if any(axis not in (None, wanted) for axis, wanted in zip(axes, expected, strict=False)):
            raise Mixed("its operands have their items along other axes than the layer")
        return (0 if first else 2, *(0 if first else 1,) * (len(outputs) - 1))

    @classmethod
    def compute(cls, node: Node, x: Any, w: Array | None, r: Array, b: Array | None = None,
                lengths: Array | None = None, h: Any = None, c: Any = None, p: Array | None = None
                ) -> tuple[Array, ...]:
        bias = np.zeros((len(r), 2 * r.shape[1]), x.dtype) if b is None else b
        gates, recurrent = added_biases(node, bias, r.shape[2])
        if not node.attrs["layout"]:
            x, h, c = (a if a is None else a.swapaxes(0, 1) for a in (x, h, c))
        projected = x.reshape(*x.shape[:2], *r.shape[:2]) if w is None else np.einsum(
            "ntf,dgf->ntdg", x, w, optimize=True)
        h, c = (a if a is None else a.reshape(len(a), -1) for a in (h, c))
        made = Recurrence.compute(
            Node("Recurrence", (), (), {**node.attrs, "cell": node.op}),
            (projected + gates).reshape(*projected.shape[:2], -1), r, recurrent, p, lengths, h, c)
        y, *states = (a.reshape(*a.shape[:-1], len(r), -1) for a in made)
        if not node.attrs["layout"]:
            y, states = y.transpose(1, 2, 0, 3), [a.swapaxes(0, 1) for a in states]
        return tuple(np.ascontiguousarray(a) for a in (y, *states))


def _check_states(expected: tuple[Dim, ...], states: Inputs, values: Values, items: int) -> None:
    """Raise GraphError unless an initial state has the shape `expected`, or is a constant shared by all items."""
    alike = tuple(1 if axis == items else extent for axis, extent in enumerate(expected))
    for state, value in zip(states, (*values, None, None), strict=False):
        if state is not None and state.shape != expected and (value is None or state.shape != alike):
            raise GraphError(f"an initial state has shape {text(state.shape)}, but must have {text(expected)}")


class LSTM(_Layer):
    """Long short-term memory, with optional peepholes P and coupled gates (input_forget)."""


class DynamicQuantizeLSTM(Op):
    """ONNX Runtime's LSTM after its projection, that is, without W.

    The state of an item is quantised to 8 bits of its own range before it is multiplied by R, the dequantised weights.
    """

    @classmethod
    def types_with(cls, node: Node, inputs: Inputs, values: Values) -> Types:
        return LSTM.types_with(node, inputs, values)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        return LSTM.item_axes(node, inputs, outputs, axes)

    @classmethod
    def compute(cls, node: Node, *arrays: Any) -> tuple[Array, ...]:
        return LSTM.compute(replace(node, op="LSTM", attrs={**node.attrs, "rounds_state": 1}), *arrays)


def whole_state(h: Array) -> tuple[Array, Array]:
    """Quantise each item [..., H] to 256 steps of its own range, with 0 on a step, as DynamicQuantizeLinear.

    Returns the integers minus the zero point, in -255..255, and the step.
    """
    low, high = h.min(axis=-1, initial=0, keepdims=True), h.max(axis=-1, initial=0, keepdims=True)
    step = (high - low) / h.dtype.type(255)
    step = np.where(step == 0, h.dtype.type(1), step)
    zero = np.clip(np.rint(-low / step), 0, 255)
    return np.clip(np.rint(h / step) + zero, 0, 255) - zero, step


class GRU(_Layer):
    """Gated recurrent unit. With linear_before_reset the reset gate scales the product (cuDNN, Keras), else the state.

    References
    ----------
    Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", 2014.
    """


class RNN(_Layer):
    """Elman network H = f(X W' + H R' + b)."""


def _states(cell: str) -> int:
    """Return the number of states that persist between steps."""
    return 2 if cell == "LSTM" else 1


def added_biases(node: Node, bias: Array, hidden: int) -> tuple[Array, Array | None]:
    """Split biases [D, 2 G H] of W and R into those of the projection [D, G H] and of the cell [D, H].

    Only linear_before_reset has one in the cell: r * (H R' + Rb).
    """
    of_w, of_r = np.split(bias, 2, axis=1)
    if not node.attrs.get("linear_before_reset"):
        return of_w + of_r, None
    outside = of_r.copy()
    outside[:, 2 * hidden:] = 0
    return of_w + outside, of_r[:, 2 * hidden:]


class Recurrence(Op):
    """Cells of a layer over time, with a leading batch.

    Inputs: gates [N, T, D G H], the projection of every step; R [D, G H, H]; bias [D, H] for a GRU's
    linear_before_reset; P [D, 3 H], an LSTM's peepholes; lengths [N]; h and c [N, D H], or [1, D H] if shared by all
    items. All but the first two are optional. Outputs: y [N, T, D H], h [N, D H], and an LSTM's c [N, D H]. Attributes:
    cell, direction, activations with activation_alpha and activation_beta (one per function and direction), clip (0:
    none), linear_before_reset, input_forget; rounds_state for DynamicQuantizeLSTM.
    """
    stored = Stored.CONVERTED       # applies to the first result only

    @classmethod
    def types(cls, node: Node, gates: TensorType, r: TensorType, *_: TensorType | None) -> Types:
        width = int(r.shape[0]) * int(r.shape[2])
        if gates.shape[2] != width * GATES[node.attrs["cell"]]:
            raise GraphError(f"{gates.shape[2]} gates do not fit weights {list(r.shape)}")
        state = TensorType(gates.dtype, (gates.shape[0], width))
        return (TensorType(gates.dtype, (*gates.shape[:2], width)), *(state,) * _states(node.attrs["cell"]))

    @classmethod
    def compute(cls, node: Node, gates: Array, r: Array, bias: Array | None = None, peepholes: Array | None = None,
                lengths: Array | None = None, h: Array | None = None, c: Array | None = None) -> tuple[Array, ...]:
        (items, steps), (count, _, hidden) = gates.shape[:2], r.shape
        gates = gates.reshape(items, steps, count, -1, hidden)
        first = [np.zeros((items, count, hidden), gates.dtype) if a is None else
                 np.broadcast_to(a.reshape(-1, count, hidden), (items, count, hidden)) for a in (h, c)]
        ends = np.full(items, steps) if lengths is None else lengths
        y = np.zeros((items, steps, count, hidden), gates.dtype)
        last = [a.copy() for a in first]
        for d, backwards in enumerate(directions(node)):
            step = _Cell(node, d, r[d], None if bias is None else bias[d], None if peepholes is None else peepholes[d])
            state = [a[:, d].copy() for a in first]
            for turn in range(steps):
                live = np.flatnonzero(turn < ends)
                time = (ends - 1 - turn if backwards else np.full(items, turn))[live]
                new = step([gates[live, time, d, g] for g in range(gates.shape[3])], *(a[live] for a in state))
                for a, b in zip(state, new, strict=False):
                    a[live] = b
                y[live, time, d] = state[0][live]
            for a, b in zip(last, state, strict=True):
                a[:, d] = b
        states = [a.reshape(items, -1) for a in last[:_states(node.attrs["cell"])]]
        return y.reshape(items, steps, -1), *states


class _Cell:
    """Step of one direction: (projections of the gates, h, c) -> (h, c)."""

    def __init__(self, node: Node, direction: int, r: Array, bias: Any, peepholes: Any) -> None:
        self._cell, self._attrs, self._functions = node.attrs["cell"], node.attrs, functions(node, direction)
        self._r = np.split(r, GATES[self._cell])
        self._bias = 0 if bias is None else bias
        self._peepholes = (0, 0, 0) if peepholes is None else np.split(peepholes, 3)

    def __call__(self, x: list[Array], h: Array, c: Array) -> tuple[Array, ...]:
        return {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}[self._cell](x, h, c)

    def _clipped(self, x: Any) -> Any:
        limit = self._attrs["clip"]
        return np.clip(x, -limit, limit) if limit else x

    def _lstm(self, x: list[Array], h: Array, c: Array) -> tuple[Array, ...]:
        f, g, squash = self._functions
        h = np.multiply(*whole_state(h)) if self._attrs.get("rounds_state") else h
        i, o, forget, new = (a + h @ r.T for a, r in zip(x, self._r, strict=True))
        p_i, p_o, p_f = self._peepholes
        i = f(self._clipped(i + p_i * c))
        forget = 1 - i if self._attrs["input_forget"] else f(self._clipped(forget + p_f * c))
        c = forget * c + i * g(self._clipped(new))
        return f(self._clipped(o + p_o * c)) * squash(c), c

    def _gru(self, x: list[Array], h: Array, c: Array) -> tuple[Array, ...]:
        f, g = self._functions
        r_z, r_r, r_h = self._r
        z, r = f(self._clipped(x[0] + h @ r_z.T)), f(self._clipped(x[1] + h @ r_r.T))
        if self._attrs["linear_before_reset"]:
            new = g(self._clipped(x[2] + r * (h @ r_h.T + self._bias)))
        else:
            new = g(self._clipped(x[2] + (r * h) @ r_h.T))
        return ((1 - z) * new + z * h,)

    def _rnn(self, x: list[Array], h: Array, c: Array) -> tuple[Array, ...]:
        return (self._functions[0](self._clipped(x[0] + h @ self._r[0].T)),)
