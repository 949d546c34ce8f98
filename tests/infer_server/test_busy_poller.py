"""Tests of the event loop's busy polling for the next request, on a clock that the test sets."""
from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from infer_server.busy_poller import BusyPoller

SOON_NS, LATE_NS = 100_000, 400_000


class Loop:
    """Event loop whose callbacks are run by turn()."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, function: Callable[[], None]) -> None:
        self.soon.append(function)

    def turn(self) -> None:
        functions, self.soon = self.soon, []
        for function in functions:
            function()


class Clock:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ns = 1 << 40
        patch.setattr(time, "monotonic_ns", lambda: self.ns)


class Asked:
    """Client that sends its next request some time after the last response."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.clock, self.loop = Clock(patch), Loop()
        self.poller = BusyPoller(self.loop)        # type: ignore[arg-type]      # of a loop it needs no more
        self.poller.idle()

    def after(self, *gaps_ns: int) -> bool:
        """Return True if the loop keeps polling after several requests with these gaps before them."""
        for gap_ns in gaps_ns:
            self.clock.ns += gap_ns
            self.loop.turn()
            self.poller.opened()
            self.loop.turn()
            self.poller.idle()
        return bool(self.loop.soon)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def test_it_looks_where_requests_have_come_soon(asked: Asked) -> None:
    assert not asked.after(SOON_NS, SOON_NS, SOON_NS)
    assert asked.after(SOON_NS)


def test_it_sleeps_where_they_come_late(asked: Asked) -> None:
    assert not asked.after(*[LATE_NS] * 20)
    assert not asked.after(*[SOON_NS, LATE_NS] * 20)


def test_it_sleeps_again_when_they_no_longer_come_soon(asked: Asked) -> None:
    assert asked.after(*[SOON_NS] * 100)
    assert not asked.after(LATE_NS, LATE_NS)


def test_a_look_ends_in_time_though_nothing_comes(asked: Asked) -> None:
    assert asked.after(*[SOON_NS] * 8)
    asked.clock.ns += SOON_NS
    asked.loop.turn()
    assert asked.loop.soon
    asked.clock.ns += SOON_NS
    asked.loop.turn()
    assert not asked.loop.soon


def test_a_look_ends_with_a_request(asked: Asked) -> None:
    assert asked.after(*[SOON_NS] * 8)
    asked.poller.opened()
    asked.loop.turn()
    assert not asked.loop.soon


def test_it_is_told_when_nothing_is_open(tmp_path: object) -> None:
    from infer_server.endpoints.inflight import Inflight

    async def run() -> list[str]:
        inflight, received = Inflight(1 << 20, 1.0), list[str]()
        inflight._busy_poller.opened = lambda: received.append("opened")  # type: ignore[method-assign]
        inflight._busy_poller.idle = lambda: received.append("idle")    # type: ignore[method-assign]
        first, second = (inflight.begin(None, 1) for _ in range(2))     # type: ignore[arg-type]
        for call in (first, second, second):
            inflight.end(call)
        return received

    assert asyncio.run(run()) == ["opened", "idle"]
