"""Errors of calls. Their messages have the address, the call and the server's message."""
from __future__ import annotations


class ClientError(Exception):
    """Base class: catch this to catch every failure of a call."""


class ServerUnavailableError(ClientError):
    """The server does not listen, the model is not ready, or its queue is full."""


class DeadlineExceededError(ClientError):
    """There was no answer within the timeout."""


class ModelNotFoundError(ClientError):
    """The server has no such model or version."""


class InvalidRequestError(ClientError):
    """The server, or this client before it, rejects the request."""


class UnsupportedError(ClientError):
    """The server does not implement the call."""


class ServerError(ClientError):
    """The server failed."""


class ResponseError(ClientError):
    """The answer does not follow the protocol."""


_BY_STATUS = {
    "UNAVAILABLE": ServerUnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "NOT_FOUND": ModelNotFoundError,
    "INVALID_ARGUMENT": InvalidRequestError,
    "RESOURCE_EXHAUSTED": InvalidRequestError,      # a message over the size limit
    "UNIMPLEMENTED": UnsupportedError,
}


def error_of(status: str, url: str, call: str, details: str | None) -> ClientError:
    """Build the named error for a gRPC status; others become ServerError."""
    kind = _BY_STATUS.get(status, ServerError)
    return kind(f"{url}: {call}: {details or 'no details'} [{status}]")
