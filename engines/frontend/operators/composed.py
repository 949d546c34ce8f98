"""Lower operators that ONNX defines by others to those, so that passes see plain arithmetic."""
from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.normalise import Beyond, OperatorCall, plain_sums, rule
from infer_server.engines.frontend.operators.parts import NodeBuilder
from infer_server.engines.ir.graph import Dim, Node
from infer_server.engines.ir.shapes import fixed, normal_axis


@rule("Swish")
def _swish(call: OperatorCall) -> list[Node]:
    """Lower Swish: x * sigmoid(alpha * x)."""
    alpha, x = call.attr("alpha", 1.0), call.node.inputs[0]
    if alpha == 1:
        return call.node_with(1)
    w = NodeBuilder(call)
    return w.finish("Mul", x, w("Sigmoid", w("Mul", x, w.constant(np.array(alpha, call.type().dtype)))))


@rule("SwiGLU")
def _swiglu(call: OperatorCall) -> list[Node]:
    """Lower SwiGLU: swish(a) * b."""
    alpha, w, (gate, value) = call.attr("alpha", 1.0), NodeBuilder(call), call.node.inputs
    if alpha == 1:
        return w.finish("Mul", w("Swish", gate), value)
    sigmoid = w("Sigmoid", w("Mul", gate, w.constant(np.array(alpha, call.type().dtype))))
    return w.finish("Mul", w("Mul", gate, sigmoid), value)


@rule("GroupNormalization")
def _group_normalization(call: OperatorCall) -> list[Node]:
    """Lower GroupNormalization to an InstanceNormalization over [N, groups, elements of a group].

    Scale and bias are per group before opset 21, and per channel since.
    """
    plain_sums(call)
    node, shape, groups = call.node, call.type().shape, int(call.attr("num_groups"))
    dtype, per_group = call.type().dtype, call.opset < 21
    w = NodeBuilder(call)
    ones, zeros = (w.constant(np.full(groups, number, dtype)) for number in (1, 0))
    lines = w("Reshape", node.inputs[0], shape=(shape[0], groups, math.prod(fixed(shape[1:])) // groups))
    y = w("InstanceNormalization", lines, *(node.inputs[1:3] if per_group else (ones, zeros)),
          epsilon=call.attr("epsilon", 1e-5))
    if per_group:
        return w.finish("Reshape", y, shape=shape)
    y = w("Reshape", y, shape=shape)
    scale, bias = (w("Reshape", name, shape=(*shape[1:2], *(1,) * (len(shape) - 2))) for name in node.inputs[1:3])
    return w.finish("Add", w("Mul", y, scale), bias)


@rule("MeanVarianceNormalization")
def _mean_variance(call: OperatorCall) -> list[Node]:
    """Lower MeanVarianceNormalization: (x - mean) / (deviation + 1e-9)."""
    axes = tuple(normal_axis(axis, call.rank) for axis in call.attr("axes", (0, 2, 3)))
    w, x = NodeBuilder(call), call.node.inputs[0]
    apart = w("Sub", x, w("ReduceMean", x, axes=axes, keepdims=1))
    deviation = w("Sqrt", w("ReduceMean", w("Mul", apart, apart), axes=axes, keepdims=1))
    return w.finish("Div", apart, w("Add", deviation, w.constant(np.array(1e-9, call.type().dtype))))


@rule("TensorScatter")
def _tensor_scatter(call: OperatorCall) -> list[Node]:
    """Lower TensorScatter: write new elements along an axis of a cache, from an offset per item on.

    In circular mode indices wrap around at the end of the cache.
    """
    w, (cache, new, *starts) = NodeBuilder(call), call.node.inputs
    axis, mode, shape = normal_axis(call.attr("axis", -2), call.rank), call.attr("mode", "linear"), call.type(1).shape
    (count, extent), ones = fixed([shape[axis], call.type().shape[axis]]), (1,) * call.rank
    places = w.constant(np.arange(count).reshape(*ones[:axis], count, *ones[axis + 1:]))
    if call.has(2):
        places = w("Add", w("Reshape", starts[0], shape=(shape[0], *ones[1:])), places)
    if mode == "circular":
        places = w("Mod", places, w.constant(np.array(extent)))
    return w.finish("ScatterElements", cache, w("Expand", places, shape=shape), new, axis=axis)


@rule("Einsum")
def _einsum(call: OperatorCall) -> list[Node]:
    """Lower Einsum to products from left to right; an axis is summed as soon as no later operand has it."""
    terms, result = _axes_of(call)
    extents = {axis: extent for i, term in enumerate(terms) for axis, extent in zip(term, call.type(i).shape,
                                                                                    strict=True)}
    w, (name, *others), (term, *others_terms) = NodeBuilder(call), call.node.inputs, terms
    for i, (other, letters) in enumerate(zip(others, others_terms, strict=True)):
        wanted = list(dict.fromkeys((*result, *"".join(others_terms[i + 1:]))))
        left = _summed(w, name, term, {*wanted, *letters})
        right = _summed(w, other, letters, {*wanted, *term})
        name, term = _product(w, left, right, wanted, extents)
    name, term = _summed(w, name, term, set(result))
    return w.finish("Transpose", name, perm=tuple(map(term.index, result)))


def _summed(w: NodeBuilder, name: str, term: str, kept: set[str]) -> tuple[str, str]:
    """Sum over the axes that are not in `kept`; return the tensor and its remaining axes."""
    lost = tuple(place for place, axis in enumerate(term) if axis not in kept)
    if lost:
        name = w("ReduceSum", name, axes=lost, keepdims=0)
    return name, "".join(axis for axis in term if axis in kept)


def _product(w: NodeBuilder, left: tuple[str, str], right: tuple[str, str], result: list[str],
             extents: Mapping[str, Dim]) -> tuple[str, str]:
    """Multiply two operands as stacks of matrices; return the product and its axes.

    Axes are classified as items (in both operands and the result), rows and columns (in the left or the right operand
    alone), and summed (not in the result).
    """
    items = [axis for axis in result if axis in left[1] and axis in right[1]]
    summed = [axis for axis in left[1] if axis not in result]
    rows, columns = ([axis for axis in result if axis in term and axis not in items] for _, term in (left, right))

    def matrices(operand: tuple[str, str], *groups: list[str]) -> str:
        name, term = operand
        order = [*items, *(axis for group in groups for axis in group)]
        turned = w("Transpose", name, perm=tuple(map(term.index, order)))
        sizes = [math.prod(fixed(extents[axis] for axis in group)) for group in groups]
        return w("Reshape", turned, shape=(*(extents[axis] for axis in items), *sizes))

    if any(isinstance(extents[axis], str) for axis in (*rows, *columns, *summed)):
        raise Beyond("the axis of the items beside others in a matrix")
    y = w("MatMul", matrices(left, rows, summed), matrices(right, summed, columns))
    order = [*items, *rows, *columns]
    return w("Reshape", y, shape=tuple(extents[axis] for axis in order)), "".join(order)


def _axes_of(call: OperatorCall) -> tuple[list[str], str]:
    """Return the axis letters of each operand and of the result. Raise Beyond for forms that are not supported."""
    equation = call.attr("equation").replace(" ", "")
    written, _, result = equation.partition("->")
    terms = written.split(",")
    if len(terms) != len(call.node.inputs):
        raise GraphError(f"the equation '{equation}' has {len(terms)} operands, but the node has "
                         f"{len(call.node.inputs)}")
    if "." in equation or any(len(set(term)) < len(term) for term in terms):
        raise Beyond(f"'{equation}'")
    if any(len(term) != len(call.type(i).shape) for i, term in enumerate(terms)):
        raise GraphError(f"the equation '{equation}' needs one letter for each axis of the operands")
    if "->" not in equation:        # letters that occur once, in alphabetical order
        result = "".join(sorted(axis for axis in set(written) if written.count(axis) == 1 and axis != ","))
    if len(set(result)) < len(result) or not set(result) <= set(written):
        raise GraphError(f"the result of the equation '{equation}' repeats a letter, or has one that no operand has")
    sizes: dict[str, Dim] = {}
    for i, term in enumerate(terms):
        for axis, extent in zip(term, call.type(i).shape, strict=True):
            if sizes.setdefault(axis, extent) != extent:
                raise Beyond(f"'{equation}' of extents that are broadcast")
    return terms, result


@rule("OneHot")
def _one_hot(call: OperatorCall) -> list[Node]:
    """Lower OneHot: values[1] where the position along a new axis equals the index, else values[0]; -1 is the last."""
    rank = call.rank
    (depth,), axis = call.ints(1) or (0,), normal_axis(call.attr("axis", -1), rank + 1)
    w, values = NodeBuilder(call), call.node.inputs[2]
    off, on = (w("Slice", values, axes=(0,), starts=(place,), ends=(place + 1,), steps=(1,)) for place in (0, 1))
    index = w("Cast", call.node.inputs[0], to="int64")
    below = w("Less", index, w.constant(np.array(0)))
    index = w("Where", below, w("Add", index, w.constant(np.array(depth))), index)
    numbers = w.constant(np.arange(depth).reshape(-1, *(1,) * (rank - axis)))
    return w.finish("Where", w("Equal", w("Unsqueeze", index, axes=(axis,)), numbers), on, off)


@rule("RotaryEmbedding")
def _rotary_embedding(call: OperatorCall) -> list[Node]:
    """Lower RotaryEmbedding, which rotates pairs of elements by an angle that depends on the position.

        y1 = cos x1 - sin x2        x1, x2: the halves of the first `rotary_embedding_dim` elements of a head,
        y2 = sin x1 + cos x2        or, interleaved, its even and odd ones; the rest is copied

    x is [N, heads, S, D] or [N, S, heads * D]; cos and sin are [N, S, R / 2], or tables with a row for each position.
    """
    node, shape = call.node, call.type().shape
    w, x = NodeBuilder(call), node.inputs[0]
    heads_first, count = len(shape) == 4, int(call.attr("num_heads", 0))
    if heads_first:
        items, heads, tokens, depth = shape
    else:
        (items, tokens, hidden), heads = shape, count
        depth = fixed([hidden])[0] // heads
        x = w("Reshape", x, shape=(items, tokens, heads, depth))
    (size,) = fixed([depth])
    turned = int(call.attr("rotary_embedding_dim", 0)) or size
    half = turned // 2
    tables = [w("Gather", name, node.inputs[3], axis=0) if call.has(3) else name for name in node.inputs[1:3]]
    axis = 1 if heads_first else 2
    cos, sin = (w("Unsqueeze", table, axes=(axis,)) for table in tables)

    def cut(start: int, end: int, step: int = 1) -> str:
        return w("Slice", x, axes=(3,), starts=(start,), ends=(end,), steps=(step,))

    interleaved = bool(call.attr("interleaved", 0))
    first, second = (cut(0, turned, 2), cut(1, turned, 2)) if interleaved else (cut(0, half), cut(half, turned))
    real = w("Sub", w("Mul", first, cos), w("Mul", second, sin))
    imaginary = w("Add", w("Mul", first, sin), w("Mul", second, cos))
    if interleaved:
        rest: tuple[Dim, ...] = (*(shape[:3] if heads_first else (items, tokens, heads)), turned)
        pairs = w("Concat", *(w("Unsqueeze", part, axes=(4,)) for part in (real, imaginary)), axis=4)
        parts = [w("Reshape", pairs, shape=rest)]
    else:
        parts = [real, imaginary]
    parts += [cut(turned, size)] if turned < size else []
    result = w("Concat", *parts, axis=3)
    return w.finish("Reshape", result, shape=shape)
