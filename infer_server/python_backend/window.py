"""Pause a decoupled model while too many of its responses are unconsumed, in the process of the model."""
from __future__ import annotations

import threading
from collections import deque


class SendWindow:
    """Sent and unconsumed responses to one request."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """Allow up to `max_responses` (0: any number) of `max_bytes` in total; a larger response is sent alone."""
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._sizes: deque[int] = deque()
        self._bytes = 0

    def can_send(self, size: int) -> bool:
        return not self._sizes or (
            self._bytes + size <= self._max_bytes and not 0 < self._max_responses <= len(self._sizes))

    def sent(self, size: int) -> None:
        self._sizes.append(size)
        self._bytes += size

    def consumed(self) -> None:
        """Remove the oldest response from the window."""
        self._bytes -= self._sizes.popleft() if self._sizes else 0


class OpenRequests:
    """Requests whose last response the model has not sent. Thread-safe."""

    def __init__(self) -> None:
        self._cancelled: dict[int, bool] = {}
        self._windows: dict[int, SendWindow] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._cancelled)

    def open(self, number: int, window: tuple[int, int] | None) -> None:
        """Add a request; `window` has the arguments of SendWindow, or None. A rescheduled request keeps its window."""
        with self._changed:
            self._cancelled[number] = False
            if window and number not in self._windows:
                self._windows[number] = SendWindow(*window)

    def end(self, number: int) -> None:
        with self._changed:
            self._cancelled.pop(number, None)
            self._windows.pop(number, None)
            self._changed.notify_all()

    def cancel(self, number: int) -> None:
        """Mark a request as cancelled and wake a sender that waits for its window."""
        with self._changed:
            if number in self._cancelled:               # the request may have ended meanwhile
                self._cancelled[number] = True
                self._changed.notify_all()

    def consumed(self, number: int) -> None:
        """Record that the oldest response was consumed."""
        with self._changed:
            if window := self._windows.get(number):
                window.consumed()
                self._changed.notify_all()

    def is_cancelled(self, number: int) -> bool:
        return self._cancelled.get(number, False)

    def wait_to_send(self, number: int, size: int) -> None:
        """Wait until a response of `size` bytes may be sent, or the request is cancelled or has ended."""
        with self._changed:
            window = self._windows.get(number)
            while window and not window.can_send(size) and not self._cancelled.get(number, True):

                self._changed.wait()
                window = self._windows.get(number)
            if window:
                window.sent(size)
