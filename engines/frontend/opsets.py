"""Check the opset of a model, and convert functions that are written in another one."""
from __future__ import annotations

from functools import cache

import onnx

from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.names import nodes_in

UNSAID_OPSET = 9        # opset of a domain without an opset_import
_DOMAINS = ("", "ai.onnx")      # names of ONNX's default domain
# Operators that a later opset redefined: another default, other shapes (slopes, scales) or types.
_REDEFINED = frozenset({"Dropout", "GroupNormalization", "PRelu", "RoiAlign"})


def check_opset(model: str, proto: onnx.ModelProto) -> None:
    """Raise ModelError for an opset below 1, or newer than the onnx package."""
    opset = opset_of(proto)
    if opset > onnx.defs.onnx_opset_version():
        raise ModelError(f"{model}: opset {opset} is newer than what the onnx package {onnx.__version__} here knows, "
                         f"{onnx.defs.onnx_opset_version()}; update onnx, or export the model in an older opset")
    if opset < 1:
        raise ModelError(f"{model}: opset {opset} does not exist")


def opset_of(proto: onnx.ModelProto) -> int:
    """Return the model's opset of ONNX's default domain."""
    return next((entry.version for entry in proto.opset_import if entry.domain in _DOMAINS), UNSAID_OPSET)


def with_functions_of_its_opset(model: str, proto: onnx.ModelProto) -> onnx.ModelProto:
    """Set the opset of all functions to the model's, in a copy if any differs.

    Raise ModelError for an operator in a function whose meaning differs between the two opsets.
    """
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
                        f"{model}: the function {function.domain}.{function.name} is written in opset {entry.version}, "
                        f"where {node.op_type} is another operator than in opset {opset}, the model's; export both in "
                        "one opset")
            entry.version = opset
    return copy


def _own(function: onnx.FunctionProto) -> list[onnx.OperatorSetIdProto]:
    return [entry for entry in function.opset_import if entry.domain in _DOMAINS]


@cache
def _means_the_same(op: str, one: int, other: int) -> bool:
    """Return True if a node of one opset is valid and has the same meaning in the other.

    The later version may allow more types and have more optional inputs and attributes.
    """
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
