"""instance_group: how many instances a model has, what each executes on (a GPU, by its number, or the CPU), and what it
needs for that of resources that instances of all models share (rate_limiter)."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infer_server.backend import Gpu
from infer_server.errors import ModelConfigError
from protos import model_config

_WHY = "the model is no plan for GPUs, or there is none that runs it"
ON_CPU = f"instance_group.kind: KIND_GPU is served on the CPU, for {_WHY} (see --kind-gpu)"
REFUSED = (f"instance_group: KIND_GPU is refused by --kind-gpu=refuse, for {_WHY}; write kind: KIND_CPU, or start the "
           "server with --kind-gpu=cpu")
NOT_KNOWN = ("instance_group: KIND_GPU: whether the model is a plan that runs on a GPU here cannot be told before its "
             "file is copied")
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

    gpus: of this machine, if the model is a plan for one: a group that names none has all that run it. instances: of a
    group on the CPU that says nothing of its count. Raises ModelConfigError: a GPU that it names is not there, or does
    not run the plan.
    """
    able = [gpu.number for gpu in gpus if not gpu.why_not]
    if message.dynamic_batching.preserve_ordering:
        able, instances = able[:1], 1
    if not message.instance_group:
        message.instance_group.add(name=message.name)
    for group in message.instance_group:
        named = list(dict.fromkeys(group.gpus))
        group.ClearField("gpus")
        if able and group.kind != Group.KIND_CPU:
            _check(named, gpus)
            group.kind, group.count = Group.KIND_GPU, group.count or 1
            group.gpus.extend(named or able)
        else:
            group.kind, group.count = Group.KIND_CPU, group.count or instances


def settled(message: model_config.ModelConfig, gpus: Sequence[Gpu]) -> model_config.ModelConfig:
    """A copy whose groups say how they are served. Raises ModelConfigError."""
    copy = model_config.ModelConfig()
    copy.CopyFrom(message)
    settle(copy, gpus)
    return copy


def _check(named: Sequence[int], gpus: Sequence[Gpu]) -> None:
    there = {gpu.number: gpu for gpu in gpus}
    for number in named:
        if number not in there:
            raise ModelConfigError(f"instance_group.gpus: there is no GPU {number}; this machine has "
                                   f"{', '.join(map(str, gpus))}")
        if why := there[number].why_not:
            raise ModelConfigError(f"instance_group.gpus: {there[number]} does not run the plan: {why}")


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
