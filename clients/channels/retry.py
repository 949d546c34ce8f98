"""Retries of calls, without I/O: whether a failed call is attempted again, and after how long.

References
----------
https://github.com/grpc/proposal/blob/master/A6-client-retries.md
"""
from __future__ import annotations

import random
import time

from infer_server.clients.channels.addresses import Address
from infer_server.clients.channels.service_config import MethodConfig, ServiceConfig
from infer_server.clients.channels.status import StatusError, deadline_exceeded

_MAX_REFUSALS = 10              # most retries of a call whose stream was refused or followed by GOAWAY
_JITTER = 0.2


class Throttle:
    """Retry throttling by tokens: calls are not retried while too many fail."""

    def __init__(self, config: ServiceConfig) -> None:
        self._most, self._ratio = config.throttling or (0.0, 0.0)
        self._tokens = self._most

    @property
    def allows_retries(self) -> bool:
        return not self._most or self._tokens > self._most / 2

    def succeeded(self) -> None:
        self._tokens = min(self._most, self._tokens + self._ratio)

    def failed(self) -> None:
        self._tokens = max(0.0, self._tokens - 1)


class Attempts:
    """Attempts of one call, with its deadline and retry policy."""
    __slots__ = ("_policy", "_throttle", "timeout", "deadline", "retries", "address", "_refusals")

    def __init__(self, method: MethodConfig, throttle: Throttle, timeout: float | None) -> None:
        """Start the deadline: `timeout` is the caller's in seconds, which the config may shorten."""
        self._policy, self._throttle = method.retry, throttle
        most = method.timeout_secs
        self.timeout = timeout if most is None else most if timeout is None else min(timeout, most)
        self.deadline = None if self.timeout is None else time.monotonic() + self.timeout
        self.retries = 0                # retries by the policy; those of streams that no server processed do not count
        self.address: Address | None = None         # address of the last attempt
        self._refusals = 0

    def remaining(self) -> float | None:
        """Return the seconds left, or None without a deadline. Raises StatusError if it has passed."""
        if self.deadline is None:
            return None
        if (left := self.deadline - time.monotonic()) <= 0:
            raise deadline_exceeded()
        return left

    def wait_after(self, error: StatusError) -> float:
        """Return the seconds to wait before the next attempt. Raises `error` if there is none."""
        if error.is_unprocessed and self._refusals < _MAX_REFUSALS:
            self._refusals += 1
            return 0.0
        policy = self._policy
        if policy is None or error.status not in policy.statuses:
            raise error
        self._throttle.failed()
        self.retries += 1
        secs = min(policy.initial_backoff_secs * policy.multiplier ** (self.retries - 1), policy.max_backoff_secs)
        secs *= random.uniform(1 - _JITTER, 1 + _JITTER)
        if error.pushback_secs is not None:
            secs = error.pushback_secs
        if secs < 0 or self.retries >= policy.max_attempts or not self._throttle.allows_retries or (
                self.deadline is not None and time.monotonic() + secs >= self.deadline):
            raise error
        return secs
