"""Functions of triton_python_backend_utils that read and complete a model's configuration."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.protocol.codec import FROM_CONFIG
from infer_server.protos import model_config
from infer_server.python_backend.channel import datatype_of


class ModelConfig:
    """Configuration that a model's auto_complete_config completes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._model_config = config             # Triton's attribute name, which models access

    def as_dict(self) -> dict[str, Any]:
        return self._model_config

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        self._add("input", tensor, ("optional",))

    def add_output(self, tensor: Mapping[str, Any]) -> None:
        self._add("output", tensor, ())

    def set_max_batch_size(self, size: int) -> None:
        if (configured := self._model_config.get("max_batch_size", 0)) > size:
            raise ValueError(f"max_batch_size: config.pbtxt says {configured}, but auto_complete_config {size}")
        self._model_config["max_batch_size"] = size

    def set_dynamic_batching(self) -> None:
        if excluding := {"sequence_batching", "ensemble_scheduling"} & self._model_config.keys():
            raise ValueError(f"dynamic_batching: config.pbtxt says {excluding.pop()}, which excludes it")
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: Mapping[str, Any]) -> None:
        _merge("model_transaction_policy", self._model_config.setdefault("model_transaction_policy", {}), policy,
               ("decoupled",))

    def _add(self, kind: str, tensor: Mapping[str, Any], more: Sequence[str]) -> None:
        """Add a tensor, or the fields of it that config.pbtxt leaves open."""
        needed = ("name", "data_type", "dims")
        if missing := [key for key in needed if key not in tensor]:
            raise ValueError(f"{kind} '{tensor.get('name', '')}' in auto_complete_config has no {missing[0]}")
        tensors = self._model_config.setdefault(kind, [])
        configured = next((configured for configured in tensors if configured["name"] == tensor["name"]), None)
        if configured is None:
            tensors.append(configured := {})
        _merge(f"{kind} '{tensor['name']}'", configured, tensor, (*needed, *more))


def _merge(label: str, fields: dict[str, Any], more: Mapping[str, Any], known: Sequence[str]) -> None:
    """Add a model's fields to those of config.pbtxt. Raises ValueError if they differ or a field is unknown."""
    for key, value in more.items():
        if key not in known:
            raise ValueError(f"{label} in auto_complete_config has '{key}'; expected {', '.join(known)}")
        if fields.get(key) not in (None, [], "TYPE_INVALID", value):
            raise ValueError(f"{label}: {key}: config.pbtxt says {fields[key]}, but auto_complete_config {value}")
        fields[key] = value


def get_input_config_by_name(config: Mapping[str, Any], name: str) -> Any:
    return next((tensor for tensor in config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(config: Mapping[str, Any], name: str) -> Any:
    return next((tensor for tensor in config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(config: Mapping[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_to_numpy_type(data_type: int) -> Any:
    datatype = FROM_CONFIG[data_type]
    return np.bool_ if datatype.name == "BOOL" else datatype.array.type


def numpy_to_triton_type(data_type: Any) -> int:
    return datatype_of(np.empty(0, data_type)).config


# Datatypes with a NumPy equivalent: BF16 has none and is passed as its bits.
TRITON_STRING_TO_NUMPY = {model_config.DataType.Name(number): triton_to_numpy_type(number)
                          for number, datatype in FROM_CONFIG.items() if datatype.name != "BF16"}


def triton_string_to_numpy(name: str) -> Any:
    return triton_to_numpy_type(model_config.DataType.Value(name))
