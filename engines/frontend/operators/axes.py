"""Normalise operators along axes and operators that change shapes: axes and target shapes become attributes."""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.normalise import Beyond, OperatorCall, as_dims, dtype_of, identity, rule
from infer_server.engines.ir.graph import Dim, Node
from infer_server.engines.ir.shapes import BatchInt, broadcast, extent, fixed, normal_axis, product, text
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.ops.movement import FAR

BEYOND = 10**9      # no batch is as large: tf2onnx's "to the end", where others write INT32_MAX or INT64_MAX


@rule("Squeeze", "Unsqueeze")
def _squeeze(call: OperatorCall) -> list[Node]:
    axes = call.option("axes", 1, since=13)
    rank = call.rank
    if call.node.op == "Unsqueeze":
        if axes is None:
            raise GraphError("axes is missing")
        rank += len(axes)
    elif axes is None:
        if any(isinstance(d, str) for d in call.type().shape):
            raise GraphError(f"axes is missing, so the axes removed from {text(call.type().shape)} depend on whether "
                             "the batch is 1")
        axes = tuple(i for i, d in enumerate(call.type().shape) if d == 1)
    return call.node_with(1, axes=tuple(sorted(normal_axis(a, rank) for a in axes)))


@rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
      "ReduceLogSum", "ReduceLogSumExp")
def _reduce(call: OperatorCall) -> list[Node]:
    axes = call.option("axes", 1, since=13 if call.node.op == "ReduceSum" else 18)
    nothing, keepdims = call.attr("noop_with_empty_axes", 0), call.attr("keepdims", 1)
    if not axes and nothing:
        return _of_each(call)
    axes = tuple(sorted(normal_axis(a, call.rank) for a in axes or range(call.rank)))
    return call.node_with(1, axes=axes, keepdims=keepdims)


def _of_each(call: OperatorCall) -> list[Node]:
    """Return a reduction over no axes, which applies its function to each element by itself."""
    op = {"ReduceL1": "Abs", "ReduceL2": "Abs", "ReduceLogSum": "Log", "ReduceSumSquare": "Mul"}.get(call.node.op)
    x = call.node.inputs[0]
    return [replace(call.node, op=op, inputs=(x, x) if op == "Mul" else (x,), attrs={})] if op else identity(call)


@rule("ArgMax", "ArgMin")
def _arg(call: OperatorCall) -> list[Node]:
    return call.node_with(1, axis=normal_axis(call.attr("axis", 0), call.rank), keepdims=call.attr("keepdims", 1),
                          **call.keep("select_last_index"))


@rule("CumSum", "CumProd")
def _cumulative(call: OperatorCall) -> list[Node]:
    (axis,) = call.ints(1) or (0,)
    return call.node_with(1, axis=normal_axis(axis, call.rank), exclusive=call.attr("exclusive", 0),
                          reverse=call.attr("reverse", 0))


@rule("TopK")
def _top_k(call: OperatorCall) -> list[Node]:
    (k,) = (call.ints(1) if call.opset >= 10 else None) or (call.attr("k"),)
    call.ignore("sorted")       # unsorted results may be sorted
    return call.node_with(1, k=k, axis=normal_axis(call.attr("axis", -1), call.rank), largest=call.attr("largest", 1))


@rule("Concat", "Gather", "GatherElements")
def _axis(call: OperatorCall) -> list[Node]:
    if not call.rank:
        raise GraphError("the first input is a scalar, but needs an axis")
    axis = normal_axis(call.attr("axis", 0), call.rank)
    return call.node_with(len(call.node.inputs), axis=axis)


@rule("Scatter", "ScatterElements")
def _scatter(call: OperatorCall) -> list[Node]:
    """Normalise ScatterElements, which was called Scatter at first."""
    axis = normal_axis(call.attr("axis", 0), call.rank)
    return [replace(node, op="ScatterElements") for node in call.node_with(3, axis=axis, **call.keep("reduction"))]


@rule("Trilu")
def _trilu(call: OperatorCall) -> list[Node]:
    (k,) = call.ints(1) or (0,)
    return call.node_with(1, k=k, upper=call.attr("upper", 1))


@rule("EyeLike")
def _eye_like(call: OperatorCall) -> list[Node]:
    """Replace an EyeLike of known shape by a constant."""
    shape, number = call.type().shape, call.attr("dtype")
    if any(isinstance(extent, str) for extent in shape) or len(shape) != 2:
        raise Beyond("a matrix with the axis of the items")
    rows, columns = fixed(shape)
    eye = np.eye(rows, columns, call.attr("k", 0), dtype_of(number) if number else call.type().dtype)
    return [replace(call.node, op="Constant", inputs=(), attrs={"value": eye})]


@rule("Transpose")
def _transpose(call: OperatorCall) -> list[Node]:
    return call.node_with(1, perm=tuple(call.attr("perm", range(call.rank)[::-1])))


@rule("Reshape")
def _reshape(call: OperatorCall) -> list[Node]:
    shape = call.type().shape
    target: list[Any] = call.value(1) or []
    if not call.attr("allowzero", 0):
        if any(_is(t, 0) and i >= len(shape) for i, t in enumerate(target)):
            raise GraphError(f"the target shape {target} has a 0 for an axis that the input does not have")
        target = [extent(shape[i]) if _is(t, 0) else t for i, t in enumerate(target)]
    if any(_is(t, -1) for t in target):
        rest = math.prod((t for t in target if not _is(t, -1)), start=1)
        left = 0 if _is(rest, 0) else product(shape) // rest
        target = [left if _is(t, -1) else t for t in target]
    return call.node_with(1, shape=as_dims(target))


def _is(value: Any, number: int) -> bool:
    return not isinstance(value, BatchInt) and value == number


@rule("Expand")
def _expand(call: OperatorCall) -> list[Node]:
    """Set the resulting shape: the target may have fewer axes, or 1 where the input has more."""
    return call.node_with(1, shape=broadcast(call.type().shape, as_dims(call.value(1))))


@rule("Tile")
def _tile(call: OperatorCall) -> list[Node]:
    return call.node_with(1, repeats=as_dims(call.value(1)))


@rule("Split")
def _split(call: OperatorCall) -> list[Node]:
    node, axis = call.node, normal_axis(call.attr("axis", 0), call.rank)
    sizes: tuple[Dim, ...] | None = call.attr("split") if call.opset < 13 else None
    if call.opset >= 13 and call.has(1):
        sizes = as_dims(call.value(1))
    if sizes is None:
        (size,) = fixed(call.type().shape[axis:axis + 1])
        parts = call.attr("num_outputs", len(node.outputs))
        if parts != len(node.outputs):
            raise GraphError(f"num_outputs is {parts}, but the node has {len(node.outputs)} outputs")
        each = -(-size // parts)        # the last part may be smaller
        sizes = tuple(min(each, size - start) for start in range(0, each * parts, each))
    if len(sizes) != len(node.outputs):
        raise GraphError(f"split has {len(sizes)} sizes, but the node has {len(node.outputs)} outputs")
    return call.node_with(1, axis=axis, split=tuple(sizes))


@rule("Slice")
def _slice(call: OperatorCall) -> list[Node]:
    shape = call.type().shape
    if call.opset < 10:
        starts, ends = list(call.attr("starts")), list(call.attr("ends"))
        axes, steps = call.attr("axes"), None
    else:
        starts, ends = call.value(1) or [], call.value(2) or []
        axes, steps = call.ints(3), call.ints(4)
    axes = tuple(normal_axis(a, len(shape)) for a in (range(len(starts)) if axes is None else axes))
    cut_steps = tuple(steps or (1,) * len(starts))
    if {len(starts), len(ends), len(cut_steps), len(set(axes))} != {len(axes)} or 0 in cut_steps:
        raise GraphError(f"{len(starts)} starts, {len(ends)} ends and steps {list(cut_steps)} do not match axes "
                         f"{list(axes)}")
    ends = [FAR if _is_whole(end, shape[axis]) else end for end, axis in zip(ends, axes, strict=True)]
    if any(isinstance(v, BatchInt) for v in (*starts, *ends)):
        raise GraphError("starts or ends depend on the batch size, which is not supported")
    cuts = [(axis, as_int(start), as_int(end), step) for axis, start, end, step in zip(axes, starts, ends, cut_steps,
                                                                                 strict=True)
            if (start, step) != (0, 1) or end < FAR]        # leaves out axes that are taken whole
    return call.node_with(1, **{name: tuple(cut[i] for cut in cuts)
                                for i, name in enumerate(("axes", "starts", "ends", "steps"))})


def _is_whole(end: int | BatchInt, size: Dim) -> bool:
    """Return True for the end of an axis that depends on the batch, as its extent or a number beyond any batch."""
    return end == extent(size) if isinstance(end, BatchInt) else not isinstance(size, int) and end >= BEYOND


@rule("Pad")
def _pad(call: OperatorCall) -> list[Node]:
    if call.opset < 11:
        return call.node_with(1, **call.keep("pads", "mode", "value"))
    pads, fill = call.ints(1) or (), call.value(2)
    axes = [normal_axis(a, call.rank) for a in call.ints(3) or range(call.rank)]
    if len(pads) != 2 * len(axes):
        raise GraphError(f"pads has {len(pads)} values, but {len(axes)} axes need {2 * len(axes)}")
    widths = [0] * 2 * call.rank
    for i, axis in enumerate(axes):
        widths[axis], widths[axis + call.rank] = pads[i], pads[i + len(axes)]
    return call.node_with(1, pads=tuple(widths), mode=call.attr("mode", "constant"), value=fill[0] if fill else None)
