"""The status that a gRPC call ends with, and the statuses that failures of HTTP and HTTP/2 mean.

References
----------
https://github.com/grpc/grpc/blob/master/doc/statuscodes.md
https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""
from __future__ import annotations

STATUSES = ("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
            "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
            "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED")         # names by status code
_STATUS_BY_HTTP = {400: "INTERNAL", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "UNIMPLEMENTED",
                   429: "UNAVAILABLE", 502: "UNAVAILABLE", 503: "UNAVAILABLE", 504: "UNAVAILABLE"}
_REFUSED_STREAM = 7
_STATUS_BY_RESET = {_REFUSED_STREAM: "UNAVAILABLE", 8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}


class StatusError(Exception):
    """A call ended with another status than OK.

    Parameters
    ----------
    status : the name of the gRPC status, for calls over HTTP, too.
    details : the server's message, or the reason that the client found.
    is_unprocessed : True if no server can have begun to execute the call.
    pushback_secs : seconds after which the call may be repeated (grpc-retry-pushback-ms); negative: it must not be.
    """

    def __init__(self, status: str, details: str, *, is_unprocessed: bool = False,
                 pushback_secs: float | None = None) -> None:
        super().__init__(f"{details or 'no details'} [{status}]")
        self.status, self.details = status, details
        self.is_unprocessed, self.pushback_secs = is_unprocessed, pushback_secs


def deadline_exceeded() -> StatusError:
    """Build the error of a call whose deadline has passed."""
    return StatusError("DEADLINE_EXCEEDED", "no answer within the timeout")


def status_of_http(status: int) -> StatusError:
    """Build the error for a response that is not gRPC, by its HTTP status."""
    return StatusError(_STATUS_BY_HTTP.get(status, "UNKNOWN"), f"the server answered with HTTP status {status}")


def status_of_reset(error_code: int) -> StatusError:
    """Build the error for a stream that was reset before its status arrived."""
    return StatusError(_STATUS_BY_RESET.get(error_code, "INTERNAL"),
                       f"the stream was reset with HTTP/2 error {error_code}",
                       is_unprocessed=error_code == _REFUSED_STREAM)
