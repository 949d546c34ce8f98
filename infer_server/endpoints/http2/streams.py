"""The interface between an HTTP/2 connection and what is served on its streams."""
from __future__ import annotations

from typing import Protocol


class Stream(Protocol):
    """A request on a stream. Belongs to the event loop."""
    answered_at: float                  # on the loop's clock, if an answer waits to be read; 0: none does
    is_partial: bool                    # a message has arrived in part
    partial_bytes: int                  # of the messages that have arrived in pieces

    def receive(self, data: bytes, is_last: bool) -> None:
        """Take a piece of the request's body."""

    def close(self) -> None:
        """The stream has ended: its client has the answer, or has gone."""

    def fail(self, error: Exception) -> None:
        """End the request with the status of an error."""


class Counted(Protocol):
    """A stream whose bytes are counted once in an iteration of the event loop."""

    def count(self) -> object:
        """Count the bytes that have arrived."""


class Writer(Protocol):
    """A stream whose answer has several parts."""

    def sent(self) -> None:
        """All that was written has been sent."""
