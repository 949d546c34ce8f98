"""The interface between the calls of the service and the library that carries them.

A call is a coroutine function that reads messages from a CallContext and writes messages to it. It returns when the
call has succeeded, and raises a ServeError that becomes the call's status.
"""
from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from infer_server.errors import MalformedMessageError


class CallContext(Protocol):
    """A call in progress. Belongs to the event loop."""

    async def read(self) -> bytes | None:
        """Return the next message of the client; None after the last one."""

    async def write(self, message: bytes) -> None:
        """Send a message; returns when there is room for the next one."""

    def peer(self) -> str:
        """Return the client's address as gRPC writes it: "ipv4:127.0.0.1:5000"."""

    def metadata(self) -> Iterable[tuple[str, Any]]:
        """Return the metadata that the client sent; values are str, or bytes for names that end with -bin."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None if it has none."""

    def disconnect(self) -> None:
        """End the client's connection."""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the call has ended and its client has the answers, or has gone."""


Serve = Callable[[CallContext], Awaitable[None]]


Check = Callable[[CallContext], None]           # raises RestrictedError for clients that may not make a call


def unary(call: Callable[[bytes, CallContext], Awaitable[bytes]], check: Check | None = None) -> Serve:
    """Return a call that reads one message and answers it with one, if the client may make it.

    The message is read first: a server behind another one loses the status of a call that ends before it is sent.
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
    """A client of whose call the metadata are known."""

    def headers(self) -> Iterable[tuple[str, str]]:
        """Return the metadata whose values are text."""


class Client:
    """The client of a call, as Inflight knows it."""

    def __init__(self, context: CallContext) -> None:
        self._context = context

    def peer(self) -> str:
        return self._context.peer()

    def headers(self) -> Iterable[tuple[str, str]]:
        return ((name, value) for name, value in self._context.metadata() if isinstance(value, str))

    def disconnect(self) -> None:
        self._context.disconnect()


def peer_of(name: Any) -> str:
    """Return the address of a client as gRPC writes it. name: of a socket's other end, as getpeername() returns it."""
    if not isinstance(name, tuple):
        return "unix:"
    host = name[0].removeprefix("::ffff:")          # IPv4 on a socket for both
    return f"ipv6:[{host}]:{name[1]}" if ":" in host else f"ipv4:{host}:{name[1]}"
