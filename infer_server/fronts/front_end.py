"""A front's end of the link: what its clients ask is handed on, and answered when the engines' process has answered."""
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
from infer_server.fronts import link
from infer_server.fronts.link import Frame, Link
from infer_server.fronts.settings import FrontSettings


class Infers(Protocol):
    """What the answers of inference over gRPC are told."""

    def answered(self, frame: Frame, is_held: bool) -> None: ...

    def failed(self, number: int, code: int, details: str) -> None: ...

    def streamed(self, frame: Frame) -> None:
        """Of ModelStreamInfer."""


class Exchanges(Protocol):
    """What the answers of HTTP are told."""

    def answered(self, frame: Frame) -> None: ...


class HeldElsewhere(Inflight):
    """Calls that the engines' process counts, too, until it is told that their answers are read."""

    def __init__(self, max_bytes: int, send_timeout_secs: float, front: FrontEnd) -> None:
        super().__init__(max_bytes, send_timeout_secs)
        self._front = front
        self._numbers: dict[OpenCall, int] = {}

    def held_as(self, call: OpenCall, number: int) -> None:
        """To be called before the end of a call that is counted there under that number."""
        self._numbers[call] = number

    def end(self, call: OpenCall) -> None:
        super().end(call)
        if (number := self._numbers.pop(call, None)) is not None:
            self._front.read(number)


class FrontEnd(Link):
    """Ends the process when the other end is gone: its clients connect to another one."""
    infers: Infers
    exchanges: Exchanges

    def __init__(self, start: Callable[[FrontSettings], None], send_away: Callable[[], None],
                 drain: Callable[[bool], None]) -> None:
        """start: is given the settings, once; send_away: called before calls are refused; drain: whether all that was
        accepted is answered, once."""
        super().__init__()
        self._start, self._send_away, self._drain = start, send_away, drain
        self._numbers = count()

    def next_number(self) -> int:
        """A number for a call that has none."""
        return next(self._numbers)

    def read(self, number: int) -> None:
        self.send(link.READ, number)

    def closed(self, reason: Exception | None) -> None:
        if reason and not isinstance(reason, OSError):      # our bug; no log can be handed on any more
            traceback.print_exception(reason)
            os._exit(1)
        os._exit(0)

    def received(self, frame: Frame) -> None:
        kind = frame.kind & ~link.HELD
        if kind == link.ANSWER:
            self.infers.answered(frame, frame.kind != kind)
        elif kind == link.FAIL:
            self.infers.failed(frame.number, int(frame.about), frame.payload.decode())
        elif kind in (link.TAKEN, link.STREAMED, link.ENDED):
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
    """Hands what is logged here on: there is one log. From any thread."""

    def __init__(self, end: FrontEnd, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._end, self._loop = end, loop

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record).encode()
            self._loop.call_soon_threadsafe(lambda: self._end.send(link.LOG, record.levelno, text))
        except Exception:
            self.handleError(record)
