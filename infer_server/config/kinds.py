"""Kinds of models, by the platform or backend that the configuration names."""
from __future__ import annotations

from enum import Enum

from infer_server.config.pbtxt import nearest
from infer_server.errors import ModelConfigError
from infer_server.protos import model_config


class ModelKind(Enum):
    """Kind of a model: the component that executes it."""
    ENGINE = "infer_server"         # a plan, or an ONNX file from which one is built
    PYTHON = "python"               # a model.py, in a separate process
    ENSEMBLE = "ensemble"           # steps through other models


# Kinds by name of the platform or backend; includes Triton's names for ONNX files and plans.

_NAMES = {
    "infer_server": ModelKind.ENGINE, "infer_server_plan": ModelKind.ENGINE,
    "onnxruntime": ModelKind.ENGINE, "onnxruntime_onnx": ModelKind.ENGINE,
    "openvino": ModelKind.ENGINE,        # OpenVINO also reads ONNX files
    "tensorrt": ModelKind.ENGINE, "tensorrt_plan": ModelKind.ENGINE,
    "python": ModelKind.PYTHON, "ensemble": ModelKind.ENSEMBLE,
}
_PLATFORMS = {"infer_server": "infer_server_plan", "onnxruntime": "onnxruntime_onnx", "tensorrt": "tensorrt_plan"}
_ONNX = 'export the model to ONNX as model.onnx, and write backend: "onnxruntime"'
_PYTHON = 'write it as a Python model, model.py, and backend: "python"'
_REMEDIES = {
    "tensorflow": _ONNX, "tensorflow_graphdef": _ONNX, "tensorflow_savedmodel": _ONNX, "pytorch": _ONNX,
    "pytorch_libtorch": _ONNX, "fil": _ONNX, "dali": _PYTHON, "vllm": _PYTHON, "tensorrtllm": _PYTHON,
}


def kind_of(message: model_config.ModelConfig) -> ModelKind:
    """Return the kind of a model; an engine if no platform or backend is named. Raises ModelConfigError."""
    for field in ("backend", "platform"):
        name: str = getattr(message, field)
        if name and name not in _NAMES:
            remedy = _REMEDIES.get(name, f"served are {', '.join(_NAMES)}.{nearest(name, _NAMES)} Or {_ONNX}")
            raise ModelConfigError(f"{field}: '{name}' is not served: {remedy}")
    if message.HasField("ensemble_scheduling"):
        for field in ("backend", "platform"):
            if (name := getattr(message, field)) not in ("", "ensemble"):
                raise ModelConfigError(f"{field}: '{name}' executes a model, not an ensemble_scheduling; write "
                                       'platform: "ensemble" alone, or remove the steps')
        return ModelKind.ENSEMBLE
    kind = _NAMES.get(message.backend or message.platform, ModelKind.ENGINE)
    if kind is ModelKind.ENSEMBLE:
        raise ModelConfigError("ensemble_scheduling: an ensemble needs its steps; give ensemble_scheduling { step { "
                               "model_name: ... } }")
    return kind


def complete_names(message: model_config.ModelConfig) -> None:
    """Complete platform and backend from each other, or with this server's name if both are missing."""
    if not message.platform:
        message.backend = message.backend or ModelKind.ENGINE.value
        message.platform = _PLATFORMS.get(message.backend, "")
    elif not message.backend:
        message.backend = next((name for name, platform in _PLATFORMS.items() if platform == message.platform), "")
