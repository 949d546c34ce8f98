"""The errors of serving as gRPC statuses, in one place."""
from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from infer_server.errors import (
    ExecutionError,
    InvalidRequestError,
    NotServedError,
    RepositoryError,
    ServeError,
    UnavailableError,
    UnknownModelError,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

# The statuses that Triton gives, so that what its clients retry they retry here.
_STATUS: dict[type[ServeError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    NotServedError: grpc.StatusCode.UNIMPLEMENTED,
    ExecutionError: grpc.StatusCode.INTERNAL,
    RepositoryError: grpc.StatusCode.INVALID_ARGUMENT,
}


def status_of(error: ServeError) -> grpc.StatusCode:
    """The status of the nearest class in the tree of errors that has one."""
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


def answering(call: Callable[[Any], Awaitable[T]]) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[T]]:
    """A gRPC handler from a function of the request that raises ServeErrors."""

    async def handler(request: Any, context: grpc.aio.ServicerContext) -> T:
        try:
            return await call(request)
        except ServeError as error:
            await context.abort(status_of(error), str(error))
        except Exception as error:      # our bug: the client learns that much, the log has the rest
            log.exception("a call failed")
            await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")
        raise AssertionError("abort() returned")

    return handler
