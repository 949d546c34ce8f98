"""Interfaces between an HTTP/2 connection and the requests on its streams."""
from __future__ import annotations

from typing import Protocol


class RequestHandler(Protocol):
    """Request on a stream. Belongs to the event loop."""
    answered_at: float                  # on the loop's clock, if a response waits to be read; else 0
    is_partial: bool                    # a message has arrived in part
    partial_bytes: int                  # total bytes of messages that arrived in pieces

    def receive(self, data: bytes, is_last: bool) -> None:
        """Take a piece of the request's body."""

    def close(self) -> None:
        """Release the request: its client has the response or has disconnected."""

    def fail(self, error: Exception) -> None:
        """End the request with the status of an error."""


class CountedStream(Protocol):
    """Stream whose received bytes are counted once in an iteration of the event loop."""

    def count(self) -> object:
        """Count the bytes that have arrived."""


class PartsWriter(Protocol):
    """Stream whose response has several parts."""

    def sent(self) -> None:
        """Note that all written data have been sent."""
