"""gRPC's health check of a connection, if the service config enables it.

References ---------- https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""
from __future__ import annotations

import time

from infer_server import protos
from infer_server.clients.channels.call import CallRequest, RequestEncoder
from infer_server.clients.channels.status import StatusError
from infer_server.protos import health

CHECK_SECS = 5.0                # between the checks of a connection that is used
MAX_SECS = 1.0                  # time for the answer to a check
_PATH = next(method.path for method in protos.methods(protos.HEALTH_SERVICE) if method.name == "Check")


class HealthCheck:
    """Health checks of a connection's server at intervals of CHECK_SECS."""

    def __init__(self, service: str | None) -> None:
        self._service = service
        self._checked_at = float("-inf")

    @property
    def is_due(self) -> bool:
        return self._service is not None and time.monotonic() - self._checked_at > CHECK_SECS

    def expire(self) -> None:
        """Have the server checked before the next call: the last one was not answered in time."""
        self._checked_at = float("-inf")

    def request(self, encoder: RequestEncoder, timeout: float) -> CallRequest:
        """Return the request of a check. The next one is due after CHECK_SECS."""
        self._checked_at = time.monotonic()
        return encoder.encode(_PATH, health.HealthCheckRequest(service=self._service).SerializeToString(), timeout)


def require_healthy(answer: bytes | StatusError) -> None:
    """Raise StatusError unless the server is serving, or does not implement health checks."""
    if isinstance(answer, StatusError):
        if answer.status == "UNIMPLEMENTED":
            return
        raise StatusError("UNAVAILABLE", f"the health check failed: {answer}")
    status = health.HealthCheckResponse.FromString(answer).status
    if status != health.HealthCheckResponse.SERVING:
        raise StatusError("UNAVAILABLE", f"the server is {health.HealthCheckResponse.ServingStatus.Name(status)}")
