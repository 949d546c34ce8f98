"""instance_group: how many instances a model has, what each executes on (a GPU, by its number, or the CPU), and what it
needs for that of resources that instances of all models share (rate_limiter)."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infer_server.backend import Gpu
from infer_server.errors import ModelConfigError
from protos import model_config

_WHY = "no GPU here runs the model"
ON_CPU = f"instance_group.kind: KIND_GPU is served on the CPU, for {_WHY} (see --kind-gpu)"
REFUSED = (f"instance_group: KIND_GPU is refused by --kind-gpu=refuse, for {_WHY}; write kind: KIND_CPU, or start the "
           "server with --kind-gpu=cpu")
NOT_KNOWN = ("instance_group: KIND_GPU: whether the model is a plan that runs on a GPU here cannot be told before its "
             "file is copied")
NOT_BUILT = "instance_group: KIND_GPU: whether the GPU has a kernel for each node is known when the model is built"
Group = model_config.ModelInstanceGroup


def asks_for_gpu(message: model_config.ModelConfig) -> bool:
    return any(group.kind == Group.KIND_GPU or group.gpus for group in message.instance_group)


def devices_of(group: Group) -> list[int | None]:
    """The GPU of each instance; None: the CPU. A group for several GPUs has `count` on each of them."""
    on: Sequence[int | None] = (group.gpus if group.kind == Group.KIND_GPU else ()) or (None,)
    return [device for _ in range(group.count or 1) for device in on]


def devices(message: model_config.ModelConfig) -> tuple[int | None, ...]:
    """Those of all instances."""
    return tuple(device for group in message.instance_group for device in devices_of(group)) or (None,)


def settle(message: model_config.ModelConfig, gpus: Sequence[Gpu] = (), instances: int = 1) -> None:
    """Has a configuration say how its groups are served, as Triton completes them.

    gpus: of this machine, that may run the model. instances: of a group on the CPU that says nothing of its count.
    Raises ModelConfigError: a GPU that it names is not there, or does not run the model.
    """
    if message.dynamic_batching.preserve_ordering:
        instances = 1
    _place(message, gpus, auto=True)
    for number, group in enumerate(message.instance_group):
        group.name = group.name or f"{message.name}_{number}"
        group.count = group.count or (1 if group.kind == Group.KIND_GPU else instances)


def placed(message: model_config.ModelConfig, gpus: Sequence[Gpu], auto: bool = True) -> model_config.ModelConfig:
    """A copy whose groups name the devices that they are served on: a group that names no GPU has all that run the
    model. auto: so has one that leaves the kind open. Raises ModelConfigError, as `settle`."""
    copy = model_config.ModelConfig()
    copy.CopyFrom(message)
    _place(copy, gpus, auto)
    return copy


def without(message: model_config.ModelConfig, numbers: Collection[int]) -> model_config.ModelConfig:
    """A copy of what `placed` gives, whose groups have these GPUs no more, and the CPU where none is left."""
    copy = model_config.ModelConfig()
    copy.CopyFrom(message)
    for group in copy.instance_group:
        left = [number for number in group.gpus if number not in numbers]
        group.ClearField("gpus")
        group.gpus.extend(left)
        group.kind = Group.KIND_GPU if left else Group.KIND_CPU
    return copy


def _place(message: model_config.ModelConfig, gpus: Sequence[Gpu], auto: bool) -> None:
    able = [gpu.number for gpu in gpus if not gpu.why_not]
    if message.dynamic_batching.preserve_ordering:
        able = able[:1]
    if not message.instance_group:
        message.instance_group.add(name=message.name)
    for group in message.instance_group:
        named = list(dict.fromkeys(group.gpus))
        group.ClearField("gpus")
        asked = bool(named) or group.kind == Group.KIND_GPU
        if able and group.kind != Group.KIND_CPU and (asked or auto):
            _check(named, gpus)
            group.kind = Group.KIND_GPU
            group.gpus.extend(named or able)
        else:
            group.kind = Group.KIND_CPU


def _check(named: Sequence[int], gpus: Sequence[Gpu]) -> None:
    there = {gpu.number: gpu for gpu in gpus}
    for number in named:
        if number not in there:
            raise ModelConfigError(f"instance_group.gpus: there is no GPU {number}; this machine has "
                                   f"{', '.join(map(str, gpus))}")
        if why := there[number].why_not:
            raise ModelConfigError(f"instance_group.gpus: {there[number]} does not run the model: {why}")


# ---- rate_limiter
class Resource(NamedTuple):
    name: str
    is_global: bool             # or each device has as much
    gpu: int | None = None      # the device; None: the CPU, or all of them


@dataclass(frozen=True)
class RateLimit:
    """Of an instance."""
    needs: Mapping[Resource, int]
    priority: int = 1           # one of 2 executes half as often as one of 1 where both wait


def rate_limits_of(message: model_config.ModelConfig) -> tuple[RateLimit, ...]:
    """One for each instance; none where no group has any. Raises ModelConfigError."""
    if not any(group.HasField("rate_limiter") for group in message.instance_group):
        return ()
    return tuple(_rate_limit(group.rate_limiter, gpu) for group in message.instance_group for gpu in devices_of(group))


def _rate_limit(given: model_config.ModelRateLimiter, gpu: int | None) -> RateLimit:
    needs: dict[Resource, int] = {}
    for resource in given.resources:
        is_global = getattr(resource, "global")
        found = Resource(resource.name, is_global, None if is_global else gpu)
        if not resource.name or found in needs:
            raise ModelConfigError("instance_group.rate_limiter: each of resources has a name, and stands there once")
        needs[found] = resource.count
    return RateLimit(needs, given.priority or 1)
