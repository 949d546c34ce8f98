"""Interface between the calls of the service and the gRPC library.

A call is a coroutine function that reads messages from a CallContext and writes messages to it. It returns when the
call has succeeded, and raises a ServeError that becomes the call's status.
"""
from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from infer_server.errors import MalformedMessageError
from infer_server.observing.load_report import HEADER


class CallContext(Protocol):
    """A call in progress. Belongs to the event loop."""

    async def read(self) -> bytes | None:
        """Return the next message of the client; None after the last one."""

    async def write(self, message: bytes) -> None:
        """Send a message; return when the next one may be sent."""

    def peer(self) -> str:
        """Return the client's address in gRPC's notation: "ipv4:127.0.0.1:5000"."""

    def metadata(self) -> Iterable[tuple[str, Any]]:
        """Return the metadata that the client sent; values are str, or bytes for names that end with -bin."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None if it has none."""

    def disconnect(self) -> None:
        """End the client's connection."""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the client has all responses or has disconnected."""


Serve = Callable[[CallContext], Awaitable[None]]


Check = Callable[[CallContext], None]           # raises RestrictedError for clients that may not make a call


def unary(call: Callable[[bytes, CallContext], Awaitable[bytes]], check: Check | None = None) -> Serve:
    """Return a call that reads one message and answers it with one, if the client may make it.

    The message is read first, because a proxy loses the status of a call that ends before its message is sent.
    """
    async def serve(context: CallContext) -> None:
        data = await context.read()
        if check:
            check(context)
        if data is None:
            raise MalformedMessageError("the call has no message")
        await context.write(await call(data, context))
    return serve


@runtime_checkable
class HasHeaders(Protocol):
    """Interface of a client with the metadata of its call."""

    def headers(self) -> Iterable[tuple[str, str]]:
        """Return the metadata whose values are text."""


class CallClient:
    """Client of a call, for Inflight."""

    def __init__(self, context: CallContext) -> None:
        self._context = context

    def peer(self) -> str:
        return self._context.peer()

    def headers(self) -> Iterable[tuple[str, str]]:
        return ((name, value) for name, value in self._context.metadata() if isinstance(value, str))

    def disconnect(self) -> None:
        self._context.disconnect()


def requests_load_report(metadata: Iterable[tuple[str, Any]]) -> bool:
    """Return True if the metadata of a call asks for a load report with the response."""
    return any(name == HEADER for name, _ in metadata)


def peer_of(name: Any) -> str:
    """Return the address of a client in gRPC's notation. name: the result of getpeername()."""
    if not isinstance(name, tuple):
        return "unix:"
    host = name[0].removeprefix("::ffff:")          # IPv4 address on a dual-stack socket
    return f"ipv6:[{host}]:{name[1]}" if ":" in host else f"ipv4:{host}:{name[1]}"
