"""Holds a decoupled model back while too many of its responses have not been taken, in the process of the model."""
from __future__ import annotations

import threading
from collections import deque


class Window:
    """The responses to one request that were sent and not taken yet."""

    def __init__(self, most: int, most_bytes: int) -> None:
        """most: responses; 0: any number. most_bytes: of all of them; one that is larger goes alone."""
        self._most, self._most_bytes = most, most_bytes
        self._sizes: deque[int] = deque()
        self._bytes = 0

    def has_room(self, size: int) -> bool:
        return not self._sizes or (
            self._bytes + size <= self._most_bytes and not 0 < self._most <= len(self._sizes))

    def sent(self, size: int) -> None:
        self._sizes.append(size)
        self._bytes += size

    def taken(self) -> None:
        """Forget the oldest response."""
        self._bytes -= self._sizes.popleft() if self._sizes else 0


class OpenRequests:
    """The requests that a model has not sent the last response to. Thread-safe."""

    def __init__(self) -> None:
        self._cancelled: dict[int, bool] = {}
        self._windows: dict[int, Window] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._cancelled)

    def open(self, number: int, window: tuple[int, int] | None) -> None:
        """window: see Window; None: responses are sent at once. A request that is executed again keeps its own."""
        with self._changed:
            self._cancelled[number] = False
            if window and number not in self._windows:
                self._windows[number] = Window(*window)

    def end(self, number: int) -> None:
        with self._changed:
            self._cancelled.pop(number, None)
            self._windows.pop(number, None)
            self._changed.notify_all()

    def cancel(self, number: int) -> None:
        """Note that nobody waits for a request; whoever waits to send a response to it goes on."""
        with self._changed:
            if number in self._cancelled:               # it may have ended meanwhile
                self._cancelled[number] = True
                self._changed.notify_all()

    def taken(self, number: int) -> None:
        """Note that a response was taken: there is room for another one."""
        with self._changed:
            if window := self._windows.get(number):
                window.taken()
                self._changed.notify_all()

    def is_cancelled(self, number: int) -> bool:
        return self._cancelled.get(number, False)

    def wait_for_room(self, number: int, size: int) -> None:
        """Wait until a response of so many bytes may be sent, or the request is cancelled or has ended."""
        with self._changed:
            window = self._windows.get(number)
            while window and not window.has_room(size) and not self._cancelled.get(number, True):
                self._changed.wait()
                window = self._windows.get(number)
            if window:
                window.sent(size)
