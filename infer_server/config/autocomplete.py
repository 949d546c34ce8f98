"""Completes a model's configuration from its engine, or from what is said of one, and finds where the two contradict
each other.

What config.pbtxt leaves out comes from the model, so that it may be left out wholly; the completed message is what
ModelConfig answers.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer_server.backend import BATCH, Described, Gpu, Tensor, is_mixed
from infer_server.config.config import complete_policy
from infer_server.config.groups import settle
from infer_server.config.kinds import complete_names
from infer_server.config.paths import check_name
from infer_server.config.pbtxt import nearest
from infer_server.config.ragged import Ragged, check_ragged, model_dims, ragged_of
from infer_server.config.sequences import sequences_of
from infer_server.errors import ModelConfigError
from infer_server.protocol.codec import FROM_CONFIG, FROM_ENGINE
from protos import model_config


def complete(message: model_config.ModelConfig, name: str, engine: Described, filename: str,
             instances: int = 1, gpus: Sequence[Gpu] = ()) -> model_config.ModelConfig:
    """A completed copy of `message`, for a model in the folder `name`. Raises ModelConfigError.

    instances: of an instance group on the CPU that says nothing of its count. gpus: of this machine, that may
    run the model.
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
    added, kept = (frozenset(sequences.added), set(sequences.kept)) if sequences else (frozenset[str](), set[str]())
    for kind, names, tensors in (("input", added, engine.inputs), ("output", kept, engine.outputs)):
        if missing := names - {tensor.name for tensor in tensors}:
            raise ModelConfigError(f"sequence_batching: the model has no {kind} '{min(missing)}', but "
                                   f"{', '.join(tensor.name for tensor in tensors)}")
    if ragged:
        added = _made_inputs(ragged, engine)
    _complete_tensors("input", completed.input, [each for each in engine.inputs if each.name not in added], axes,
                      _defaults_of(engine, completed))
    given = {spec.name for spec in completed.output}
    _complete_tensors("output", completed.output,
                      [each for each in engine.outputs if each.name not in kept - given], axes)
    if ragged:
        check_ragged(ragged, completed)
    if not whole:
        _complete_batching(completed, engine.dependence if not ragged else "")
    settle(completed, gpus, instances)
    complete_policy(completed)
    return completed


def takes_whole(engine: Described) -> bool:
    """Whether an engine has no batch of its own, as a program has none, and leaves the leading extent of every input
    open: if the configuration says that this is the batch, each request is executed by itself."""
    return not engine.max_batch and bool(engine.inputs) and all(
        tensor.shape and isinstance(tensor.shape[0], str) for tensor in engine.inputs)


def _complete_batching(completed: model_config.ModelConfig, dependence: str) -> None:
    """dependence: why requests must not share a batch; "": they may. Where they must not, every request is a batch of
    its own, as in Triton without dynamic_batching."""
    if completed.max_batch_size > 1 and not dependence and not completed.HasField("sequence_batching"):
        # Batching is what the server is for, so it is on unless max_batch_size is 1; Triton wants to be asked.
        completed.dynamic_batching.SetInParent()


@dataclass(frozen=True)
class _Axes:
    """Where the batch is: in the engine's tensors, and implied in those of the configuration."""
    engine: bool
    implied: bool
    mixed: bool                             # ... where not all tensors of the engine have it in front
    flat: frozenset[str] = frozenset()      # tensors that have it nowhere: requests lie one behind the other

    def dims(self, kind: str, tensor: Tensor) -> list[int]:
        """The extents of an engine's tensor, as a configuration has them."""
        if self.mixed and next(iter(tensor.shape), 0) != BATCH:
            raise ModelConfigError(f"max_batch_size: {kind} '{tensor.name}' of shape {list(tensor.shape)} has no batch "
                                   "axis in front, as other tensors of the model have; write max_batch_size: 0 and "
                                   "whole shapes, or export the model with the batch axis first everywhere")
        extents = tensor.shape[1:] if self.implied else tensor.shape
        return [extent if isinstance(extent, int) else -1 for extent in extents]


def _flat(ragged: Ragged | None) -> frozenset[str]:
    return ragged.inputs | frozenset(ragged.scattered) if ragged else frozenset()


def _made_inputs(ragged: Ragged, engine: Described) -> frozenset[str]:
    """The inputs of the engine that are made of the requests' shapes. Raises ModelConfigError: it has no such."""
    tensors = {tensor.name: tensor for tensor in engine.inputs}
    for made in ragged.made:
        for name in made.names:
            if name not in tensors:
                raise ModelConfigError(f"batch_input: target_name '{name}': the model has the inputs "
                                       f"{', '.join(tensors)}.{nearest(name, tensors)}")
            if (expected := _datatype("input", tensors[name])) != made.datatype.config:
                raise ModelConfigError(f"batch_input '{name}': data_type is TYPE_{made.datatype.name}, but the model's "
                                       f"is {_type_name(expected)}")
    return ragged.names


def _complete_max_batch_size(completed: model_config.ModelConfig, engine: Described, ragged: Ragged | None) -> None:
    """0 is given or found in dims that are whole shapes; the batch is then an axis as any other."""
    asked = completed.max_batch_size
    if ragged:
        ragged.check_sources([tensor.name for tensor in engine.inputs])
        if engine.max_batch:
            flat = sorted(ragged.inputs or {source for _, source in ragged.sources})
            raise ModelConfigError("allow_ragged_batch: the plan was built with a batch of its own; rebuild it with "
                                   f"{' '.join(f'--ragged {name}' for name in flat)}")
        completed.max_batch_size = asked        # 0 is said, too
        return
    if asked > engine.max_batch and (completed.HasField("sequence_batching") or not takes_whole(engine)):
        built_for = f"a batch of {engine.max_batch} at most" if engine.max_batch else "no batch axis"
        raise ModelConfigError(f"max_batch_size: {asked} asked for, but the engine was built for {built_for}; "
                               f"lower it, or rebuild with --max-batch {asked}")
    if not completed.HasField("max_batch_size"):
        completed.max_batch_size = 0 if is_mixed(engine) or _are_whole(completed, engine) else engine.max_batch


def _are_whole(completed: model_config.ModelConfig, engine: Described) -> bool:
    """Whether dims have as many extents as the model's tensors, the batch among them."""
    ranks = {tensor.name: len(tensor.shape) for tensor in (*engine.inputs, *engine.outputs)}
    specs: list[Any] = [*completed.input, *completed.output]
    return any(model_dims(spec) and len(model_dims(spec)) == ranks.get(spec.name) for spec in specs)


def _defaults_of(engine: Described, completed: model_config.ModelConfig) -> Collection[str]:
    """The inputs that a request may leave out. Raises ModelConfigError: one that must not."""
    values: Mapping[str, Any] = engine.metadata.get("defaults", {})
    if missing := [spec.name for spec in completed.input if spec.optional and spec.name not in values]:
        raise ModelConfigError(f"input '{missing[0]}': optional, but the plan has no value for it; rebuild it with "
                               f"--optional {missing[0]}, of an ONNX file that has an initialiser of that name, or "
                               "send it always and remove `optional`")
    return values


def _complete_tensors(kind: str, given: Any, tensors: Sequence[Tensor], axes: _Axes,
                      optional: Collection[str] = ()) -> None:
    """Checks the tensors that the configuration gives and appends those that it leaves out."""
    declared = {tensor.name: tensor for tensor in tensors}
    for spec in given:
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
        # -1 on either side leaves an extent open; the engine has the last word when it is executed.
        asked = model_dims(spec)
        if len(asked) != len(dims) or not all(a == b or -1 in (a, b) for a, b in zip(asked, dims, strict=True)):
            raise ModelConfigError(_wrong_dims(kind, spec, asked, dims, axes))
    present = {spec.name for spec in given}
    for tensor in tensors:
        if tensor.name not in present:
            given.add(name=tensor.name, data_type=_datatype(kind, tensor), dims=axes.dims(kind, tensor))
            if tensor.name in optional:
                given[-1].optional = True


def _check_flat(kind: str, spec: Any, tensor: Tensor) -> None:
    """dims of what is ragged are the requests', and the model need not have them."""
    if kind == "input" and (len(tensor.shape) != 1 or isinstance(tensor.shape[0], int)):
        raise ModelConfigError(f"input '{spec.name}': allow_ragged_batch, but the model's is of shape "
                               f"{list(tensor.shape)}; export it to take [-1], what all requests have one behind the "
                               "other, or remove allow_ragged_batch")
    if not spec.dims and not spec.HasField("reshape"):
        spec.dims.append(-1)


def _wrong_dims(kind: str, spec: Any, asked: list[int], dims: list[int], axes: _Axes) -> str:
    which = "reshape" if spec.HasField("reshape") else "dims"
    said = f"{kind} '{spec.name}': {which} are {asked}, but the model's are {dims}"
    if axes.implied:
        return f"{said} without its batch axis"
    if axes.engine and len(asked) == len(dims) - 1:
        return f"{said}, for with max_batch_size 0 they are whole; write dims: {[-1, *asked]}, or a max_batch_size"
    return f"{said}; write dims: {dims}"


def _datatype(kind: str, tensor: Tensor) -> int:
    if tensor.dtype not in FROM_ENGINE:
        raise ModelConfigError(f"{kind} '{tensor.name}': the protocol has no datatype for {tensor.dtype}")
    return FROM_ENGINE[tensor.dtype].config


def _type_name(data_type: int) -> str:
    return f"TYPE_{FROM_CONFIG[data_type].name}" if data_type in FROM_CONFIG else "missing"
