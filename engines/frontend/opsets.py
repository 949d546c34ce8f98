"""Models of older opsets, brought to one that this compiler reads by onnx's own converter."""
from __future__ import annotations

import math

import onnx
from onnx import version_converter

from engines.errors import ModelError

OLDEST_OPSET = 9            # that engines.frontend.operators.normalise reads
OLDEST_CONVERTED = 6        # tests/onnx shows that onnx's converter brings these over; older ones change more


def current(model: str, proto: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """The model in an opset from OLDEST_OPSET on, and what the user should know of that ("": it was in one).

    Raises ModelError: an opset that onnx cannot convert, or newer than the onnx package.
    """
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), None)
    if opset is None or OLDEST_OPSET <= opset <= onnx.defs.onnx_opset_version():
        return proto, ""
    if opset > OLDEST_OPSET:
        raise ModelError(f"{model}: opset {opset} is newer than what the onnx package {onnx.__version__} here knows, "
                         f"{onnx.defs.onnx_opset_version()}; update onnx, or export the model in an older opset")
    if opset < OLDEST_CONVERTED:
        raise ModelError(f"{model}: opset {opset} is older than {OLDEST_CONVERTED}, the oldest that can be converted; "
                         f"export the model again in opset {OLDEST_OPSET} or later")
    if opset < 7:
        _refuse_per_channel(model, proto.graph)
    return _converted(model, proto, opset), f"{model}: opset {opset} was converted to {OLDEST_OPSET} by onnx"


def _refuse_per_channel(model: str, graph: onnx.GraphProto) -> None:
    """Before opset 7 the slopes of a PRelu are those of channels; the converter leaves them to meet the last axis."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "PRelu" and sizes.get(node.input[1]) != 1:
            raise ModelError(f"{model}: node '{node.name or node.output[0]}' (PRelu): slopes of channels in opset 6 "
                             f"are not converted; export the model again in opset {OLDEST_OPSET} or later")


def _converted(model: str, proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    try:
        return version_converter.convert_version(proto, OLDEST_OPSET)
    except Exception as error:      # the converter is C++: what it raises has no common class
        raise ModelError(f"{model}: opset {opset} could not be converted to {OLDEST_OPSET} by onnx: {error}; export "
                         f"the model again in opset {OLDEST_OPSET} or later") from error
