"""The opset of a model: any that the onnx package here knows."""
from __future__ import annotations

import onnx

from engines.errors import ModelError

UNSAID_OPSET = 9        # of a domain that the file names none of


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
    return next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), UNSAID_OPSET)
