"""What a call can fail with. The message is the server's, after the address and the call that it answers."""
from __future__ import annotations

import grpc


class ClientError(Exception):
    """The root: catch this to catch every failure of a call."""


class ServerUnavailableError(ClientError):
    """Nobody listens there, the model is not ready, or its queue is full."""


class DeadlineExceededError(ClientError):
    """There was no answer within the timeout."""


class ModelNotFoundError(ClientError):
    """The server has no such model or version."""


class InvalidRequestError(ClientError):
    """The server, or this client before it, finds the request wrong."""


class UnsupportedError(ClientError):
    """The server does not implement the call."""


class ServerError(ClientError):
    """The server failed."""


class ResponseError(ClientError):
    """The answer does not follow the protocol."""


_BY_STATUS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.UNAVAILABLE: ServerUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.NOT_FOUND: ModelNotFoundError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequestError,       # a message over the size limit
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
}


def error_from_rpc(error: grpc.RpcError, url: str, call: str) -> ClientError:
    """The named error for a failed call."""
    return error_of(error.code().name, url, call, error.details())


def error_of(status: str, url: str, call: str, details: str | None) -> ClientError:
    """The named error for a status; one without a name of its own becomes ServerError."""
    kind = _BY_STATUS.get(grpc.StatusCode[status], ServerError)
    return kind(f"{url}: {call}: {details or 'no details'} [{status}]")
