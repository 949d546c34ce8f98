"""Frontend-worker side of the link: forwards requests to the engine process and dispatches its responses."""
from __future__ import annotations

import asyncio
import logging
import os
import pickle
import traceback
from collections.abc import Callable
from itertools import count
from typing import Protocol

from infer_server.endpoints.inflight import Inflight, OpenCall
from infer_server.frontend_workers import link
from infer_server.frontend_workers.link import Frame, Link
from infer_server.frontend_workers.settings import WorkerSettings


class GrpcReceiver(Protocol):
    """Interface of the receiver of responses to gRPC inference: GrpcCalls."""

    def answered(self, frame: Frame, is_counted: bool) -> None: ...

    def failed(self, number: int, code: int, details: str) -> None: ...

    def streamed(self, frame: Frame) -> None:
        """Accept a frame of a ModelStreamInfer call."""


class HttpReceiver(Protocol):
    """Interface of the receiver of HTTP responses: HttpCalls."""

    def answered(self, frame: Frame) -> None: ...


class WorkerInflight(Inflight):
    """Inflight of a worker: it also notifies the engine process, which counts the same calls, of read responses."""

    def __init__(self, max_bytes: int, send_timeout_secs: float, end: WorkerEnd) -> None:
        super().__init__(max_bytes, send_timeout_secs)
        self._end = end
        self._numbers: dict[OpenCall, int] = {}

    def set_number(self, call: OpenCall, number: int) -> None:
        """Note the number under which the engine process counts a call; to be called before its end."""
        self._numbers[call] = number

    def end(self, call: OpenCall) -> None:
        super().end(call)
        if (number := self._numbers.pop(call, None)) is not None:
            self._end.read(number)


class WorkerEnd(Link):
    """Worker's end of the link. When the engine process is gone, the worker's process ends, too."""
    infers: GrpcReceiver
    exchanges: HttpReceiver

    def __init__(self, start: Callable[[WorkerSettings], None], send_away: Callable[[], None],
                 drain: Callable[[bool], None]) -> None:
        """Create the end of a link.

        Parameters
        ----------
        start : callable
            Called once with the settings.
        send_away : callable
            Called before calls are rejected.
        drain : callable
            Called once; the argument is True if accepted requests are to be answered first.
        """
        super().__init__()
        self._start, self._send_away, self._drain = start, send_away, drain
        self._numbers = count()

    def next_number(self) -> int:
        """Return the number of the next call."""
        return next(self._numbers)

    def read(self, number: int) -> None:
        self.send(link.READ, number)

    def closed(self, reason: Exception | None) -> None:
        if reason and not isinstance(reason, OSError):      # a bug, which cannot be logged over the link
            traceback.print_exception(reason)
            os._exit(1)
        os._exit(0)

    def received(self, frame: Frame) -> None:
        kind = frame.kind & ~link.COUNTED
        if kind == link.ANSWER:
            self.infers.answered(frame, frame.kind != kind)
        elif kind == link.FAIL:
            self.infers.failed(frame.number, int(frame.about), frame.payload.decode())
        elif kind in (link.CONSUMED, link.STREAMED, link.ENDED):
            self.infers.streamed(frame)
        elif kind == link.SETTINGS:
            self._start(pickle.loads(frame.payload))
        elif kind == link.SEND_AWAY:
            self._send_away()
        elif kind == link.DRAIN:
            self._drain(bool(frame.number))
        else:
            self.exchanges.answered(frame)


class ToLink(logging.Handler):
    """Log handler that forwards records to the engine process, which writes the only log. Thread-safe."""

    def __init__(self, end: WorkerEnd, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._end, self._loop = end, loop

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record).encode()
            self._loop.call_soon_threadsafe(lambda: self._end.send(link.LOG, record.levelno, text))
        except Exception:
            self.handleError(record)
