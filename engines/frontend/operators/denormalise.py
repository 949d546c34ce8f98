"""Convert canonical nodes to ONNX nodes of opset 20, the inverse of normalise.py.

A rule takes the node, the types of its inputs, and `constant`, which stores an array as an initializer and returns its
name. It returns the nodes as (op, inputs, outputs, attributes).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import defs, helper, numpy_helper

from infer_server.engines.errors import ModelError
from infer_server.engines.ir.graph import Array, Dim, Node, TensorType, trimmed
from infer_server.engines.ir.rounding import LEAST_SCALE, STEPS
from infer_server.engines.ir.shapes import extent, fixed
from infer_server.engines.ops import describe, op_of
from infer_server.engines.ops.fallback import name_in_onnx
from infer_server.engines.ops.op import present
from infer_server.engines.ops.recurrent import PARAMETERS, activations
from infer_server.engines.ops.reduction import Reduction

OPSET = 20
# Attributes that are inputs in ONNX, in ONNX's order, as `axes` of reductions are.
_INPUTS = {"CumSum": ("axis",), "Slice": ("starts", "ends", "axes", "steps"), "Split": ("split",), "Squeeze": ("axes",),
           "Tile": ("repeats",), "Trilu": ("k",), "Unsqueeze": ("axes",)}
_OF_WINDOWS = {"strides": 1, "dilations": 1, "pads": 0, "output_padding": 0}     # defaults that schemas lack

Constant = Callable[[str, Array], str]
Part = tuple[str, Sequence[str], Sequence[str], dict[str, Any]]
Rule = Callable[[Node, Sequence[TensorType | None], Constant], list[Part]]
_RULES: dict[str, Rule] = {}


def denormalise(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    """Return the ONNX nodes for a canonical node.

    Parameters
    ----------
    node : Node
        A canonical node.
    types : sequence of TensorType or None
        The types of its inputs; None for an absent one.
    constant : callable
        Takes a label and an array, stores the array as an initializer and returns the initializer's name.

    Raises
    ------
    ModelError
        If opset 20 cannot express the node.
    """
    if node.op in _RULES:
        return _RULES[node.op](node, types, constant)
    if "onnx_domain" not in node.attrs and not defs.has(name_in_onnx(node.op), OPSET):
        raise ModelError(f"{describe(node)}: opset {OPSET} of ONNX has no such operator, so the graph cannot be "
                         "exported")
    attrs = {key: _attribute(value) for key, value in node.attrs.items()
             if not key.startswith("onnx_") and key not in ("channels_last", "exact")}
    reduces = issubclass(op_of(node.op), Reduction)
    inputs = [constant(name, np.array(attrs.pop(name), np.int64))
              for name in (("axes",) if reduces else _INPUTS.get(node.op, ()))]
    if reduces:
        attrs["noop_with_empty_axes"] = 1
    return [(name_in_onnx(node.op), [*node.inputs, *inputs], node.outputs, attrs)]


def without_defaults(op: str, attrs: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that differ from the operator's defaults.

    Runtimes replace operators by their own, which may lack newer attributes: ONNX Runtime's QLinearAveragePool has no
    dilations, and refuses a model that sets them to 1.
    """
    if attrs.get("domain"):
        return attrs
    defaults = {name: helper.get_attribute_value(attribute.default_value)
                for name, attribute in defs.get_schema(op, OPSET).attributes.items() if attribute.default_value.name}
    return {name: value for name, value in attrs.items() if not _is_default(name, value, defaults)}


def _is_default(name: str, value: Any, defaults: dict[str, Any]) -> bool:
    if name in _OF_WINDOWS:
        return all(number == _OF_WINDOWS[name] for number in value)
    default = defaults.get(name)
    return bool(value == (default.decode() if isinstance(default, bytes) else default))


def _attribute(value: Any) -> Any:
    return numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value


def _rule(*ops: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, function))
        return function
    return register


@_rule("GatherElements")
def _gather_elements(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    """Write a GatherElements; broadcast indices are expanded to the data's extents on all axes but `axis`."""
    data, indices = node.inputs
    axis, y = int(node.attrs["axis"]), node.outputs[0]
    if "shape" not in node.attrs:
        return [(node.op, node.inputs, node.outputs, {"axis": axis})]
    along = constant("along", np.array([node.attrs["shape"][axis]], np.int64))
    return [("Shape", [data], [f"{y}.before"], {"end": axis}), ("Shape", [data], [f"{y}.behind"], {"start": axis + 1}),
            ("Concat", [f"{y}.before", along, f"{y}.behind"], [f"{y}.shape"], {"axis": 0}),
            ("Expand", [indices, f"{y}.shape"], [f"{y}.indices"], {}),
            (node.op, [data, f"{y}.indices"], node.outputs, {"axis": axis})]


@_rule("RMSNormalization")
def _rms_normalization(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    """Write an RMSNormalization by its definition, since ONNX has the operator from opset 23 on."""
    (x, scale), y, (kind, _) = node.inputs, node.outputs[0], present(types)
    axes = constant("axes", np.arange(node.attrs["axis"], len(kind.shape)))
    epsilon = constant("epsilon", np.array(node.attrs["epsilon"], kind.dtype))
    return [("Mul", [x, x], [f"{y}.squares"], {}), ("ReduceMean", [f"{y}.squares", axes], [f"{y}.mean"], {}),
            ("Add", [f"{y}.mean", epsilon], [f"{y}.sum"], {}), ("Sqrt", [f"{y}.sum"], [f"{y}.size"], {}),
            ("Div", [x, f"{y}.size"], [f"{y}.normal"], {}), ("Mul", [f"{y}.normal", scale], node.outputs, {})]


@_rule("FakeQuantize")
def _fake_quantize(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    """Write a Q/DQ pair of the integer type whose range is [low, high]."""
    low, high = node.attrs["low"], node.attrs["high"]
    dtype = next(kind for kind in (np.uint8, np.int8, np.uint16, np.int16)
                 if np.iinfo(kind).min == low and np.iinfo(kind).max == high)
    constants = [constant("step", np.array(node.attrs["scale"], np.float32)),
                 constant("zero", np.array(node.attrs["zero_point"], dtype))]
    stored = f"{node.outputs[0]}.integers"
    return [("QuantizeLinear", [node.inputs[0], *constants], [stored], {}),
            ("DequantizeLinear", [stored, *constants], node.outputs, {})]


@_rule("ScaledRows")
def _scaled_rows(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    (x,), (y, scales), axes = node.inputs, node.outputs, constant("axes", np.array([-1], np.int64))
    step, least = (constant(label, np.array(number, np.float32))
                   for label, number in (("step", 1 / node.attrs.get("steps", STEPS)), ("least", LEAST_SCALE)))
    return [("Abs", [x], [f"{y}.sizes"], {}), ("ReduceMax", [f"{y}.sizes", axes], [f"{y}.largest"], {}),
            ("Mul", [f"{y}.largest", step], [f"{y}.steps"], {}), ("Max", [f"{y}.steps", least], [scales], {}),
            ("Div", [x, scales], [y], {})]


@_rule("TopK")
def _top_k(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    k = constant("k", np.array([node.attrs["k"]], np.int64))
    return [("TopK", [*node.inputs, k], node.outputs, {key: node.attrs[key] for key in ("axis", "largest")})]


def shuffled_groups(indices: Array) -> int:
    """Return the number of groups if a Gather of these indices is a channel shuffle, else 0."""
    count = indices.size
    groups = count // max(int(indices[1]), 1) if indices.ndim == 1 and count > 1 else 0
    if not 1 < groups < count or count % groups:
        return 0
    return groups if np.array_equal(indices, np.arange(count).reshape(groups, -1).T.ravel()) else 0


def channel_shuffle(node: Node, shape: Sequence[Dim], groups: int, constant: Constant) -> list[Part]:
    """Write a channel shuffle as Reshape, Transpose, Reshape, which runtimes recognise.

    OpenVINO 2026.4 computes a convolution after a Gather of channels wrongly.
    """
    (x, _), (y,), axis = node.inputs, node.outputs, node.attrs["axis"]
    before, behind = [0] * axis, [-1 if isinstance(d, str) else d for d in shape[axis + 1:]]
    count = extent(shape[axis])
    apart = constant("groups", np.array([*before, groups, count // groups, *behind], np.int64))
    together = constant("shape", np.array([*before, count, *behind], np.int64))
    swap = (*range(axis), axis + 1, axis, *range(axis + 2, len(shape) + 1))
    return [("Reshape", [x, apart], [f"{y}.apart"], {}),
            ("Transpose", [f"{y}.apart"], [f"{y}.swapped"], {"perm": swap}),
            ("Reshape", [f"{y}.swapped", together], [y], {})]


@_rule("Pad")
def _pad(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    (kind,) = present(types)
    pads = constant("pads", np.array(node.attrs["pads"], np.int64))
    value = constant("value", np.array(node.attrs.get("value", 0), kind.dtype))
    return [("Pad", [*node.inputs, pads, value], node.outputs, {"mode": node.attrs.get("mode", "constant")})]


@_rule("Reshape", "Expand")
def _target(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    """Write a Reshape or Expand, with -1 (Reshape) or 1 (Expand) for a symbolic extent."""
    shape, stand_in = node.attrs["shape"], -1 if node.op == "Reshape" else 1
    if node.op == "Reshape" and sum(isinstance(d, str) for d in shape) > 1:
        raise ModelError(f"{describe(node)}: a Reshape to two symbolic extents cannot be exported to ONNX")
    target = constant("shape", np.array([stand_in if isinstance(d, str) else d for d in shape], np.int64))
    return [(node.op, [*node.inputs, target], node.outputs, {"allowzero": 1} if 0 in shape else {})]


@_rule("ConstantOfShape")
def _constant_of_shape(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    if any(isinstance(d, str) for d in node.attrs["shape"]):
        raise ModelError(f"{describe(node)}: a ConstantOfShape with a symbolic extent cannot be exported to ONNX")
    shape = constant("shape", np.array(node.attrs["shape"], np.int64))
    value = numpy_helper.from_array(np.asarray(node.attrs["value"]).reshape(1))
    return [("ConstantOfShape", [shape], node.outputs, {"value": value})]


@_rule("Resize")
def _resize(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    attrs = {key: value for key, value in node.attrs.items() if key not in ("scales", "sizes", "roi", "channels_last")}
    roi = constant("roi", np.array(node.attrs["roi"], np.float32)) if "roi" in node.attrs else ""
    if "sizes" not in node.attrs:
        scales = constant("scales", np.array(node.attrs["scales"], np.float32))
        return [("Resize", [*node.inputs, roi, scales], node.outputs, attrs)]
    sizes = node.attrs["sizes"][2:]             # only the image axes: the batch may be symbolic
    axes = list(range(2, 2 + len(sizes)))
    if "scales" in node.attrs:                  # the least of these sizes' quotients by the image's is that one scale
        shape = present(types)[0].shape
        image = fixed(shape[1:-1] if node.attrs.get("channels_last") else shape[2:])
        sizes = [math.ceil(scale * d - 1e-6) for scale, d in zip(node.attrs["scales"][2:], image, strict=True)]
        attrs["keep_aspect_ratio_policy"] = "not_larger"
        axes = [axis for axis in axes if node.attrs["scales"][axis] != 1.0] or axes     # axes that are scaled
        sizes = [sizes[axis - 2] for axis in axes]
    extents = constant("sizes", np.array([int(extent(d)) for d in sizes], np.int64))
    return [("Resize", [*node.inputs, roi, "", extents], node.outputs, {**attrs, "axes": axes})]


@_rule("Cast")
def _cast(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    to = helper.np_dtype_to_tensor_dtype(np.dtype(node.attrs["to"]))
    saturate = {"saturate": node.attrs["saturate"]} if "saturate" in node.attrs else {}
    return [("Cast", node.inputs, node.outputs, {"to": to, **saturate})]


@_rule("Clip")
def _clip(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    """Write a Clip, whose bounds are inputs; bounds per channel become a Max and a Min."""
    (kind,) = present(types)
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
    (x,), (y,) = node.inputs, node.outputs
    return [("Sigmoid", [x], [f"{y}.sigmoid"], {}), ("Mul", [x, f"{y}.sigmoid"], [y], {})]


@_rule("ScaledDotProductAttention")
def _attention(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    """Write an attention as products and a Softmax, since opset 20 has no such operator.

    The constant is labelled "factor" because quantised tensors use the label "scale".
    """
    (q, k, v, *mask), (y,), kind = [name for name in node.inputs if name], node.outputs, present(types)[0]
    rank = len(kind.shape)
    turned = (*range(rank - 2), rank - 1, rank - 2)
    parts: list[Part] = [
        ("Transpose", [k], [f"{y}.turned_keys"], {"perm": turned}),
        ("MatMul", [q, f"{y}.turned_keys"], [f"{y}.products"], {}),
        ("Mul", [f"{y}.products", constant("factor", np.array(node.attrs["scale"], kind.dtype))], [f"{y}.scaled"], {})]
    scores = f"{y}.scaled"
    if mask:
        scores = f"{y}.masked"
        parts.append(("Add", [f"{y}.scaled", *mask], [scores], {}))
    return [*parts, ("Softmax", [scores], [f"{y}.weights"], {"axis": -1}),
            ("MatMul", [f"{y}.weights", v], [y], {})]


@_rule("LSTM", "GRU", "RNN")
def _recurrent(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    _, _, recurrent, *_ = present(types)
    attrs = {**_recurrent_attributes(node, node.op, int(recurrent.shape[2])), "layout": node.attrs["layout"]}
    return [(node.op, node.inputs, node.outputs, attrs)]


@_rule("Recurrence")
def _recurrence(node: Node, types: Sequence[TensorType | None], constant: Constant) -> list[Part]:
    """Write a Recurrence as the layer of its cell, with the gates as input and an identity matrix as W."""
    if node.attrs.get("rounds_state"):
        raise ModelError(f"{describe(node)}: ONNX has no recurrent layer with a rounded state, so the graph cannot be "
                         "exported")
    (gates, r, bias, peepholes, lengths, *states), y = (*node.inputs, *("",) * (7 - len(node.inputs))), node.outputs[0]
    _, recurrent, *_ = present(types)
    (count, rows, hidden), op = (int(extent) for extent in recurrent.shape), node.attrs["cell"]
    identity = np.eye(count * rows, dtype=np.float32).reshape(count, rows, count * rows)
    parts: list[Part] = [("Transpose", [gates], [f"{y}.gates"], {"perm": (1, 0, 2)})]
    biases = ""
    if bias:        # the last H of [D, 2 G H]
        biases = f"{y}.biases"
        before = constant("before", np.zeros((count, 2 * rows - hidden), np.float32))
        parts.append(("Concat", [before, bias], [biases], {"axis": 1}))
    firsts = []
    for i, state in enumerate(states if op == "LSTM" else states[:1]):
        if not state:
            firsts.append("")
            continue
        name = f"{y}.first{i}"
        shape = constant(f"shape{i}", np.array([-1, count, hidden], np.int64))
        parts += [("Reshape", [state, shape], [f"{name}.split"], {}),
                  ("Shape", [gates], [f"{name}.batch"], {"start": 0, "end": 1}),
                  ("Concat", [f"{name}.batch", constant(f"ones{i}", np.array([1, 1], np.int64))],
                   [f"{name}.repeats"], {"axis": 0}),
                  ("Expand", [f"{name}.split", f"{name}.repeats"], [f"{name}.items"], {}),
                  ("Transpose", [f"{name}.items"], [name], {"perm": (1, 0, 2)})]
        firsts.append(name)
    inputs = trimmed([f"{y}.gates", constant("identity", identity), r, biases, lengths, *firsts, peepholes])
    made = [f"{output}.layer" for output in node.outputs]
    parts.append((op, inputs, made, _recurrent_attributes(node, op, hidden)))
    for i, (source, output) in enumerate(zip(made, node.outputs, strict=True)):
        flat = constant(f"flat{i}", np.array([0, -1] if i else [0, 0, -1], np.int64))
        parts += [("Transpose", [source], [f"{output}.items"], {"perm": (1, 0, 2) if i else (2, 0, 1, 3)}),
                  ("Reshape", [f"{output}.items", flat], [output], {})]
    return parts


def _recurrent_attributes(node: Node, op: str, hidden: int) -> dict[str, Any]:
    """Return the attributes of a recurrent layer; alpha and beta only for activations that have them."""
    chosen = activations(node)
    attrs: dict[str, Any] = {"hidden_size": hidden, "direction": node.attrs["direction"],
                             "activations": [name for name, _, _ in chosen]}
    for i, key in enumerate(("activation_alpha", "activation_beta")):
        if given := [values[i] for name, *values in chosen if len(PARAMETERS.get(name, ())) > i]:
            attrs[key] = given
    if node.attrs["clip"]:
        attrs["clip"] = node.attrs["clip"]
    if op == "GRU":
        attrs["linear_before_reset"] = node.attrs["linear_before_reset"]
    if op == "LSTM":
        attrs["input_forget"] = node.attrs["input_forget"]
    return attrs
