"""Check nodes against the schemas of their operators in the model's opset.

The onnx package has the schemas of ONNX's operators; SIGNATURES in infer_server.engines.frontend.operators.extension
has others.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import helper

from infer_server.engines.errors import GraphError, did_you_mean
from infer_server.engines.frontend.operators.extension import SIGNATURES, Signature
from infer_server.engines.ir.graph import TensorType, trimmed

# Attributes that are 0 or 1 in every operator; runtimes differ in how they read other numbers.
FLAGS = frozenset({"allowzero", "antialias", "ceil_mode", "count_include_pad", "detect_negative", "detect_positive",
                   "exclude_outside", "exclusive", "fmod", "input_forget", "interleaved", "inverse", "is_causal",
                   "keepdims", "largest", "layout", "linear_before_reset", "noop_with_empty_axes", "onesided",
                   "periodic", "reverse", "saturate", "select_last_index", "sorted", "storage_order", "training_mode",
                   "transA", "transB", "upper"})
# Attributes that are counts, at least 1, in every operator.
COUNTS = frozenset({"blocksize", "group", "hidden_size", "kv_num_heads", "num_groups", "num_heads", "num_outputs",
                    "q_num_heads", "size"})
# Values of string attributes, which schemas lack, by "operator.attribute", or by attribute for any operator.
_DIRECTIONS = ("forward", "reverse", "bidirectional")
STRING_VALUES: Mapping[str, Collection[str]] = {
    "auto_pad": ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"),
    "BitShift.direction": ("LEFT", "RIGHT"),
    "Cast.round_mode": ("up", "down", "nearest"),
    "CastLike.round_mode": ("up", "down", "nearest"),
    "DepthToSpace.mode": ("DCR", "CRD"),
    "GRU.direction": _DIRECTIONS,
    "Gelu.approximate": ("none", "tanh"),
    "LSTM.direction": _DIRECTIONS,
    "NegativeLogLikelihoodLoss.reduction": ("none", "sum", "mean"),
    "Pad.mode": ("constant", "reflect", "edge", "wrap"),
    "RNN.direction": _DIRECTIONS,
    "padding_mode": ("zeros", "border", "reflection"),
    "Resize.coordinate_transformation_mode": (
        "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
        "tf_half_pixel_for_nn", "tf_crop_and_resize"),
    "Resize.keep_aspect_ratio_policy": ("stretch", "not_larger", "not_smaller"),
    "Resize.mode": ("nearest", "linear", "cubic"),
    "Resize.nearest_mode": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    "ScatterElements.reduction": ("none", "add", "mul", "max", "min"),
    "ScatterND.reduction": ("none", "add", "mul", "max", "min"),
    "SoftmaxCrossEntropyLoss.reduction": ("none", "sum", "mean"),
    "SpaceToDepth.mode": ("DCR", "CRD"),
    "Upsample.mode": ("nearest", "linear", "bilinear"),
}
_OPTION = onnx.defs.OpSchema.FormalParameterOption


@dataclass(frozen=True)
class _Parameter:
    """Formal input of an operator. Inputs of one type `variable` have one type."""
    name: str
    required: bool
    types: frozenset[str]
    variable: str


@dataclass(frozen=True)
class Schema:
    """Schema of an operator in one opset."""
    op: str
    since: int
    attributes: Mapping[str, int]       # name -> AttributeProto.AttributeType
    required: frozenset[str]            # attributes
    defaults: Mapping[str, Any]         # default values of attributes
    inputs: tuple[_Parameter, ...]      # the last one may be variadic
    mixed: bool                         # variadic inputs may differ in type
    counts: tuple[int, int]             # number of inputs: least, most
    outputs: tuple[int, int]            # number of outputs: least, most
    no_tensors: frozenset[int]          # outputs that are sequences, optionals or maps

    def parameter(self, index: int) -> _Parameter:
        return self.inputs[min(index, len(self.inputs) - 1)]


@cache
def schema_of(op: str, opset: int, domain: str = "") -> Schema | None:
    """Return the schema of an operator in an opset; None if the opset has no such operator."""
    try:
        found = onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        known = SIGNATURES.get((domain, op))
        return _of_signature(op, known) if known else None
    last = found.inputs[-1] if found.inputs else None
    return Schema(
        op, found.since_version,
        {name: a.type.value for name, a in found.attributes.items()},     # type: ignore[attr-defined]  # stubs of onnx
        frozenset(name for name, a in found.attributes.items() if a.required),
        {name: helper.get_attribute_value(a.default_value) for name, a in found.attributes.items()
         if a.default_value.type},
        tuple(_Parameter(p.name, p.option == _OPTION.Single, frozenset(p.types), p.type_str) for p in found.inputs),
        bool(last and not last.is_homogeneous), (found.min_input, found.max_input),
        (found.min_output, found.max_output),
        frozenset(i for i, p in enumerate(found.outputs) if not any(t.startswith("tensor(") for t in p.types)))


def _of_signature(op: str, known: Signature) -> Schema:
    kinds = onnx.AttributeProto.AttributeType
    least = 1 + max(i for i, given in enumerate(known.inputs) if not given.optional)
    return Schema(
        op, 1, {a.name: kinds.Value(a.kind.upper()) for a in known.attributes},
        frozenset(a.name for a in known.attributes if a.required),
        {a.name: a.default.encode() if isinstance(a.default, str) else a.default for a in known.attributes
         if a.default is not None},
        tuple(_Parameter(i.name, not i.optional, frozenset(i.types), i.variable) for i in known.inputs),
        known.inputs[-1].several,
        (least, 10 ** 9 if known.inputs[-1].several else len(known.inputs)), (1, known.outputs), frozenset())


def check_node(schema: Schema, node: onnx.NodeProto) -> None:
    """Raise GraphError for an unknown, missing or invalid attribute, or a wrong number of inputs or outputs."""
    _check_attributes(schema, node)
    inputs, outputs = trimmed(node.input), list(node.output)
    least, most = schema.counts
    if not least <= len(inputs) <= most:
        raise GraphError(f"the node has {len(inputs)} inputs, but {schema.op} of opset {schema.since} takes "
                         f"{_range(least, most)}")
    for index, formal in enumerate(schema.inputs):
        if formal.required and not (index < len(inputs) and inputs[index]):
            raise GraphError(f"input {index} ('{formal.name}') is missing")
    least, most = schema.outputs
    if not any(outputs) or not least <= len(outputs) <= most:
        raise GraphError(f"the node has {len(list(filter(None, outputs)))} outputs, but {schema.op} of opset "
                         f"{schema.since} has {_range(max(least, 1), most)}")
    if lists := [name for index, name in enumerate(outputs) if name and index in schema.no_tensors]:
        raise GraphError(f"output '{lists[0]}' is not a tensor; no other outputs are supported")


def _range(least: int, most: int) -> str:
    if most > 1000:         # ONNX writes unlimited as the greatest integer
        return f"{least} or more"
    return str(least) if least == most else f"{least} to {most}"


def _check_attributes(schema: Schema, node: onnx.NodeProto) -> None:
    given = [attribute.name for attribute in node.attribute]
    for attribute in node.attribute:
        if attribute.name not in schema.attributes:
            raise GraphError(f"{schema.op} of opset {schema.since} has no attribute '{attribute.name}'"
                             f"{did_you_mean(attribute.name, schema.attributes) if schema.attributes else ', nor any'}")
        if given.count(attribute.name) > 1:
            raise GraphError(f"attribute '{attribute.name}' is given twice")
        if attribute.type != schema.attributes[attribute.name]:
            kinds = onnx.AttributeProto.AttributeType
            raise GraphError(f"attribute '{attribute.name}' has type {kinds.Name(attribute.type)}, but {schema.op} "
                             f"takes {kinds.Name(schema.attributes[attribute.name])}")
        if attribute.name not in schema.defaults or not same_as_default(
                schema, attribute.name, helper.get_attribute_value(attribute)):
            _check_value(schema, attribute)
    if missing := schema.required.difference(given):
        raise GraphError(f"the required attribute '{min(missing)}' of {schema.op} is missing")


def _check_value(schema: Schema, attribute: onnx.AttributeProto) -> None:
    name = attribute.name
    if name in FLAGS and attribute.i not in (0, 1):
        raise GraphError(f"attribute '{name}' is {attribute.i}, but must be 0 or 1")
    if name in COUNTS and attribute.i < 1:
        raise GraphError(f"attribute '{name}' is {attribute.i}, but must be at least 1")
    known = STRING_VALUES.get(f"{schema.op}.{name}", STRING_VALUES.get(name))
    if known and attribute.s.decode(errors="replace") not in known:
        raise GraphError(f"attribute '{name}' is '{attribute.s.decode(errors='replace')}', but must be one of "
                         f"{', '.join(known)}")


def check_types(schema: Schema, inputs: Sequence[TensorType | None]) -> None:
    """Raise GraphError for an input dtype that the operator does not allow, alone or with those of other inputs."""
    bound: dict[str, str] = {}
    for index, kind in enumerate(inputs):
        if kind is None:
            continue
        formal, name = schema.parameter(index), _type_name(kind.dtype)
        # Operators allow bfloat16 since various opsets; exporters use it in earlier ones.
        if name not in formal.types and not (name == "tensor(bfloat16)" and "tensor(float16)" in formal.types):
            raise GraphError(f"input {index} ('{formal.name}') is {kind.dtype}, which {schema.op} of opset "
                             f"{schema.since} does not take")
        if schema.mixed and index >= len(schema.inputs) - 1:
            continue
        if bound.setdefault(formal.variable, name) != name:
            raise GraphError(f"input {index} ('{formal.name}') is {kind.dtype}, but {schema.op} needs the type of "
                             f"another input, {bound[formal.variable]}")


@cache
def _type_name(dtype: np.dtype[Any]) -> str:
    """Return the type string of schemas, as "tensor(float)"."""
    return f"tensor({onnx.TensorProto.DataType.Name(helper.np_dtype_to_tensor_dtype(dtype)).lower()})"


def same_as_default(schema: Schema, name: str, value: Any) -> bool:
    """Return True if an attribute's value is its default."""
    default = schema.defaults.get(name)
    if isinstance(default, bytes) and isinstance(value, str):
        default = default.decode()
    return bool(default is not None and default == (list(value) if isinstance(value, tuple) else value))
