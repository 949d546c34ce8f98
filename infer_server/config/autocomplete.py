"""Complete a model's configuration from its engine, or from a description of it, and report contradictions.

Everything may be left out of config.pbtxt that follows from the model. The completed message is what ModelConfig
returns.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer_server.backend import BATCH, Described, GpuDevice, TensorInfo, is_mixed
from infer_server.config.config import complete_policy
from infer_server.config.groups import settle
from infer_server.config.kinds import complete_names
from infer_server.config.paths import check_name
from infer_server.config.pbtxt import nearest
from infer_server.config.ragged import Ragged, check_ragged, model_dims, ragged_of
from infer_server.config.sequences import sequences_of
from infer_server.errors import ModelConfigError
from infer_server.protocol.codec import FROM_CONFIG, FROM_ENGINE
from infer_server.protos import model_config


def complete(message: model_config.ModelConfig, name: str, engine: Described, filename: str,
             instances: int = 1, gpus: Sequence[GpuDevice] = ()) -> model_config.ModelConfig:
    """Return a completed copy of a configuration. Raises ModelConfigError if it contradicts the engine.

    `name` is that of the model's folder, `filename` the default of default_model_filename, `instances` the default
    count of a group on the CPU, and `gpus` the GPUs that may run the model.
    """
    completed = model_config.ModelConfig()
    completed.CopyFrom(message)
    check_name(completed.name, name)
    completed.name = name
    complete_names(completed)
    completed.default_model_filename = completed.default_model_filename or filename

    ragged = ragged_of(completed)
    _complete_max_batch_size(completed, engine, ragged)
    implied = completed.max_batch_size > 0
    whole = implied and not ragged and takes_whole(engine)
    axes = _Axes(engine.max_batch > 0 or whole or bool(ragged and implied), implied, implied and is_mixed(engine),
                 _flat(ragged))
    sequences = sequences_of(completed)
    added = frozenset(sequences.added) if sequences else frozenset[str]()
    states = set(sequences.state_outputs) if sequences else set[str]()
    for kind, names, tensors in (("input", added, engine.inputs), ("output", states, engine.outputs)):
        if missing := names - {tensor.name for tensor in tensors}:
            raise ModelConfigError(f"sequence_batching: the model has no {kind} '{min(missing)}', but "
                                   f"{', '.join(tensor.name for tensor in tensors)}")
    if ragged:
        added = _computed_inputs(ragged, engine)
    _complete_tensors("input", completed.input, [each for each in engine.inputs if each.name not in added], axes,
                      _defaults_of(engine, completed))
    configured = {spec.name for spec in completed.output}
    _complete_tensors("output", completed.output,
                      [each for each in engine.outputs if each.name not in states - configured], axes)
    if ragged:
        check_ragged(ragged, completed)
    if not whole:
        _complete_batching(completed, engine.dependence if not ragged else "")
    settle(completed, gpus, instances)
    complete_policy(completed)
    return completed


def takes_whole(engine: Described) -> bool:
    """Return True if an engine has no batch axis, but an open leading extent in every input, as a program has.

    If max_batch_size says that this is the batch, each request is executed by itself.
    """
    return not engine.max_batch and bool(engine.inputs) and all(
        tensor.shape and isinstance(tensor.shape[0], str) for tensor in engine.inputs)


def _complete_batching(completed: model_config.ModelConfig, dependence: str) -> None:
    """Enable dynamic batching unless the items of a batch depend on each other, for the reason `dependence`."""
    if completed.max_batch_size > 1 and not dependence and not completed.HasField("sequence_batching"):
        # Unlike in Triton, dynamic batching is on by default unless max_batch_size is 1.
        completed.dynamic_batching.SetInParent()


@dataclass(frozen=True)
class _Axes:
    """Location of the batch axis in the engine's tensors and in the configuration's dims."""
    engine: bool                            # True if the engine has a batch axis
    implied: bool                           # True if the dims omit the batch axis
    mixed: bool                             # True if not all tensors of the engine have a leading batch axis
    flat: frozenset[str] = frozenset()      # tensors without a batch axis, in which requests are concatenated

    def dims(self, kind: str, tensor: TensorInfo) -> list[int]:
        """Return the dims of an engine's tensor as a configuration writes them."""
        if self.mixed and next(iter(tensor.shape), 0) != BATCH:
            raise ModelConfigError(f"max_batch_size: {kind} '{tensor.name}' of shape {list(tensor.shape)} has no batch "
                                   "axis in front, as other tensors of the model have; write max_batch_size: 0 and "
                                   "whole shapes, or export the model with the batch axis first everywhere")
        extents = tensor.shape[1:] if self.implied else tensor.shape
        return [extent if isinstance(extent, int) else -1 for extent in extents]


def _flat(ragged: Ragged | None) -> frozenset[str]:
    return ragged.inputs | frozenset(ragged.scattered) if ragged else frozenset()


def _computed_inputs(ragged: Ragged, engine: Described) -> frozenset[str]:
    """Return the engine's inputs that the server computes from shapes. Raises ModelConfigError if one is missing."""
    tensors = {tensor.name: tensor for tensor in engine.inputs}
    for computed in ragged.computed:
        for name in computed.names:
            if name not in tensors:
                raise ModelConfigError(f"batch_input: target_name '{name}': the model has the inputs "
                                       f"{', '.join(tensors)}.{nearest(name, tensors)}")
            if (expected := _datatype("input", tensors[name])) != computed.datatype.config:
                raise ModelConfigError(f"batch_input '{name}': data_type is TYPE_{computed.datatype.name}, but the "
                                       f"model's is {_type_name(expected)}")
    return ragged.names


def _complete_max_batch_size(completed: model_config.ModelConfig, engine: Described, ragged: Ragged | None) -> None:
    """Complete max_batch_size; it is 0 if the dims include the batch axis, which is then an axis like any other."""
    requested = completed.max_batch_size
    if ragged:
        ragged.check_sources([tensor.name for tensor in engine.inputs])
        if engine.max_batch:
            flat = sorted(ragged.inputs or {source for _, source in ragged.sources})
            raise ModelConfigError("allow_ragged_batch: the plan was built with a batch of its own; rebuild it with "
                                   f"{' '.join(f'--ragged {name}' for name in flat)}")
        completed.max_batch_size = requested    # makes the field present even if it is 0
        return
    if requested > engine.max_batch and (completed.HasField("sequence_batching") or not takes_whole(engine)):
        built_for = f"a batch of {engine.max_batch} at most" if engine.max_batch else "no batch axis"
        raise ModelConfigError(f"max_batch_size: {requested} requested, but the engine was built for {built_for}; "
                               f"lower it, or rebuild with --max-batch {requested}")
    if not completed.HasField("max_batch_size"):
        completed.max_batch_size = 0 if is_mixed(engine) or _are_whole(completed, engine) else engine.max_batch


def _are_whole(completed: model_config.ModelConfig, engine: Described) -> bool:
    """Return True if the dims have the rank of the model's tensors, that is, include the batch axis."""
    ranks = {tensor.name: len(tensor.shape) for tensor in (*engine.inputs, *engine.outputs)}
    specs: list[Any] = [*completed.input, *completed.output]
    return any(model_dims(spec) and len(model_dims(spec)) == ranks.get(spec.name) for spec in specs)


def _defaults_of(engine: Described, completed: model_config.ModelConfig) -> Collection[str]:
    """Return the inputs that have default values. Raises ModelConfigError if an optional one has none."""
    values: Mapping[str, Any] = engine.metadata.get("defaults", {})
    if missing := [spec.name for spec in completed.input if spec.optional and spec.name not in values]:
        raise ModelConfigError(f"input '{missing[0]}': optional, but the plan has no value for it; rebuild it with "
                               f"--optional {missing[0]}, of an ONNX file that has an initialiser of that name, or "
                               "send it always and remove `optional`")
    return values


def _complete_tensors(kind: str, specs: Any, tensors: Sequence[TensorInfo], axes: _Axes,
                      optional: Collection[str] = ()) -> None:
    """Check the tensors of the configuration and append those that it omits."""
    declared = {tensor.name: tensor for tensor in tensors}
    for spec in specs:
        tensor = declared.get(spec.name)
        if tensor is None:
            raise ModelConfigError(f"{kind} '{spec.name}': the model has {', '.join(declared)}."
                                   f"{nearest(spec.name, declared)}")
        expected = _datatype(kind, tensor)
        if spec.data_type != expected:
            raise ModelConfigError(f"{kind} '{spec.name}': data_type is {_type_name(spec.data_type)}, "
                                   f"but the model's is {_type_name(expected)}")
        if spec.name in axes.flat:
            _check_flat(kind, spec, tensor)
            continue
        dims = axes.dims(kind, tensor)
        if not spec.dims and not spec.HasField("reshape"):
            spec.dims.extend(dims)
        # -1 on either side leaves an extent open; the engine checks it when it executes.
        configured_dims = model_dims(spec)
        if len(configured_dims) != len(dims) or not all(
                a == b or -1 in (a, b) for a, b in zip(configured_dims, dims, strict=True)):
            raise ModelConfigError(_wrong_dims(kind, spec, configured_dims, dims, axes))
    present = {spec.name for spec in specs}
    for tensor in tensors:
        if tensor.name not in present:
            specs.add(name=tensor.name, data_type=_datatype(kind, tensor), dims=axes.dims(kind, tensor))
            if tensor.name in optional:
                specs[-1].optional = True


def _check_flat(kind: str, spec: Any, tensor: TensorInfo) -> None:
    """Check a ragged tensor; its dims are those of requests, which the model need not have."""
    if kind == "input" and (len(tensor.shape) != 1 or isinstance(tensor.shape[0], int)):
        raise ModelConfigError(f"input '{spec.name}': allow_ragged_batch, but the model's is of shape "
                               f"{list(tensor.shape)}; export it to take [-1], the concatenated elements of all "
                               "requests, or remove allow_ragged_batch")
    if not spec.dims and not spec.HasField("reshape"):
        spec.dims.append(-1)


def _wrong_dims(kind: str, spec: Any, extents: list[int], dims: list[int], axes: _Axes) -> str:
    which = "reshape" if spec.HasField("reshape") else "dims"
    problem = f"{kind} '{spec.name}': {which} are {extents}, but the model's are {dims}"
    if axes.implied:
        return f"{problem} without its batch axis"
    if axes.engine and len(extents) == len(dims) - 1:
        return (f"{problem}, because with max_batch_size 0 they include the batch axis; write dims: {[-1, *extents]}, "
                "or a max_batch_size")
    return f"{problem}; write dims: {dims}"


def _datatype(kind: str, tensor: TensorInfo) -> int:
    if tensor.dtype not in FROM_ENGINE:
        raise ModelConfigError(f"{kind} '{tensor.name}': the protocol has no datatype for {tensor.dtype}")
    return FROM_ENGINE[tensor.dtype].config


def _type_name(data_type: int) -> str:
    return f"TYPE_{FROM_CONFIG[data_type].name}" if data_type in FROM_CONFIG else "missing"
