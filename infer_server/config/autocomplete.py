"""Completes a model's configuration from the loaded engine, and finds where the two contradict each other.

What config.pbtxt leaves out comes from the model, so that it may be left out wholly; the completed message is what
ModelConfig answers.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infer_server.backend import Engine, Tensor
from infer_server.config.config import nearest
from infer_server.errors import ModelConfigError
from infer_server.protocol.codec import FROM_CONFIG, FROM_ENGINE
from protos import model_config


def complete(message: model_config.ModelConfig, name: str, engine: Engine, filename: str,
             instances: int = 1) -> model_config.ModelConfig:
    """A completed copy of `message`, for a model in the folder `name`. Raises ModelConfigError.

    instances: of an instance group that says nothing of its count.
    """
    completed = model_config.ModelConfig()
    completed.CopyFrom(message)
    if completed.name not in ("", name):
        raise ModelConfigError(f"name: expected '{name}', the name of its folder, got '{completed.name}'")
    completed.name = name
    completed.backend = completed.backend or "infer_server"
    completed.platform = completed.platform or "infer_server_plan"
    completed.default_model_filename = completed.default_model_filename or filename

    _complete_max_batch_size(completed, engine)
    batched = completed.max_batch_size > 0
    _complete_tensors("input", completed.input, engine.inputs, batched)
    _complete_tensors("output", completed.output, engine.outputs, batched)

    if engine.dependence:
        # As in Triton without dynamic_batching: every request is a batch of its own.
        if completed.HasField("dynamic_batching"):
            raise ModelConfigError("dynamic_batching: requests cannot share a batch, for the items of this model's "
                                   f"batch depend on each other: {engine.dependence}; remove it")
    elif completed.max_batch_size > 1:
        # Batching is what the server is for, so it is on unless max_batch_size is 1; Triton wants to be asked.
        completed.dynamic_batching.SetInParent()
    if not completed.instance_group:
        completed.instance_group.add(name=name, kind=model_config.ModelInstanceGroup.KIND_CPU)
    if completed.dynamic_batching.preserve_ordering:
        instances = 1
    for group in completed.instance_group:
        group.count = group.count or instances
    if not completed.version_policy.WhichOneof("policy_choice"):
        completed.version_policy.latest.num_versions = 1
    return completed


def _complete_max_batch_size(completed: model_config.ModelConfig, engine: Engine) -> None:
    asked = completed.max_batch_size
    if asked > engine.max_batch:
        built_for = f"a batch of {engine.max_batch} at most" if engine.max_batch else "no batch axis"
        raise ModelConfigError(f"max_batch_size: {asked} asked for, but the engine was built for {built_for}; "
                               f"lower it, or rebuild with --max-batch {asked}")
    completed.max_batch_size = asked or engine.max_batch


def _complete_tensors(kind: str, given: Any, tensors: Sequence[Tensor], batched: bool) -> None:
    """Checks the tensors that the configuration gives and appends those that it leaves out."""
    declared = {tensor.name: tensor for tensor in tensors}
    for spec in given:
        tensor = declared.get(spec.name)
        if tensor is None:
            raise ModelConfigError(f"{kind} '{spec.name}': the model has {', '.join(declared)}."
                                   f"{nearest(spec.name, declared)}")
        expected, dims = _datatype(kind, tensor), _dims(kind, tensor, batched)
        if spec.data_type != expected:
            raise ModelConfigError(f"{kind} '{spec.name}': data_type is {_type_name(spec.data_type)}, "
                                   f"but the model's is {_type_name(expected)}")
        if not spec.dims:
            spec.dims.extend(dims)
        # -1 on either side leaves an extent open; the engine has the last word when it is executed.
        fits = len(spec.dims) == len(dims) and all(a == b or -1 in (a, b) for a, b in zip(spec.dims, dims, strict=True))
        if not fits:
            raise ModelConfigError(f"{kind} '{spec.name}': dims are {list(spec.dims)}, but the model's are {dims}"
                                   f"{' without its batch axis' if batched else ''}")
    present = {spec.name for spec in given}
    for tensor in tensors:
        if tensor.name not in present:
            given.add(name=tensor.name, data_type=_datatype(kind, tensor), dims=_dims(kind, tensor, batched))


def _dims(kind: str, tensor: Tensor, batched: bool) -> list[int]:
    if batched and isinstance(next(iter(tensor.shape), 0), int):
        raise ModelConfigError(f"{kind} '{tensor.name}' of shape {list(tensor.shape)} has no batch axis in front, as "
                               "other tensors of the model have: such a model is not served; export it with the batch "
                               "axis first on every input and output")
    extents = tensor.shape[1:] if batched else tensor.shape
    return [extent if isinstance(extent, int) else -1 for extent in extents]


def _datatype(kind: str, tensor: Tensor) -> int:
    if tensor.dtype not in FROM_ENGINE:
        raise ModelConfigError(f"{kind} '{tensor.name}': the protocol has no datatype for {tensor.dtype}")
    return FROM_ENGINE[tensor.dtype].config


def _type_name(data_type: int) -> str:
    return f"TYPE_{FROM_CONFIG[data_type].name}" if data_type in FROM_CONFIG else "missing"
