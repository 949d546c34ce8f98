"""instance_group.rate_limiter: what an instance needs to execute, of resources that instances of all models share."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from infer_server.config.groups import devices_of
from infer_server.errors import ModelConfigError
from protos import model_config


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
