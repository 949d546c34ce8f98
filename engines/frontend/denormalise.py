"""A canonical node -> ONNX nodes of opset 20: the inverse of normalise.py.

A rule takes the node and `constant`, which stores an array as an initialiser and returns its name; it gives the nodes
as (op, inputs, outputs, attributes).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from engines.errors import ModelError
from engines.ir import Array, Node, TensorType
from engines.ops import describe
from engines.shapes import extent

OPSET = 20

Constant = Callable[[str, Array], str]
Part = tuple[str, Sequence[str], Sequence[str], dict[str, Any]]
Rule = Callable[[Node, Sequence[TensorType | None], Constant], list[Part]]
_RULES: dict[str, Rule] = {}


def denormalise(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    """What to write for the node; `types` are those of its inputs."""
    if node.op in _RULES:
        return _RULES[node.op](node, types, constant)
    attrs = {key: _attribute(value) for key, value in node.attrs.items()
             if not key.startswith("onnx_") and key != "channels_last"}
    return [(node.op, node.inputs, node.outputs, attrs)]


def _attribute(value: Any) -> Any:
    return numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value


def _rule(*ops: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, function))
        return function
    return register


def _moved(node: Node, constant: Constant, *names: str, keep: Sequence[str] = (), rename: str = "") -> list[Part]:
    """Integer attributes become inputs of these names, in order."""
    inputs = [constant(name, np.array(node.attrs[name], np.int64)) for name in names]
    attrs = {key: node.attrs[key] for key in keep if key in node.attrs}
    return [(rename or node.op, [*node.inputs, *inputs], node.outputs, attrs)]


@_rule("Squeeze", "Unsqueeze")
def _squeeze(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    return _moved(node, constant, "axes")


@_rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
       "ReduceLogSum", "ReduceLogSumExp")
def _reduce(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    (op, inputs, outputs, attrs), = _moved(node, constant, "axes", keep=("keepdims",))
    return [(op, inputs, outputs, {**attrs, "noop_with_empty_axes": 1})]


@_rule("Split")
def _split(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    return _moved(node, constant, "split", keep=("axis",))


@_rule("Slice")
def _slice(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    return _moved(node, constant, "starts", "ends", "axes", "steps")


@_rule("Tile")
def _tile(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    return _moved(node, constant, "repeats")


@_rule("TopK")
def _top_k(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    k = constant("k", np.array([node.attrs["k"]], np.int64))
    return [("TopK", [*node.inputs, k], node.outputs, {key: node.attrs[key] for key in ("axis", "largest")})]


@_rule("Pad")
def _pad(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    (kind,) = types
    assert kind is not None
    pads = constant("pads", np.array(node.attrs["pads"], np.int64))
    value = constant("value", np.array(node.attrs.get("value", 0), kind.dtype))
    return [("Pad", [*node.inputs, pads, value], node.outputs, {"mode": node.attrs.get("mode", "constant")})]


@_rule("Reshape", "Expand")
def _target(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    """A symbolic extent is what is left over (Reshape), or what the input has (Expand)."""
    shape, stand_in = node.attrs["shape"], -1 if node.op == "Reshape" else 1
    if node.op == "Reshape" and sum(isinstance(d, str) for d in shape) > 1:
        raise ModelError(f"{describe(node)}: two symbolic extents cannot be written to ONNX")
    target = constant("shape", np.array([stand_in if isinstance(d, str) else d for d in shape], np.int64))
    return [(node.op, [*node.inputs, target], node.outputs, {"allowzero": 1} if 0 in shape else {})]


@_rule("ConstantOfShape")
def _constant_of_shape(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    if any(isinstance(d, str) for d in node.attrs["shape"]):
        raise ModelError(f"{describe(node)}: a symbolic extent made from nothing cannot be written to ONNX")
    shape = constant("shape", np.array(node.attrs["shape"], np.int64))
    value = numpy_helper.from_array(np.asarray(node.attrs["value"]).reshape(1))
    return [("ConstantOfShape", [shape], node.outputs, {"value": value})]


@_rule("Resize")
def _resize(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    attrs = {key: value for key, value in node.attrs.items() if key not in ("scales", "sizes", "roi", "channels_last")}
    roi = constant("roi", np.array(node.attrs["roi"], np.float32)) if "roi" in node.attrs else ""
    if "scales" in node.attrs:
        scales = constant("scales", np.array(node.attrs["scales"], np.float32))
        return [("Resize", [*node.inputs, roi, scales], node.outputs, attrs)]
    # Written for the image axes only: the batch may be symbolic.
    sizes = node.attrs["sizes"][2:]
    extents = constant("sizes", np.array([int(extent(d)) for d in sizes], np.int64))     # type: ignore[arg-type]
    axes = list(range(2, 2 + len(sizes)))
    return [("Resize", [*node.inputs, roi, "", extents], node.outputs, {**attrs, "axes": axes})]


@_rule("Cast")
def _cast(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    to = helper.np_dtype_to_tensor_dtype(np.dtype(node.attrs["to"]))
    return [("Cast", node.inputs, node.outputs, {"to": to})]


@_rule("Clip")
def _clip(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    """Bounds are inputs; bounds per channel, which Clip does not have, are a Max and a Min."""
    (kind,) = types
    assert kind is not None
    bounds = {key: constant(key, np.asarray(node.attrs[key], kind.dtype)) if key in node.attrs else ""
              for key in ("min", "max")}
    if all(np.ndim(node.attrs.get(key, 0)) == 0 for key in bounds):
        return [("Clip", [*node.inputs, bounds["min"], bounds["max"]], node.outputs, {})]
    (x,), (y,) = node.inputs, node.outputs
    if not bounds["max"]:
        return [("Max", [x, bounds["min"]], [y], {})]
    if not bounds["min"]:
        return [("Min", [x, bounds["max"]], [y], {})]
    return [("Max", [x, bounds["min"]], [f"{y}.raised"], {}), ("Min", [f"{y}.raised", bounds["max"]], [y], {})]


@_rule("Swish")
def _swish(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    (x,), (y,), (kind,) = node.inputs, node.outputs, types
    assert kind is not None
    alpha = node.attrs.get("alpha", 1.0)
    if alpha == 1:
        return [("Sigmoid", [x], [f"{y}.sigmoid"], {}), ("Mul", [x, f"{y}.sigmoid"], [y], {})]
    return [("Mul", [x, constant("alpha", np.array(alpha, kind.dtype))], [f"{y}.scaled"], {}),
            ("Sigmoid", [f"{y}.scaled"], [f"{y}.sigmoid"], {}), ("Mul", [x, f"{y}.sigmoid"], [y], {})]


@_rule("ScaledDotProductAttention")
def _attention(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    """Its nodes before they were one: opset 20 has no such operator."""
    (q, k, v, *mask), (y,), kind = [name for name in node.inputs if name], node.outputs, types[0]
    assert kind is not None
    parts: list[Part] = [
        ("Transpose", [k], [f"{y}.keys"], {"perm": (0, 1, 3, 2)}),
        ("MatMul", [q, f"{y}.keys"], [f"{y}.products"], {}),
        ("Mul", [f"{y}.products", constant("scale", np.array(node.attrs["scale"], kind.dtype))], [f"{y}.scaled"], {})]
    scores = f"{y}.scaled"
    if mask:
        scores = f"{y}.masked"
        parts.append(("Add", [f"{y}.scaled", *mask], [scores], {}))
    return [*parts, ("Softmax", [scores], [f"{y}.weights"], {"axis": -1}),
            ("MatMul", [f"{y}.weights", v], [y], {})]
