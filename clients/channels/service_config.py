"""gRPC's service config: timeouts and retries by method, retry throttling, health checks.

    {"methodConfig": [{"name": [{"service": "inference.GRPCInferenceService", "method": "ModelInfer"}],
                       "timeout": "2s",
                       "retryPolicy": {"maxAttempts": 3, "retryableStatusCodes": ["UNAVAILABLE"]}}],
     "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
     "healthCheckConfig": {"serviceName": ""}}

An empty name is of all methods. A retryPolicy that lacks a field has it of DEFAULT_POLICY.

References
----------
https://github.com/grpc/grpc-proto/blob/master/grpc/service_config/service_config.proto
https://github.com/grpc/proposal/blob/master/A6-client-retries.md
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from infer_server.clients.channels.status import STATUSES

DEFAULT_POLICY = {"maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2,
                  "retryableStatusCodes": ["UNAVAILABLE"]}
_INFERENCE = "inference.GRPCInferenceService"
_MAX_ATTEMPTS = 5                       # the limit of all gRPC implementations
_DURATION = re.compile(r"(\d+(?:\.\d{1,9})?)s")


def default_service_config() -> dict[str, Any]:
    """Return the service config of clients of several servers, as a document that every gRPC client accepts.

    Requests go in turn to the servers whose health checks succeed. A request that ends with UNAVAILABLE is
    sent again, up to 3 times after 0.02, 0.06 and 0.18 s, to another server where the client can choose; not while more
    than half as many requests fail as succeed. Requests of a sequence must not be sent twice: leave methodConfig out.
    """
    return {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": ""},
        "methodConfig": [{"name": [{"service": _INFERENCE}], "retryPolicy": {
            "maxAttempts": 4, "initialBackoff": "0.02s", "maxBackoff": "0.5s", "backoffMultiplier": 3,
            "retryableStatusCodes": ["UNAVAILABLE"]}}],
        "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.5}}


@dataclass(frozen=True)
class RetryPolicy:
    """Retry policy of a method: statuses, number of attempts and backoff.

    The wait before attempt n is random between 0.8 and 1.2 times min(initial_backoff_secs * multiplier**(n - 2),
    max_backoff_secs).
    """
    max_attempts: int
    initial_backoff_secs: float
    max_backoff_secs: float
    multiplier: float
    statuses: frozenset[str]


@dataclass(frozen=True)
class MethodConfig:
    """Settings of a method: timeout and retry policy, either may be None."""
    timeout_secs: float | None = None
    retry: RetryPolicy | None = None


@dataclass(frozen=True)
class ServiceConfig:
    """Parsed service config; `document` is complete, with defaults for omitted fields."""
    document: Mapping[str, Any]
    methods: Mapping[str, MethodConfig]         # by "/service/method", "/service/" or ""
    throttling: tuple[float, float] | None      # tokens at most, and tokens for a call that succeeds
    health_service: str | None                  # None: no health checks

    @classmethod
    def read(cls, source: Mapping[str, Any] | str) -> ServiceConfig:
        """Read a document. Raises ValueError."""
        try:
            document = json.loads(source) if isinstance(source, str) else source
            return _read(document)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"service config: {error}") from error

    def method(self, path: str) -> MethodConfig:
        """Return the settings of a method: its own, those of its service, or the default ones."""
        service = path[:path.rindex("/") + 1]
        return next((self.methods[name] for name in (path, service, "") if name in self.methods), MethodConfig())


def _read(document: Mapping[str, Any]) -> ServiceConfig:
    _refuse_unknown(document, "methodConfig", "retryThrottling", "healthCheckConfig", "loadBalancingConfig")
    methods, complete = {}, []
    for entry in document.get("methodConfig", []):
        _refuse_unknown(entry, "name", "timeout", "retryPolicy")
        policy = {**DEFAULT_POLICY, **entry["retryPolicy"]} if "retryPolicy" in entry else None
        complete.append({**entry, **({"retryPolicy": policy} if policy else {})})
        method = MethodConfig(_secs("timeout", entry["timeout"]) if "timeout" in entry else None,
                              _policy(policy) if policy else None)
        for name in entry["name"]:
            _refuse_unknown(name, "service", "method")
            methods[f"/{name['service']}/{name.get('method', '')}" if name.get("service") else ""] = method
    throttling = document.get("retryThrottling")
    if throttling:
        _refuse_unknown(throttling, "maxTokens", "tokenRatio")
    return ServiceConfig(
        {**document, "methodConfig": complete}, methods, throttling and (
            _number("maxTokens", throttling, lambda n: 0 < n <= 1000, "above 0, at most 1000"),
            _number("tokenRatio", throttling, lambda n: n > 0, "above 0")),
        document["healthCheckConfig"].get("serviceName", "") if "healthCheckConfig" in document else None)


def _policy(policy: Mapping[str, Any]) -> RetryPolicy:
    _refuse_unknown(policy, *DEFAULT_POLICY)
    statuses = frozenset(STATUSES[code] if isinstance(code, int) else code for code in policy["retryableStatusCodes"])
    if not statuses or "OK" in statuses or not statuses <= frozenset(STATUSES):
        raise ValueError(f"retryableStatusCodes {policy['retryableStatusCodes']} are not statuses of failures")
    attempts = _number("maxAttempts", policy, lambda n: n >= 2 and n == int(n), "a whole number of at least 2")
    return RetryPolicy(min(int(attempts), _MAX_ATTEMPTS), _secs("initialBackoff", policy["initialBackoff"]),
                       _secs("maxBackoff", policy["maxBackoff"]),
                       _number("backoffMultiplier", policy, lambda n: n > 0, "above 0"), statuses)


def _number(name: str, policy: Mapping[str, Any], is_valid: Callable[[float], bool], valid: str) -> float:
    value = policy[name]
    if not isinstance(value, (int, float)) or not is_valid(value):
        raise ValueError(f"{name} {value!r} is not {valid}")
    return float(value)


def _secs(name: str, text: str) -> float:
    match = _DURATION.fullmatch(text)
    if not match or float(match[1]) == 0:
        raise ValueError(f"{name} '{text}' is not a duration above 0 such as '0.5s'")
    return float(match[1])


def _refuse_unknown(fields: Mapping[str, Any], *known: str) -> None:
    for name in fields:
        if name not in known:
            raise ValueError(f"no field '{name}'; there are {', '.join(known)}")
