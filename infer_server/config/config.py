"""How a model is to be served: frozen settings, read strictly from config.pbtxt, with errors that name line and field.

What this server would have to ignore for a model to work is refused by name; what only tunes other servers is listed by
`unused`, so that it can be reported.
"""
from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from infer_server.batching.policy import BatchPolicy, QueuePolicy
from infer_server.errors import ModelConfigError
from infer_server.protocol.codec import FROM_CONFIG, Datatype
from protos import model_config


@dataclass(frozen=True)
class TensorSpec:
    """An input or output as clients see it."""
    name: str
    datatype: Datatype
    dims: tuple[int, ...]                   # without the batch axis if the model is batched; -1: any extent

    @cached_property
    def item_bytes(self) -> int:
        """The bytes of one item; 0 if an extent is open, or if elements have no fixed size."""
        return 0 if -1 in self.dims or self.datatype.array.hasobject else (
            math.prod(self.dims) * self.datatype.array.itemsize)

    def describe(self, batched: bool) -> str:
        return f"{self.name} {self.datatype.name} {list(self.full_shape(batched))}"

    def full_shape(self, batched: bool) -> tuple[int, ...]:
        return (-1, *self.dims) if batched else self.dims


@dataclass(frozen=True)
class BuildOptions:
    """How a model.onnx is built when it is loaded: `parameters` of config.pbtxt, named as build-engine's options."""
    precision: str = "fp32"
    calib: str = ""                         # paths are relative to the model's folder
    calibrator: str = ""
    calib_cache: str = ""
    preprocess: str = ""
    uint8_input: str = ""                   # "true": images come as uint8 [N, H, W, C]
    threads: str = ""                       # "": the server's --threads
    specialise: str = ""                    # of a model with open extents: wait, background (the default) or off
    min_shapes: str = ""                    # ... as build-engine's options
    opt_shapes: str = ""
    max_shapes: str = ""
    pin: str = ""                           # "true": each thread of an instance stays on a CPU of its own

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ModelConfigError(f"parameter precision: '{self.precision}' is none of {', '.join(PRECISIONS)}")
        if self.specialise not in ("", "wait", "background", "off"):
            raise ModelConfigError(f"parameter specialise: expected wait, background or off, got '{self.specialise}'")
        for name in ("uint8_input", "pin"):
            if getattr(self, name) not in ("", "true", "false"):
                raise ModelConfigError(f"parameter {name}: expected true or false, got '{getattr(self, name)}'")
        if self.threads and not (self.threads.isdecimal() and int(self.threads) > 0):
            raise ModelConfigError(f"parameter threads: expected a number of threads, got '{self.threads}'")


PRECISIONS = ("int8", "fp16", "bf16", "fp32", "best")


@dataclass(frozen=True)
class VersionPolicy:
    """Which of the versions in a model's folder are served."""
    latest: int = 1                         # this many of the highest; 0: see `specific`
    specific: tuple[int, ...] = ()          # these; empty, with latest=0: all

    def choose(self, available: Iterable[int]) -> list[int]:
        """The versions to serve, highest first. Raises ModelConfigError for a specific one that is not there."""
        found = sorted(available, reverse=True)
        if self.latest:
            return found[:self.latest]
        missing = sorted(set(self.specific) - set(found))
        if missing:
            raise ModelConfigError(f"version_policy asks for versions {missing}; the folder has {sorted(found)}")
        return [version for version in found if version in self.specific] if self.specific else found


@dataclass(frozen=True)
class ModelConfig:
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batching: BatchPolicy
    queueing: QueuePolicy
    batched: bool                           # tensors have a leading batch axis
    instances: int = 1
    versions: VersionPolicy = VersionPolicy()
    build: BuildOptions = BuildOptions()
    default_filename: str = ""              # instead of model.plan or model.onnx
    unused: tuple[str, ...] = field(default=(), compare=False)     # settings that were given and change nothing here


_UNKNOWN_FIELD = re.compile(r'Message type "inference\.(?P<type>[\w.]+)" has no field named "(?P<name>\w+)"')


def read_config(path: Path) -> model_config.ModelConfig:
    """Parses a config.pbtxt. Raises ModelConfigError."""
    message = model_config.ModelConfig()
    try:
        text_format.Parse(path.read_text(encoding="utf-8"), message)
    except text_format.ParseError as error:
        line = error.GetLine()
        hint = _hint(str(error))
        # The parser's own text begins with line:column; the place is given once, as compilers do.
        what = re.sub(r"^\d+(:\d+)? : ", "", str(error))
        raise ModelConfigError(f"{path}:{line}: {what}{hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{path}: {error}") from error
    return message


def _hint(error: str) -> str:
    match = _UNKNOWN_FIELD.search(error)
    if not match:
        return ""
    file = model_config.ModelConfig.DESCRIPTOR.file
    first, *nested = match["type"].split(".")
    descriptor = file.message_types_by_name[first]
    for name in nested:
        descriptor = descriptor.nested_types_by_name[name]
    return nearest(match["name"], descriptor.fields_by_name)


def from_message(message: model_config.ModelConfig) -> ModelConfig:
    """Reads a configuration. Raises ModelConfigError naming the field.

    Complete or not: inputs and outputs that it leaves out are left out here.
    """
    _refuse_what_is_not_served(message)
    dynamic = message.dynamic_batching
    batching = BatchPolicy(
        max_batch_size=max(1, message.max_batch_size),
        merges=message.HasField("dynamic_batching"),
        preferred_batch_sizes=frozenset(dynamic.preferred_batch_size),
        max_queue_delay_us=dynamic.max_queue_delay_microseconds)
    if message.max_batch_size < 0:
        raise ModelConfigError(f"max_batch_size: expected 0 or more, got {message.max_batch_size}")
    for size in sorted(batching.preferred_batch_sizes):
        # Before the configuration is completed, max_batch_size may still be open.
        if size < 1 or (message.max_batch_size and size > message.max_batch_size):
            raise ModelConfigError(f"preferred_batch_size: {size} is not within 1..{batching.max_batch_size}, "
                                   "the max_batch_size")
    queue = dynamic.default_queue_policy
    return ModelConfig(
        name=message.name,
        inputs=_tensors("input", message.input),
        outputs=_tensors("output", message.output),
        batching=batching,
        queueing=QueuePolicy(
            max_queue_size=queue.max_queue_size,
            default_timeout_us=queue.default_timeout_microseconds,
            allow_timeout_override=queue.allow_timeout_override,
            delay_expired=queue.timeout_action == model_config.ModelQueuePolicy.DELAY),
        batched=message.max_batch_size > 0,
        instances=_instances(message),
        versions=_version_policy(message.version_policy),
        build=_build_options(message),
        default_filename=_filename(message.default_model_filename),
        unused=tuple(name for name in _UNUSED if _is_set(message, name)))


def nearest(word: str, known: Iterable[str]) -> str:
    """" Did you mean 'x'?", or nothing if no known word is like it."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean '{matches[0]}'?" if matches else ""


_UNUSED = ("optimization", "model_warmup", "metric_tags", "cc_model_filenames", "model_metrics", "model_operations")

_NOT_SERVED = {
    "sequence_batching": "sequences are not served",
    "ensemble_scheduling": "ensembles are not served",
    "batch_input": "batch inputs are not served",
    "batch_output": "batch outputs are not served",
    "model_repository_agents": "repository agents are not served",
}


def _refuse_what_is_not_served(message: model_config.ModelConfig) -> None:
    for name, why in _NOT_SERVED.items():
        if _is_set(message, name):
            raise ModelConfigError(f"{name}: {why}; remove it")
    if message.response_cache.enable:
        raise ModelConfigError("response_cache: responses are not cached; remove it")
    if message.model_transaction_policy.decoupled:
        raise ModelConfigError("model_transaction_policy: decoupled models are not served; remove it")
    if message.dynamic_batching.priority_levels or message.dynamic_batching.priority_queue_policy:
        raise ModelConfigError("dynamic_batching.priority_levels: requests have no priorities here; remove it")
    for kind, tensors in (("input", message.input), ("output", message.output)):
        for tensor in tensors:
            for name in ("reshape", "is_shape_tensor", "allow_ragged_batch", "optional", "is_non_linear_format_io"):
                if _is_set(tensor, name):
                    raise ModelConfigError(f"{kind} '{tensor.name}': {name} is not served; remove it")


def _is_set(message: Any, name: str) -> bool:
    return any(field.name == name for field, _ in message.ListFields())


def _tensors(
        kind: str, tensors: Iterable[model_config.ModelInput | model_config.ModelOutput]) -> tuple[TensorSpec, ...]:
    specs = []
    for tensor in tensors:
        if not tensor.name:
            raise ModelConfigError(f"an {kind} has no name")
        if tensor.data_type not in FROM_CONFIG:
            raise ModelConfigError(f"{kind} '{tensor.name}': data_type is missing")
        dims = tuple(tensor.dims)
        if any(extent == 0 or extent < -1 for extent in dims):
            raise ModelConfigError(f"{kind} '{tensor.name}': dims {list(dims)} must be positive, or -1 for any extent")
        specs.append(TensorSpec(tensor.name, FROM_CONFIG[tensor.data_type], dims))
    return tuple(specs)


def _instances(message: model_config.ModelConfig) -> int:
    for group in message.instance_group:
        if group.kind == model_config.ModelInstanceGroup.KIND_GPU or group.gpus:
            raise ModelConfigError("instance_group: KIND_GPU is not served; this server executes on CPUs: use KIND_CPU")
        if group.count < 0:
            raise ModelConfigError(f"instance_group: count must be positive, got {group.count}")
        for name in ("rate_limiter", "secondary_devices", "profile", "passive", "host_policy"):
            if _is_set(group, name):
                raise ModelConfigError(f"instance_group: {name} is not served; remove it")
    count = sum(group.count or 1 for group in message.instance_group) or 1
    if message.dynamic_batching.preserve_ordering and count > 1:
        raise ModelConfigError(f"preserve_ordering: {count} instances answer in the order in which they are done; "
                               "give instance_group a count of 1, or leave the order open")
    return count


def _version_policy(policy: model_config.ModelVersionPolicy) -> VersionPolicy:
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return VersionPolicy(latest=0)
    if choice == "specific":
        if not policy.specific.versions:
            raise ModelConfigError("version_policy: specific names no versions")
        return VersionPolicy(latest=0, specific=tuple(policy.specific.versions))
    return VersionPolicy(latest=policy.latest.num_versions or 1)


def _build_options(message: model_config.ModelConfig) -> BuildOptions:
    known = [option.name for option in fields(BuildOptions)]
    given = {}
    for name, parameter in message.parameters.items():
        if name not in known:
            raise ModelConfigError(f"parameters: unknown key '{name}'; known are {', '.join(known)}."
                                   f"{nearest(name, known)}")
        given[name] = parameter.string_value
    return BuildOptions(**given)


def _filename(name: str) -> str:
    if "/" in name or name in (".", ".."):
        raise ModelConfigError(f"default_model_filename: expected a file in the version's folder, got '{name}'")
    return name
