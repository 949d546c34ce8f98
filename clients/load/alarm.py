"""Waits with the kernel's timer resolution, where event loops round to a millisecond."""
from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from contextlib import suppress

_ABSOLUTE = 1
_NS = 10 ** 9


class _Moment(ctypes.Structure):
    _fields_ = [("secs", ctypes.c_long), ("ns", ctypes.c_long)]


class _Setting(ctypes.Structure):
    _fields_ = [("interval", _Moment), ("first", _Moment)]


class Alarm:
    """Timer on the running event loop: Linux's timerfd, or else the loop's own timers."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._awaited: asyncio.Future[None] | None = None
        self._timer = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None)
            self._timer = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._timer >= 0:
            self._loop.add_reader(self._timer, self._ring)

    def __enter__(self) -> Alarm:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer >= 0:
            self._loop.remove_reader(self._timer)
            os.close(self._timer)

    async def wait_until(self, moment: float) -> None:
        """Wait until time.monotonic() is at least `moment`."""
        if self._timer < 0:
            await asyncio.sleep(max(0.0, moment - time.monotonic()))
            return
        setting = _Setting(first=_Moment(int(moment), int(moment % 1 * _NS)))
        self._awaited = self._loop.create_future()
        self._libc.timerfd_settime(self._timer, _ABSOLUTE, ctypes.byref(setting), None)
        await self._awaited

    def _ring(self) -> None:
        with suppress(BlockingIOError):         # the timer was set again, and has not expired
            os.read(self._timer, 8)
            if self._awaited and not self._awaited.done():
                self._awaited.set_result(None)
