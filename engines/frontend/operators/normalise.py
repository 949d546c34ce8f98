"""Normalise the forms of a node in all opsets to the canonical form that infer_server.engines.ops defines.

Small constant inputs (axes, pads, sizes, bounds) become attributes; values that depend on shapes (auto_pad, -1 and 0 in
target shapes, equal splits) are resolved; operators that others express (Dropout, Upsample, Sum, CastLike, ...) are
replaced. A rule takes an OperatorCall and returns the nodes that replace it; operators without a rule are canonical.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from infer_server.engines.errors import GraphError, UnknownTensorError
from infer_server.engines.ir.dtypes import is_rare
from infer_server.engines.ir.graph import Array, Dim, Node, TensorType
from infer_server.engines.ir.shapes import BatchInt, dim, fixed, normal_axis
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.ops import op_of
from infer_server.engines.ops.fallback import as_onnx
from infer_server.engines.ops.recurrent import ACTIVATIONS, DEFAULTS, PARAMETERS


@dataclass(frozen=True)
class OperatorCall:
    """Node of a file with its opset, and the types and known values of its inputs."""
    node: Node
    opset: int
    types: Sequence[TensorType | None]
    values: Sequence[Array | None]
    read: set[str] = field(default_factory=set)     # attributes that the rule read
    notices: list[str] = field(default_factory=list)    # notices of the rule for the user

    def has(self, index: int) -> bool:
        return index < len(self.node.inputs) and bool(self.node.inputs[index])

    def type(self, index: int = 0) -> TensorType:
        kind = self.types[index] if self.has(index) else None
        if kind is None:
            raise GraphError(f"input {index} is missing")
        return kind

    @property
    def rank(self) -> int:
        return len(self.type().shape)

    def value(self, index: int) -> list[Any] | None:
        """Return the elements of an input (ints, floats or Extents); None if it is absent.

        Raise UnknownTensorError if they are not known at import.
        """
        if not self.has(index):
            return None
        array = self.values[index]
        if array is None:
            raise UnknownTensorError(f"input '{self.node.inputs[index]}' depends on data; "
                                     "it must follow from constants and shapes", self.node.inputs[index:index + 1])
        return list(np.ravel(array).tolist())

    def ints(self, index: int) -> tuple[int, ...] | None:
        """Return the elements of an input as ints. Raise GraphError if one depends on the batch."""
        found = self.value(index)
        if found is not None and any(isinstance(v, BatchInt) for v in found):
            raise GraphError(f"input '{self.node.inputs[index]}' depends on the batch")
        return None if found is None else tuple(map(as_int, found))

    def option(self, name: str, index: int, since: int) -> tuple[int, ...] | None:
        """Return integers that are an attribute before opset `since` and input `index` from then on."""
        if self.opset >= since:
            return self.ints(index)
        found = self.attr(name)
        return None if found is None else tuple(found)

    def node_with(self, inputs: int = 1, **attrs: Any) -> list[Node]:
        """Return the node with its first `inputs` inputs and these attributes only, except those of value None."""
        return [replace(self.node, inputs=self.node.inputs[:inputs],
                        attrs={k: v for k, v in attrs.items() if v is not None})]

    def attr(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return self.node.attrs.get(name, default)

    def keep(self, *names: str) -> dict[str, Any]:
        """Return the attributes with these names that the node has, and mark them as read."""
        self.read.update(names)
        return {name: self.node.attrs[name] for name in names if name in self.node.attrs}

    def ignore(self, *names: str) -> None:
        """Mark attributes as read that do not matter here; the rule says why."""
        self.read.update(names)

    @property
    def unread(self) -> list[str]:
        """Attributes that the rule has not read, which a canonical form without them would lose."""
        return sorted(set(self.node.attrs) - self.read)


class Beyond(Exception):
    """Raised, with the reason, for a valid node without a canonical form; the onnx package evaluates it."""


Rule = Callable[[OperatorCall], list[Node]]
RULES: dict[str, Rule] = {}
OLDER: dict[str, tuple[int, Rule]] = {}         # operator -> (opset, rule of earlier opsets)


def rule(*ops: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        return function
    return register


def normalise(call: OperatorCall) -> list[Node]:
    """Return the canonical nodes of a call.

    Raises
    ------
    GraphError
        If a value that the rule needs is unknown, or an attribute or input is invalid.
    Beyond
        If the node is valid but has no canonical form.
    """
    call.ignore("consumed_inputs")      # before opset 6: inputs whose memory may be reused
    before, older = OLDER.get(call.node.op, (0, _as_it_is))
    return older(call) if call.opset < before else RULES.get(call.node.op, _as_it_is)(call)


def _as_it_is(call: OperatorCall) -> list[Node]:
    return call.node_with(len(call.node.inputs), **call.keep(*op_of(call.node.op).attributes))


def identity(call: OperatorCall) -> list[Node]:
    return [replace(call.node, op="Identity", inputs=call.node.inputs[:1], outputs=call.node.outputs[:1], attrs={})]


# ---- constants
@rule("Constant")
def _constant(call: OperatorCall) -> list[Node]:
    kinds = {"value": None, "sparse_value": None, "value_float": np.float32, "value_floats": np.float32,
             "value_int": np.int64, "value_ints": np.int64}
    given = call.keep(*call.node.attrs)
    if len(given) != 1:
        raise GraphError(f"a Constant must have exactly one value attribute, but has {len(given)}")
    (name, value), = given.items()
    if name not in kinds:
        raise GraphError(f"a Constant with the attribute {name} is not supported")
    return call.node_with(0, value=value if name == "value" else np.asarray(value, kinds[name]))


@rule("ConstantOfShape")
def _constant_of_shape(call: OperatorCall) -> list[Node]:
    value = np.asarray(call.attr("value", np.zeros(1, np.float32)))
    return call.node_with(0, shape=as_dims(call.value(0)), value=value)


# ---- pointwise
@rule("Clip")
def _clip(call: OperatorCall) -> list[Node]:
    if call.opset < 11:
        return call.node_with(1, **call.keep("min", "max"))
    bounds = [call.values[i] if call.has(i) else None for i in (1, 2)]
    if any(bound is not None and bound.size != 1 for bound in bounds):
        raise GraphError("min and max must be scalars")
    if all(bound is not None or not call.has(i) for i, bound in enumerate(bounds, 1)):
        low, high = (None if bound is None else bound.item() for bound in bounds)
        return call.node_with(1, min=low, max=high)
    given = [(op, index) for op, index in (("Max", 1), ("Min", 2)) if call.has(index)]
    return _chain(call.node, [(op, call.node.inputs[index], op.lower()) for op, index in given])


def _chain(node: Node, links: Sequence[tuple[str, str, str]]) -> list[Node]:
    """Return a chain of binary nodes (op, second input, label), the first of which reads the node's first input."""
    (y,) = node.outputs
    made = [*(f"{y}.{label}" for _, _, label in links[:-1]), y]
    return [replace(node, op=op, inputs=(x, other), outputs=(name,), attrs={})
            for (op, other, _), x, name in zip(links, [node.inputs[0], *made[:-1]], made, strict=True)]


@rule("Sum", "Max", "Min", "Mean")
def _variadic(call: OperatorCall) -> list[Node]:
    """Replace a variadic operator by a chain of binary nodes."""
    node, op = call.node, {"Sum": "Add", "Mean": "Add"}.get(call.node.op, call.node.op)
    links = [(op, other, str(i)) for i, other in enumerate(node.inputs[1:], 1)]
    if not links:
        return identity(call)
    if node.op != "Mean":
        return _chain(node, links)
    count = f"{node.outputs[0]}.count"
    value = np.array(len(node.inputs), call.type().dtype)
    return [Node("Constant", (), (count,), {"value": value}), *_chain(node, [*links, ("Div", count, "mean")])]


@rule("Cast", "CastLike")
def _cast(call: OperatorCall) -> list[Node]:
    to = call.type(1).dtype if call.node.op == "CastLike" else _target(call.attr("to"))
    rounding = call.keep("saturate", "round_mode")      # these matter only for types of at most 8 bits
    return [replace(node, op="Cast") for node in call.node_with(1, to=to.name, **rounding if is_rare(to) else {})]


@rule("BitCast")
def _bit_cast(call: OperatorCall) -> list[Node]:
    return call.node_with(1, to=dtype_of(call.attr("to")).name)


def _target(to: int | str) -> np.dtype[Any]:
    """Return the dtype of a Cast's `to`, which is a string before opset 6."""
    return dtype_of(TensorProto.DataType.Value(to.upper()) if isinstance(to, str) else to)


def is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.isbuiltin == 1 and dtype.kind == "f" or dtype.name == "bfloat16"


def dtype_of(number: int) -> np.dtype[Any]:
    """Return the dtype of a TensorProto.DataType. Raise GraphError for an unknown number."""
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(number))
    except (KeyError, TypeError, ValueError) as error:
        raise GraphError(f"{number} is not an element type of ONNX") from error


@rule("Dropout")
def _dropout(call: OperatorCall) -> list[Node]:
    """Replace Dropout, which drops nothing in inference, by an Identity and a mask of true."""
    call.ignore("ratio", "seed", "is_test")
    ratio, training = call.value(1), call.value(2)
    if training and training[0] and (ratio is None or ratio[0]):
        raise GraphError("it is in training mode; export the model for inference")
    made = identity(call)
    if len(call.node.outputs) > 1:
        true = np.ones(1, np.bool_ if call.opset >= 10 else call.type().dtype)
        made.append(replace(call.node, op="ConstantOfShape", inputs=(), outputs=call.node.outputs[1:],
                            attrs={"shape": call.type().shape, "value": true}))
    return made


@rule("Celu")
def _celu(call: OperatorCall) -> list[Node]:
    if not (alpha := call.attr("alpha", 1.0)):
        raise GraphError("alpha must not be 0")
    return call.node_with(1, alpha=alpha)


@rule("LpNormalization")
def _lp_normalization(call: OperatorCall) -> list[Node]:
    if (p := call.attr("p", 2)) not in (1, 2):
        raise GraphError(f"p is {p}, but must be 1 or 2")
    return call.node_with(1, p=p, axis=normal_axis(call.attr("axis", -1), call.rank))


@rule("BatchNormalization")
def _batch_normalization(call: OperatorCall) -> list[Node]:
    if call.attr("training_mode", 0) or (len(call.node.outputs) > 1 and call.opset >= 14):
        raise GraphError("it is in training mode; export the model for inference")
    call.ignore("momentum")         # used only in training
    return [replace(node, outputs=node.outputs[:1]) for node in call.node_with(5, epsilon=call.attr("epsilon", 1e-5))]


@rule("LayerNormalization", "RMSNormalization")
def _layer_normalization(call: OperatorCall) -> list[Node]:
    plain_sums(call)
    return call.node_with(3, axis=normal_axis(call.attr("axis", -1), call.rank), epsilon=call.attr("epsilon", 1e-5))


def plain_sums(call: OperatorCall) -> None:
    """Raise Beyond if stash_type, the precision of inner sums, is not float32."""
    if dtype_of(call.attr("stash_type", TensorProto.FLOAT)) != np.float32:
        raise Beyond("inner sums in another type than float32")


@rule("Range")
def _range(call: OperatorCall) -> list[Node]:
    call.ignore("stash_type")       # the engine's build computes in double precision
    return call.node_with(3)


@rule("Softmax", "LogSoftmax")
def _softmax(call: OperatorCall) -> list[Node]:
    """Normalise Softmax, which before opset 13 flattens all axes from `axis` (default 1) on."""
    node, shape = call.node, call.type().shape
    if call.opset >= 13:
        return call.node_with(1, axis=normal_axis(call.attr("axis", -1), call.rank))
    axis = normal_axis(call.attr("axis", 1), call.rank)
    if all(d == 1 for d in shape[axis + 1:]):
        return call.node_with(1, axis=axis)
    flat, result = (f"{node.outputs[0]}.{part}" for part in ("flat", "softmax"))
    return [replace(node, op="Flatten", outputs=(flat,), attrs={"axis": axis}),
            replace(node, inputs=(flat,), outputs=(result,), attrs={"axis": 1}),
            replace(node, op="Reshape", inputs=(result,), attrs={"shape": shape})]


@rule("Hardmax")
def _hardmax(call: OperatorCall) -> list[Node]:
    """Normalise Hardmax like Softmax; the onnx package evaluates it as that of opset 13."""
    return [as_onnx(part, 13) if part.op == "Hardmax" else part for part in _softmax(call)]


@rule("QuantizeLinear", "DequantizeLinear")
def _quantised(call: OperatorCall) -> list[Node]:
    number, scale = call.attr("output_dtype", 0), call.type(1).dtype
    wanted = dtype_of(number) if number else None
    if call.node.op == "DequantizeLinear" and wanted and wanted != scale:
        raise Beyond(f"a result in another type than the scale's, {scale}")
    if call.attr("precision", 0):
        raise Beyond("a division in another precision than the input's")
    if (known := call.values[1]) is not None and not np.all(np.isfinite(known)):
        raise GraphError("the scale must be finite")
    attrs: dict[str, Any] = call.keep("block_size")
    saturate = call.keep("saturate")        # matters only for 8-bit floats
    if is_rare(call.type(2).dtype if call.has(2) else wanted or np.dtype(np.uint8)):
        attrs |= saturate
    axis = call.attr("axis", 1)
    if call.type(1).shape not in ((), (1,)):
        attrs["axis"] = normal_axis(axis, call.rank)
    made = call.node_with(3, **attrs)
    if call.node.op == "QuantizeLinear" and not call.has(2) and wanted:
        name = f"{call.node.outputs[0]}.zero_point"
        zeros = np.zeros(fixed(call.type(1).shape), wanted)
        return [Node("Constant", (), (name,), {"value": zeros}),
                *(replace(node, inputs=(*node.inputs[:2], name)) for node in made)]
    return made


# ---- recurrent layers
@rule("LSTM", "GRU", "RNN")
def _recurrent(call: OperatorCall) -> list[Node]:
    """Normalise a recurrent layer: all attributes are set, with alpha and beta for each activation."""
    op, direction = call.node.op, call.attr("direction", "forward")
    count = 2 if direction == "bidirectional" else 1
    known = {name.lower(): name for name in ACTIVATIONS}
    names = tuple(known.get(name.lower(), name) for name in call.attr("activations") or DEFAULTS[op] * count)
    if unknown := set(names) - set(ACTIVATIONS):
        raise GraphError(f"activation is '{min(unknown)}', but must be one of {', '.join(ACTIVATIONS)}")
    if len(names) != count * len(DEFAULTS[op]) or direction not in ("forward", "reverse", "bidirectional"):
        raise GraphError(f"{len(names)} activations do not fit direction '{direction}'")
    if call.attr("clip", 1.0) <= 0:
        raise GraphError(f"clip is {call.attr('clip')}, but must be above 0, or absent")
    if call.attr("hidden_size", size := fixed(call.type(2).shape)[-1]) != size:
        raise GraphError(f"hidden_size is {call.attr('hidden_size')}, but the weights are for {size}")
    call.ignore("output_sequence")          # absent outputs have no name
    given = {key: iter(call.attr(key) or ()) for key in ("activation_alpha", "activation_beta")}
    # Values are listed for the activations that have such a parameter, in order.
    parameters = {key: tuple(float(next(given[key], PARAMETERS[name][i])) if len(PARAMETERS.get(name, ())) > i else 0.0
                             for name in names) for i, key in enumerate(given)}
    return call.node_with(8, direction=direction, layout=call.attr("layout", 0), clip=float(call.attr("clip", 0.0)),
                          activations=" ".join(names), **parameters, input_forget=call.attr("input_forget", 0),
                          linear_before_reset=call.attr("linear_before_reset", 0))


def as_dims(values: Iterable[Any] | None) -> tuple[Dim, ...]:
    """Return values, ints or Extents, as the dims of a shape."""
    return tuple(dim(v) for v in values or ())
