"""What a model.py reads of its configuration, and how it completes it: a part of triton_python_backend_utils."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from infer_server.protocol.codec import FROM_CONFIG
from infer_server.python_backend.channel import datatype_of
from protos import model_config


class ModelConfig:
    """What auto_complete_config completes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        self._add("input", tensor)

    def add_output(self, tensor: Mapping[str, Any]) -> None:
        self._add("output", tensor)

    def set_max_batch_size(self, size: int) -> None:
        self._config["max_batch_size"] = size

    def set_dynamic_batching(self) -> None:
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: Mapping[str, Any]) -> None:
        self._config["model_transaction_policy"] = dict(policy)

    def _add(self, kind: str, tensor: Mapping[str, Any]) -> None:
        tensors = self._config.setdefault(kind, [])
        if tensor["name"] not in [given["name"] for given in tensors]:
            tensors.append(dict(tensor))


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


def triton_string_to_numpy(name: str) -> Any:
    return triton_to_numpy_type(model_config.DataType.Value(name))
