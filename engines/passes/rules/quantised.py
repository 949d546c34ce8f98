"""Rewrite QuantizeLinear and DequantizeLinear (Q/DQ) pairs as FakeQuantize, and place these at producers.

    DequantizeLinear(QuantizeLinear(x)) = FakeQuantize(x)
    DequantizeLinear(QuantizeLinear(x)) = s * FakeQuantize(x / s)       with a scale s[c] for each channel
    FakeQuantize(move(x)) = move(FakeQuantize(x))           if elements are only moved, or maxima are selected
    FakeQuantize(x) = x                                     if x is on the same grid already
    FakeQuantize(Clip(FakeQuantize(x))) = FakeQuantize(Clip(x))         Relu(FakeQuantize(x)) = FakeQuantize(Relu(x))

A FakeQuantize then directly follows the node that computes the tensor, whose kernel rounds when it stores, and does
not split patterns of data movement. int8 becomes uint8 with a zero point greater by 128, as kernels store activations.
A single Q or DQ, at the model's inputs and outputs or around integer operators, becomes arithmetic.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from infer_server.engines.ir.dtypes import FLOAT
from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.ir.grid import grid_params, offset_grid
from infer_server.engines.ops import OPS, op_of
from infer_server.engines.passes.rewriting.dataflow import Walk, dataflow
from infer_server.engines.passes.rewriting.facts import output_axis, pads_with_zeros
from infer_server.engines.passes.rewriting.rewrite import Draft, Match, No, P, Rule, Value

_SELECT = ("MaxPool", "GlobalMaxPool", "Pad")
_MOVES = (*(name for name, op in OPS.items() if op.moves), *_SELECT)
_BYTES = ("uint8", "int8")
_INTEGERS = (*_BYTES, "uint16", "int16")
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def _sources(node: Node) -> tuple[str, ...]:
    """Return the inputs whose elements a moving or selecting node copies."""
    return node.inputs[:1] if node.op in _SELECT else op_of(node.op).data(node)


def _numbers(graph: Graph, node: Node) -> tuple[Array, Array] | None:
    """Return (scale, zero point) of a Q or DQ, or None if one is computed at run time."""
    scale, zero = (graph.constants.get(name) for name in (*node.inputs, "")[1:3])
    kind = graph.types[node.outputs[0] if node.op == "QuantizeLinear" else node.inputs[0]].dtype
    if scale is None or zero is None and len(node.inputs) > 2 and node.inputs[2]:
        return None
    return scale, np.zeros(scale.shape, kind) if zero is None else zero


def _same(a: tuple[Array, Array] | None, b: tuple[Array, Array] | None) -> bool:
    return a is not None and b is not None and all(
        x.dtype == y.dtype and np.array_equal(x.reshape(-1), y.reshape(-1)) for x, y in zip(a, b, strict=True))


class PairToFakeQuantize(Rule):
    pattern = P("DequantizeLinear", Value("stored"))

    def check(self, match: Match) -> bool | No:
        first = match.graph.producer.get(match.value("stored"))
        if first is None or first.op != "QuantizeLinear":
            return False
        numbers = _numbers(match.graph, match.root)
        if numbers is None or not _same(numbers, _numbers(match.graph, first)):
            return No("its QuantizeLinear and DequantizeLinear have different or computed scales and zero points")
        if numbers[0].size != 1 or numbers[1].dtype.name not in _INTEGERS:
            return No(f"an activation with {numbers[0].size} scales, stored as {numbers[1].dtype}, is kept in float")
        return match.graph.types[first.inputs[0]].dtype == match.type.dtype == FLOAT and bool(numbers[0].item() > 0)

    def rewrite(self, match: Match, draft: Draft) -> None:
        first = match.graph.producer[match.value("stored")]
        numbers = _numbers(match.graph, match.root)
        assert numbers is not None
        draft.absorb(first)
        draft.finish("FakeQuantize", first.inputs[:1], _rounding(*numbers))


def _rounding(scale: Array, zero: Array) -> dict[str, float]:
    """Return the attributes of the FakeQuantize with this scale and zero point; int8 is shifted to uint8."""
    limits = np.iinfo(zero.dtype)
    shift = 128 if limits.min == -128 else 0
    return {"scale": float(scale.item()), "zero_point": zero.item() + shift, "low": limits.min + shift,
            "high": limits.max + shift}


class PairOfChannels(Rule):
    """Rewrite a Q/DQ pair with one scale per channel as FakeQuantize(x / scale, 1) * scale.

    A depthwise convolution after it absorbs the product into its weights.
    """
    pattern = P("DequantizeLinear", P("QuantizeLinear", Value("x"), bind="first"))

    def check(self, match: Match) -> bool:
        numbers, axes = _numbers(match.graph, match.root), [node.attrs.get("axis", 1) for node in match.nodes]
        return (_same(numbers, _numbers(match.graph, match["first"])) and axes[0] == axes[1] and numbers is not None
                and numbers[0].ndim == 1 and numbers[0].size > 1 and match.type.dtype == FLOAT
                and numbers[1].dtype.name in _BYTES and bool(np.all(numbers[1] == numbers[1][0])))

    def rewrite(self, match: Match, draft: Draft) -> None:
        numbers = _numbers(match.graph, match.root)
        assert numbers is not None
        rank = len(match.type.shape)
        scale = numbers[0].reshape(-1, *(1,) * (rank - match.root.attrs.get("axis", 1) % rank - 1))
        steps = draft.node("Mul", [match.value("x"), draft.constant("steps", (1 / scale).astype(np.float32))])
        shift = 128 if numbers[1].dtype == np.int8 else 0
        whole = draft.node("FakeQuantize", [steps], {
            "scale": 1.0, "zero_point": numbers[1][0].item() + shift, "low": 0, "high": 255})
        draft.finish("Mul", [whole, draft.constant("scale", scale)])


class MoveDequantized(Rule):
    """Move a pool, Reshape or other move out of a pair: DequantizeLinear(move(x)) = move(DequantizeLinear(x))."""
    pattern = P("DequantizeLinear", Value("stored"))

    def check(self, match: Match) -> bool:
        numbers, move = _numbers(match.graph, match.root), match.graph.producer.get(match.value("stored"))
        return (move is not None and move.op in _MOVES and move.op != "Pad" and len(move.outputs) == 1
                and numbers is not None and numbers[0].size == 1
                and not all(map(match.graph.is_constant, _sources(move))))

    def rewrite(self, match: Match, draft: Draft) -> None:
        move, rest = match.graph.producer[match.value("stored")], match.root.inputs[1:]
        draft.absorb(move)
        _finish_moved(move, draft, lambda name: draft.node("DequantizeLinear", [name, *rest]))


def _finish_moved(move: Node, draft: Draft, changed: Callable[[str], str]) -> None:
    """Finish with the node `move` on changed sources."""
    sources = {name: changed(name) for name in dict.fromkeys(_sources(move))}
    draft.finish(move.op, [sources.get(name, name) for name in move.inputs], move.attrs)


class MoveFakeQuantized(Rule):
    """Move a FakeQuantize before a move whose sources have no other readers, or before a Concat."""
    pattern = P("FakeQuantize", P(" ".join(_MOVES), bind="move"))

    def check(self, match: Match) -> bool:
        graph, move = match.graph, match["move"]
        sources = _sources(move)
        if move.op == "Pad" and not pads_with_zeros(move) or any(map(graph.is_constant, sources)):
            return False
        return move.op == "Concat" or all(
            len(graph.consumers[name]) == 1 and name not in graph.outputs for name in sources)

    def rewrite(self, match: Match, draft: Draft) -> None:
        attrs = match.root.attrs
        _finish_moved(match["move"], draft, lambda name: draft.node("FakeQuantize", [name], attrs))


class RoundRecurrent(MoveFakeQuantized):
    """Move a FakeQuantize to a Recurrence, after `split_recurrent`. Kernels of other moves may round themselves."""

    def check(self, match: Match) -> bool:
        return _moved_from_recurrence(match.graph, match["move"].outputs[0]) and super().check(match)


@dataflow
def _moved_from_recurrence(graph: Graph, name: str) -> Walk[bool]:
    """Return True if the tensor holds elements of a Recurrence's result, perhaps moved."""
    node = graph.producer.get(name)
    if node is not None and node.op in _MOVES and len(_sources(node)) == 1:
        return (yield _sources(node)[0])  # type: ignore[no-any-return]
    return node is not None and node.op == "Recurrence"


class QuantizedTwice(Rule):
    pattern = P("FakeQuantize", Value("x"))

    def check(self, match: Match) -> bool:
        return dict(match.root.attrs) == grid(match.graph, match.value("x"))

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.same_as(match.value("x"))


@dataflow
def grid(graph: Graph, name: str) -> Walk[dict[str, float] | None]:
    """Return the attributes of the FakeQuantize that all elements of the tensor passed, or None."""
    node = graph.producer.get(name)
    if node is None:
        return None
    if node.op == "FakeQuantize":
        return dict(node.attrs)
    if node.op not in _MOVES or node.op == "Pad" and not pads_with_zeros(node):
        return None
    first, *others = _sources(node)
    attrs = yield first
    for source in others:
        if attrs is None or (yield source) != attrs:
            return None
    return attrs  # type: ignore[no-any-return]


class ClampedTwice(Rule):
    pattern = P("FakeQuantize", P("Relu Clip", P("FakeQuantize", Value("x"), bind="first"), bind="clip"))

    def check(self, match: Match) -> bool:
        return match["first"].attrs == match.root.attrs

    def rewrite(self, match: Match, draft: Draft) -> None:
        clip = match["clip"]
        draft.finish("FakeQuantize", [draft.node(clip.op, [match.value("x")], clip.attrs)], match.root.attrs)


class ClampFirst(Rule):
    pattern = P("Relu", P("FakeQuantize", Value("x"), bind="first"))

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.finish("FakeQuantize", [draft.node("Relu", [match.value("x")])], match["first"].attrs)


def _aligned(draft: Draft, match: Match, name: str, rank: int) -> str:
    """Return a scale or zero point, scalar or per channel, in a shape that broadcasts."""
    shape = match.shape(name)
    if shape in ((), (1,)):
        return name
    axis = match.root.attrs.get("axis", 1) % rank
    return draft.node("Reshape", [name], {"shape": (*shape, *(1,) * (rank - axis - 1))})


def _is_alone(match: Match) -> bool:
    """Return True if the node's scale is float32 and not by blocks."""
    scale = match.graph.types[match.root.inputs[1]]
    return not match.root.attrs.get("block_size") and len(scale.shape) < 2 and scale.dtype == FLOAT


class DequantizedByArithmetic(Rule):
    """Replace a DequantizeLinear by (x - zero point) * scale.

    If a quantised layer reads it, a FakeQuantize that changes nothing marks the values as integers of a grid, so that
    the layer computes in int8.
    """
    pattern = P("DequantizeLinear", Value("stored"))

    def check(self, match: Match) -> bool:
        return _is_alone(match) and match.type.dtype == FLOAT and not match.graph.is_constant(match.value("stored"))

    def rewrite(self, match: Match, draft: Draft) -> None:
        stored, scale, *zero = filter(None, match.root.inputs)
        rank = len(match.type.shape)
        x = draft.node("Cast", [stored], {"to": FLOAT.name})
        if zero:
            point = draft.node("Cast", [_aligned(draft, match, zero[0], rank)], {"to": FLOAT.name})
            x = draft.node("Sub", [x, point])
        factors = [x, _aligned(draft, match, scale, rank)]
        if (attrs := self._grid_of_layer(match)) is None:
            draft.finish("Mul", factors)
        else:
            draft.finish("FakeQuantize", [draft.node("Mul", factors)], attrs)

    @staticmethod
    def _grid_of_layer(match: Match) -> dict[str, float] | None:
        """Return the FakeQuantize attributes if a quantised layer reads the root's output, else None."""
        numbers = _numbers(match.graph, match.root)
        if numbers is None or numbers[0].size != 1 or numbers[1].dtype.name not in _BYTES or numbers[0].item() <= 0:
            return None
        return _rounding(*numbers) if _is_read_by_layer(match.graph, match.root.outputs[0]) else None


@dataflow
def _is_read_by_layer(graph: Graph, name: str) -> Walk[bool]:
    """Return True if a contraction by weights on a grid reads the tensor, perhaps through moves."""
    for node in graph.consumers[name]:
        if node.op in _MOVES and name in _sources(node):
            for output in node.outputs:
                if (yield output):
                    return True
        elif node.op in _LAYERS and node.inputs[0] == name and _is_on_grid(graph, node):
            return True
    return False


def _is_on_grid(graph: Graph, layer: Node) -> bool:
    """Return True if the layer's weights are a scale, per output channel, times integers."""
    weight, axis = graph.constants.get(layer.inputs[1]), output_axis(layer)
    return (weight is not None and axis < weight.ndim
            and (grid_params(weight, axis) is not None or offset_grid(weight, axis) is not None))


class QuantizedByArithmetic(Rule):
    """Replace a QuantizeLinear by Clip(Round(x / scale) + zero point) for readers of the integers."""
    pattern = P("QuantizeLinear", Value("x"))

    def check(self, match: Match) -> bool:
        return (_is_alone(match) and match.type.dtype.name in _INTEGERS
                and match.graph.types[match.value("x")].dtype == FLOAT)

    def rewrite(self, match: Match, draft: Draft) -> None:
        x, scale, *zero = filter(None, match.root.inputs)
        rank = len(match.type.shape)
        limits = np.iinfo(match.type.dtype)
        y = draft.node("Round", [draft.node("Div", [x, _aligned(draft, match, scale, rank)])])
        if zero:
            point = draft.node("Cast", [_aligned(draft, match, zero[0], rank)], {"to": FLOAT.name})
            y = draft.node("Add", [y, point])
        y = draft.node("Clip", [y], {"min": float(limits.min), "max": float(limits.max), "saturates": 1})
        draft.finish("Cast", [y], {"to": match.type.dtype.name})


PAIRS: Sequence[Rule] = (PairToFakeQuantize(), PairOfChannels(), QuantizedTwice(), MoveDequantized(), ClampedTwice(),
                         ClampFirst(), MoveFakeQuantized())
ALONE: Sequence[Rule] = (DequantizedByArithmetic(), QuantizedByArithmetic())
