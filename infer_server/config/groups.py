"""Instance groups (instance_group): number and devices of instances, and their rate limits."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infer_server.backend import GpuDevice
from infer_server.errors import ModelConfigError
from infer_server.protos import model_config

_WHY = "no GPU of this machine runs the model"
ON_CPU = f"instance_group.kind: KIND_GPU is served on the CPU, because {_WHY} (see --kind-gpu)"
REFUSED = (f"instance_group: KIND_GPU is refused by --kind-gpu=refuse, because {_WHY}; write kind: KIND_CPU, or start "
           "the server with --kind-gpu=cpu")
NOT_KNOWN = ("instance_group: KIND_GPU: not checked, because the model's file is not copied yet: it may be a plan for "
             "another device")
NOT_BUILT = ("instance_group: KIND_GPU: not checked, because only the build shows whether the GPU has a kernel for "
             "each node")
Group = model_config.ModelInstanceGroup


def requests_gpu(message: model_config.ModelConfig) -> bool:
    return any(group.kind == Group.KIND_GPU or group.gpus for group in message.instance_group)


def devices_of(group: Group) -> list[int | None]:
    """Return the GPU of each instance of a group, or None for the CPU; `count` instances on each of its GPUs."""
    on: Sequence[int | None] = (group.gpus if group.kind == Group.KIND_GPU else ()) or (None,)
    return [device for _ in range(group.count or 1) for device in on]


def devices(message: model_config.ModelConfig) -> tuple[int | None, ...]:
    """Return the devices of all instances."""
    return tuple(device for group in message.instance_group for device in devices_of(group)) or (None,)


def settle(message: model_config.ModelConfig, gpus: Sequence[GpuDevice] = (), instances: int = 1) -> None:
    """Complete the instance groups in place with devices, names and counts, as Triton does.

    Parameters
    ----------
    message : ModelConfig
        Configuration; modified.
    gpus : sequence of Gpu
        GPUs of this machine that may run the model.
    instances : int
        Default count of a group on the CPU.

    Raises
    ------
    ModelConfigError
        A GPU that a group names does not exist or cannot run the model.
    """
    if message.dynamic_batching.preserve_ordering:
        instances = 1
    _assign_devices(message, gpus, auto=True)
    for number, group in enumerate(message.instance_group):
        group.name = group.name or f"{message.name}_{number}"
        group.count = group.count or (1 if group.kind == Group.KIND_GPU else instances)


def with_devices(message: model_config.ModelConfig, gpus: Sequence[GpuDevice],
                 auto: bool = True) -> model_config.ModelConfig:
    """Return a copy whose groups name the devices that they are served on.

    A group of KIND_GPU without gpus gets all GPUs that run the model; so does KIND_AUTO if `auto`. Raises
    ModelConfigError as `settle`.
    """
    copy = model_config.ModelConfig()
    copy.CopyFrom(message)
    _assign_devices(copy, gpus, auto)
    return copy


def without_gpus(message: model_config.ModelConfig, numbers: Collection[int]) -> model_config.ModelConfig:
    """Return a copy without these GPUs; groups that have none left execute on the CPU."""
    copy = model_config.ModelConfig()
    copy.CopyFrom(message)
    for group in copy.instance_group:
        left = [number for number in group.gpus if number not in numbers]
        group.ClearField("gpus")
        group.gpus.extend(left)
        group.kind = Group.KIND_GPU if left else Group.KIND_CPU
    return copy


def _assign_devices(message: model_config.ModelConfig, gpus: Sequence[GpuDevice], auto: bool) -> None:
    able = [gpu.number for gpu in gpus if not gpu.why_not]
    if message.dynamic_batching.preserve_ordering:
        able = able[:1]
    if not message.instance_group:
        message.instance_group.add(name=message.name)
    for group in message.instance_group:
        named = list(dict.fromkeys(group.gpus))
        group.ClearField("gpus")
        requires_gpu = bool(named) or group.kind == Group.KIND_GPU
        if able and group.kind != Group.KIND_CPU and (requires_gpu or auto):
            _check(named, gpus)
            group.kind = Group.KIND_GPU
            group.gpus.extend(named or able)
        else:
            group.kind = Group.KIND_CPU


def _check(named: Sequence[int], gpus: Sequence[GpuDevice]) -> None:
    there = {gpu.number: gpu for gpu in gpus}
    for number in named:
        if number not in there:
            raise ModelConfigError(f"instance_group.gpus: there is no GPU {number}; this machine has "
                                   f"{', '.join(map(str, gpus))}")
        if why := there[number].why_not:
            raise ModelConfigError(f"instance_group.gpus: {there[number]} does not run the model: {why}")


# ---- rate_limiter
class Resource(NamedTuple):
    """Resource of the rate limiter."""
    name: str
    is_global: bool             # False if each device has its own
    gpu: int | None = None      # number of the GPU; None for the CPU or a global resource


@dataclass(frozen=True)
class RateLimit:
    """Rate limit of an instance."""
    needs: Mapping[Resource, int]
    priority: int = 1           # an instance of priority 2 executes half as often as one of 1 if both wait


def rate_limits_of(message: model_config.ModelConfig) -> tuple[RateLimit, ...]:
    """Return the rate limit of each instance; () if no group has one. Raises ModelConfigError."""
    if not any(group.HasField("rate_limiter") for group in message.instance_group):
        return ()
    return tuple(_rate_limit(group.rate_limiter, gpu) for group in message.instance_group for gpu in devices_of(group))


def _rate_limit(limiter: model_config.ModelRateLimiter, gpu: int | None) -> RateLimit:
    needs: dict[Resource, int] = {}
    for resource in limiter.resources:
        is_global = getattr(resource, "global")
        key = Resource(resource.name, is_global, None if is_global else gpu)
        if not resource.name or key in needs:
            raise ModelConfigError("instance_group.rate_limiter: each resource needs a name of its own")
        needs[key] = resource.count
    return RateLimit(needs, limiter.priority or 1)
