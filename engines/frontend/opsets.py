"""The opset of a model: any that the onnx package here knows. Functions may be of another one than their model."""
from __future__ import annotations

from functools import cache

import onnx

from engines.errors import ModelError
from engines.frontend.names import nodes_in

UNSAID_OPSET = 9        # of a domain that the file names none of
_DOMAINS = ("", "ai.onnx")      # ONNX's own
# By a default that is not what was done before, by other shapes (broadcast slopes, scales of channels), another type.
_REDEFINED = frozenset({"Dropout", "GroupNormalization", "PRelu", "RoiAlign"})


def check_opset(model: str, proto: onnx.ModelProto) -> None:
    """Raises ModelError: an opset newer than the onnx package."""
    opset = opset_of(proto)
    if opset > onnx.defs.onnx_opset_version():
        raise ModelError(f"{model}: opset {opset} is newer than what the onnx package {onnx.__version__} here knows, "
                         f"{onnx.defs.onnx_opset_version()}; update onnx, or export the model in an older opset")
    if opset < 1:
        raise ModelError(f"{model}: there is no opset {opset}")


def opset_of(proto: onnx.ModelProto) -> int:
    """That of ONNX's own domain."""
    return next((entry.version for entry in proto.opset_import if entry.domain in _DOMAINS), UNSAID_OPSET)


def with_functions_of_its_opset(model: str, proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model, or a copy whose functions say that they are of its opset, which they may where their operators mean
    the same there. Raises ModelError for an operator that does not."""
    opset = opset_of(proto)
    if all(entry.version == opset for function in proto.functions for entry in _own(function)):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for function in copy.functions:
        for entry in _own(function):
            for node in nodes_in(function.node):
                if node.domain in _DOMAINS and not _means_the_same(node.op_type, entry.version, opset):
                    raise ModelError(
                        f"{model}: its function {function.domain}.{function.name} is written in opset {entry.version}, "
                        f"where {node.op_type} is another operator than in opset {opset}, the model's; export both in "
                        "one opset")
            entry.version = opset
    return copy


def _own(function: onnx.FunctionProto) -> list[onnx.OperatorSetIdProto]:
    return [entry for entry in function.opset_import if entry.domain in _DOMAINS]


@cache
def _means_the_same(op: str, one: int, other: int) -> bool:
    """Whether a node of one opset is valid in another one, and no other operator. The later version may have taken
    more types, and more inputs and attributes that may be left out."""
    try:
        before, after = (onnx.defs.get_schema(op, opset) for opset in sorted((one, other)))
    except onnx.defs.SchemaError:
        return False
    if before.since_version == after.since_version:
        return True
    kept = all(name in after.attributes and after.attributes[name].default_value == attribute.default_value
               for name, attribute in before.attributes.items())
    return (kept and op not in _REDEFINED and not (before.deprecated or after.deprecated)
            and after.min_input <= before.min_input and after.max_input >= before.max_input)
