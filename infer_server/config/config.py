"""Serving configuration of a model: frozen settings, parsed strictly from the message of a config.pbtxt.

The table in fields.py decides which fields are refused, and which are kept and reported.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from infer_server.batching.policy import BatchPolicy, Priorities, QueuePolicy
from infer_server.config.build import BuildOptions, build_options
from infer_server.config.fields import (
    MAX_INSTANCES,
    MAX_PROCESSES,
    Finding,
    Verdict,
    check_limits,
    check_threads,
    findings,
)
from infer_server.config.groups import RateLimit, devices, rate_limits_of, requests_gpu
from infer_server.config.kinds import ModelKind, kind_of
from infer_server.config.ragged import Ragged, ragged_of
from infer_server.config.sequences import SequenceConfig, sequences_of
from infer_server.config.steps import EnsembleStep, steps_of
from infer_server.errors import ModelConfigError
from infer_server.protocol.codec import FROM_CONFIG, Datatype
from infer_server.protos import model_config


@dataclass(frozen=True)
class TensorSpec:
    """Input or output of a model as clients see it."""
    name: str
    datatype: Datatype
    dims: tuple[int, ...]                   # without the batch axis if the model is batched; -1 is any extent
    reshape: tuple[int, ...] | None = None  # dims in the model, without the batch axis; None if they are equal
    is_optional: bool = False               # True if requests may omit it
    is_ragged: bool = False                 # True if requests of unequal shapes may share a batch
    labels: str = ""                        # file with class labels, one on each line, in the model's folder

    @cached_property
    def item_bytes(self) -> int:
        """Size of one item in bytes; 0 if it is not fixed."""
        return 0 if -1 in self.dims or self.datatype.array.hasobject else (
            math.prod(self.dims) * self.datatype.array.itemsize)

    @property
    def in_model(self) -> TensorSpec:
        """Tensor with the dims that it has in the model."""
        return self if self.reshape is None else replace(self, dims=self.reshape, reshape=None)

    def reshaped(self, item: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the model of an item of an input; open extents keep their order."""
        if self.reshape is None:
            return item
        rest = iter([extent for extent, dim in zip(item, self.dims, strict=True) if dim == -1])
        return tuple(next(rest) if extent == -1 else extent for extent in self.reshape)

    def restored(self, item: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape for clients of an item of an output with the given shape in the model."""
        if self.reshape is None:
            return item
        rest = iter([extent for extent, dim in zip(item, self.reshape, strict=True) if dim == -1])
        return tuple(next(rest) if dim == -1 else dim for dim in self.dims)

    def describe(self, batched: bool) -> str:
        return f"{self.name} {self.datatype.name} {list(self.full_shape(batched))}"

    def full_shape(self, batched: bool) -> tuple[int, ...]:
        return (-1, *self.dims) if batched else self.dims


@dataclass(frozen=True)
class VersionPolicy:
    """Version policy: selects the versions that are served."""
    latest: int = 1                         # number of highest versions; 0 selects those of `specific`
    specific: tuple[int, ...] = ()          # version numbers; all versions if empty and latest=0

    def choose(self, available: Iterable[int]) -> list[int]:
        """Return the versions to serve, highest first. Raises ModelConfigError if no specific version exists."""
        versions = sorted(available, reverse=True)
        if self.latest:
            return versions[:self.latest]
        chosen = [version for version in versions if version in self.specific] if self.specific else versions
        if not chosen:
            raise ModelConfigError(f"version_policy: versions {sorted(self.specific)} do not exist; the folder has "
                                   f"{sorted(versions)}")
        return chosen


@dataclass(frozen=True)
class ModelConfig:
    """Serving configuration of a model."""
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batching: BatchPolicy
    queueing: Priorities
    batched: bool                           # True if tensors have a leading batch axis
    devices: tuple[int | None, ...] = (None,)   # GPU number of each instance; None is the CPU
    rate_limits: tuple[RateLimit, ...] = ()     # rate limit of each instance; empty if there are none
    versions: VersionPolicy = VersionPolicy()
    build: BuildOptions = BuildOptions()
    default_filename: str = ""              # default_model_filename, relative to the version's folder; "" if not set
    kind: ModelKind = ModelKind.ENGINE
    parameters: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[EnsembleStep, ...] = ()            # steps of an ensemble
    max_inflight: int = 0                   # max_inflight_requests of an ensemble; 0 for no limit
    sequences: SequenceConfig | None = None
    ragged: Ragged | None = None            # set if requests are concatenated in one tensor
    cached: bool = False                    # True if responses are cached
    decoupled: bool = False                 # True if a request may have any number of responses
    requests_gpu: bool = field(default=False, compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)     # notices about fields that differ from Triton

    @property
    def instances(self) -> int:
        return len(self.devices)


# Fields that an ensemble cannot have, because it executes nothing itself.
_NOT_OF_ENSEMBLES = ("instance_group", "model_warmup")
# Fields that are refused for engines only.
_ENGINE_ONLY = ("sequence_batching.iterative_sequence",)
_ENVIRONMENT = "EXECUTION_ENV_PATH"         # parameter with a packed Python environment


def from_message(message: model_config.ModelConfig, folder: Path | None = None,
                 is_complete: bool = True) -> ModelConfig:
    """Parse a configuration; omitted inputs and outputs stay omitted.

    Initial states are read from `folder`, if given. Before auto-completion (not `is_complete`), tensors of a Python
    model without a data_type are omitted. Raises ModelConfigError with the invalid field, or with all refused ones.
    """
    check_limits(message)
    kind = kind_of(message)
    may_be_open = kind is ModelKind.PYTHON and not is_complete
    notices = _findings(message, kind)
    build, of_build = build_options(message) if kind is ModelKind.ENGINE else (BuildOptions(), [])
    dynamic = message.dynamic_batching
    batching = BatchPolicy(
        max_batch_size=max(1, message.max_batch_size),
        merges=message.HasField("dynamic_batching") and message.max_batch_size != 0,
        preferred_batch_sizes=frozenset(dynamic.preferred_batch_size),
        max_queue_delay_us=dynamic.max_queue_delay_microseconds)
    if message.max_batch_size < 0:
        raise ModelConfigError(f"max_batch_size: expected 0 or more, got {message.max_batch_size}")
    for size in sorted(batching.preferred_batch_sizes):     # max_batch_size may be open before it is completed
        if size < 1 or (message.max_batch_size and size > message.max_batch_size):
            raise ModelConfigError(f"preferred_batch_size: {size} is not within 1..{batching.max_batch_size}, "
                                   "the max_batch_size")
    instances = _devices(message, MAX_PROCESSES if kind is ModelKind.PYTHON else MAX_INSTANCES)
    check_threads(len(instances), int(build.threads or 1))
    sequences = _sequences(message, folder, kind, build)
    return ModelConfig(
        name=message.name,
        inputs=_tensors("input", message.input, may_be_open),
        outputs=_tensors("output", message.output, may_be_open),
        batching=batching,
        queueing=_priorities(dynamic),
        kind=kind,
        decoupled=message.model_transaction_policy.decoupled,
        parameters={name: parameter.string_value for name, parameter in message.parameters.items()},
        steps=steps_of(message),
        max_inflight=message.ensemble_scheduling.max_inflight_requests,
        sequences=sequences,
        ragged=ragged_of(message) if kind is ModelKind.ENGINE else None,
        cached=_is_cached(message),
        batched=message.max_batch_size > 0,
        devices=instances,
        rate_limits=rate_limits_of(message),
        versions=_version_policy(message.version_policy),
        build=build,
        default_filename=_filename(message.default_model_filename),
        requests_gpu=requests_gpu(message),
        notices=(*(str(each) for each in notices if not _is_plain(each.path, kind)), *of_build,
                 *_notices(message, kind)))


def _sequences(message: model_config.ModelConfig, folder: Path | None, kind: ModelKind,
               build: BuildOptions) -> SequenceConfig | None:
    """Parse sequence batching; raises ModelConfigError for states that grow in place of a model without an engine."""
    grows = any(state.use_growable_memory for state in message.sequence_batching.state)
    if grows and kind is not ModelKind.ENGINE:
        raise ModelConfigError("sequence_batching.state.use_growable_memory: only an engine's states grow in place; "
                               "remove it")
    if build.state_capacity and not grows:
        raise ModelConfigError("parameter state_capacity: no state of sequence_batching has use_growable_memory: true; "
                               "write that, or remove the parameter")
    return sequences_of(message, folder)


def _priorities(dynamic: model_config.ModelDynamicBatching) -> Priorities:
    levels, default = dynamic.priority_levels or 1, dynamic.default_priority_level
    if dynamic.priority_levels and not 1 <= default <= levels:
        raise ModelConfigError(f"default_priority_level: {default} is not within 1..{levels}, the priority_levels; "
                               f"write default_priority_level: {levels}")
    if unknown := sorted(set(dynamic.priority_queue_policy) - set(range(1, levels + 1))):
        raise ModelConfigError(f"priority_queue_policy: there is no level {unknown[0]} of the {levels} priority_levels")
    if dynamic.preserve_ordering and levels > 1:
        raise ModelConfigError(f"preserve_ordering: {levels} priority_levels change the order; write one, or leave the "
                               "order open")
    policies = dynamic.default_queue_policy, *dynamic.priority_queue_policy.values()
    if dynamic.preserve_ordering and any(_queue_policy(policy).delay_expired for policy in policies):
        raise ModelConfigError("preserve_ordering: timeout_action DELAY changes the order; write REJECT, or leave the "
                               "order open")
    return Priorities(tuple(
        _queue_policy(dynamic.priority_queue_policy.get(level, dynamic.default_queue_policy))
        for level in range(1, levels + 1)), default or 1)


def _findings(message: model_config.ModelConfig, kind: ModelKind) -> list[Finding]:
    """Return the fields that are not served exactly as written. Raises ModelConfigError for refused ones."""
    result = [each for each in findings(message) if each.path not in _ENGINE_ONLY or kind is ModelKind.ENGINE]
    if kind is ModelKind.ENSEMBLE and (unsupported := [name for name in _NOT_OF_ENSEMBLES if getattr(message, name)]):
        raise ModelConfigError(f"{unsupported[0]}: an ensemble executes nothing itself; give it to the models of its "
                               "steps")
    if refused := [str(each) for each in result if each.treatment.verdict is Verdict.REFUSED]:
        raise ModelConfigError(*refused)
    return result


def _notices(message: model_config.ModelConfig, kind: ModelKind) -> Iterator[str]:
    """Yield notices about fields that have no effect together with others."""
    if kind is ModelKind.PYTHON and _ENVIRONMENT in message.parameters:
        yield (f"parameters.{_ENVIRONMENT}: a Python model runs in this server's interpreter; install there what it "
               "imports")
    if message.HasField("sequence_batching") and message.model_warmup:
        yield "model_warmup: kept; a model with sequences is warmed up with zeros only"


def _queue_policy(queue: model_config.ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        max_queue_size=queue.max_queue_size,
        default_timeout_us=queue.default_timeout_microseconds,
        allow_timeout_override=queue.allow_timeout_override,
        delay_expired=queue.timeout_action == model_config.ModelQueuePolicy.DELAY)


def _is_cached(message: model_config.ModelConfig) -> bool:
    if not message.response_cache.enable:
        return False
    for owner, holds in (("a decoupled model's", message.model_transaction_policy.decoupled),
                         ("a sequence's", message.HasField("sequence_batching"))):
        if holds:
            raise ModelConfigError(f"response_cache: {owner} responses are not cached; remove it")
    return True


def _is_plain(path: str, kind: ModelKind) -> bool:
    """Return True for a mapped field that needs no notice, because engines support it."""
    return path in ("batch_input", "batch_output") and kind is ModelKind.ENGINE


def _tensors(kind: str, tensors: Iterable[model_config.ModelInput | model_config.ModelOutput],
             may_be_open: bool) -> tuple[TensorSpec, ...]:
    """Parse inputs or outputs; if `may_be_open`, those without a data_type are omitted."""
    specs = []
    for tensor in tensors:
        if not tensor.name:
            raise ModelConfigError(f"an {kind} has no name")
        if may_be_open and not tensor.data_type:
            continue
        if tensor.data_type not in FROM_CONFIG:
            raise ModelConfigError(f"{kind} '{tensor.name}': data_type is missing")
        dims = tuple(tensor.dims)
        reshape = tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None
        for extents in (dims, reshape or ()):
            if any(extent == 0 or extent < -1 for extent in extents):
                raise ModelConfigError(f"{kind} '{tensor.name}': dims {list(extents)} must be positive, or -1 for any "
                                       "extent")
        if reshape is not None:
            _check_reshape(f"{kind} '{tensor.name}'", dims, reshape)
        specs.append(TensorSpec(
            tensor.name, FROM_CONFIG[tensor.data_type], dims, reshape, getattr(tensor, "optional", False),
            getattr(tensor, "allow_ragged_batch", False), getattr(tensor, "label_filename", "")))
    return tuple(specs)


def _check_reshape(where: str, dims: tuple[int, ...], reshape: tuple[int, ...]) -> None:
    """Check that dims and reshape have matching open extents and element counts between them, as Triton does."""
    if _runs(dims) != _runs(reshape):
        raise ModelConfigError(f"{where}: reshape {list(reshape)} must keep the open extents of dims {list(dims)}, and "
                               "the numbers of elements between them")



def _runs(extents: tuple[int, ...]) -> list[int]:
    """Return the numbers of elements before, between and after the open extents."""
    runs = [1]
    for extent in extents:
        if extent == -1:
            runs.append(1)
        else:
            runs[-1] *= extent
    return runs


def _devices(message: model_config.ModelConfig, most: int) -> tuple[int | None, ...]:
    """Return the device of each instance; raises ModelConfigError if there are more than `most`."""
    for group in message.instance_group:
        if group.count < 0:
            raise ModelConfigError(f"instance_group: count must be positive, got {group.count}")
        if group.gpus and group.kind == model_config.ModelInstanceGroup.KIND_CPU:
            raise ModelConfigError("instance_group: KIND_CPU has no gpus; remove them, or write kind: KIND_GPU")
        if any(number < 0 for number in group.gpus):
            raise ModelConfigError(f"instance_group.gpus: GPUs count from 0, got {min(group.gpus)}")
    if (count := sum(group.count * max(1, len(group.gpus)) for group in message.instance_group)) > most:
        raise ModelConfigError(f"instance_group.count: {count} instances are more than the limit of {most}; write a "
                               "lower count")
    gpus = devices(message)
    if message.dynamic_batching.preserve_ordering and len(gpus) > 1:
        raise ModelConfigError(f"preserve_ordering: {len(gpus)} instances answer in the order in which they are done; "
                               "give instance_group a count of 1, on one device, or leave the order open")
    return gpus


def _version_policy(policy: model_config.ModelVersionPolicy) -> VersionPolicy:
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return VersionPolicy(latest=0)
    if choice == "specific":
        if not policy.specific.versions:
            raise ModelConfigError("version_policy: specific names no versions")
        return VersionPolicy(latest=0, specific=tuple(policy.specific.versions))
    return VersionPolicy(latest=policy.latest.num_versions or 1)


def complete_policy(message: model_config.ModelConfig) -> None:
    """Set the default version_policy, the highest version, in a configuration without one."""
    if not message.version_policy.WhichOneof("policy_choice"):
        message.version_policy.latest.num_versions = 1


def _filename(name: str) -> str:
    """Return a path relative to the version's folder, such as "onnx/model.onnx". Raises ModelConfigError."""
    if name and {"", ".", ".."} & set(name.split("/")):
        raise ModelConfigError(f"default_model_filename: expected a file in the version's folder, got '{name}'")
    return name
