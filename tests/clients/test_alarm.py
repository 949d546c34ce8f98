"""Tests of the waits of an open loop."""
from __future__ import annotations

import asyncio
import sys
import time

import pytest
import uvloop

from infer_server.clients.load.alarm import Alarm


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("platform", [sys.platform, "other"])
def test_an_alarm_does_not_ring_early_and_rings_for_the_past(
        new_loop: object, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def waits() -> None:
        with Alarm() as alarm:
            for secs in (0.0, -1.0, 0.0003, 0.02, 0.0007, 1e-9):
                moment = time.monotonic() + secs
                await asyncio.wait_for(alarm.wait_until(moment), 60)
                assert time.monotonic() >= moment - (0 if platform == "linux" else 0.001)

    monkeypatch.setattr(sys, "platform", platform)
    with asyncio.Runner(loop_factory=new_loop) as runner:       # type: ignore[arg-type]
        runner.run(waits())
