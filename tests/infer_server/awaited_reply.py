"""Reply of a request that a test awaits."""
from __future__ import annotations

import asyncio
from typing import Any


class AwaitedReply:
    """Reply for coroutines: awaiting `response` returns the response or raises the error."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.response: asyncio.Future[Any] = loop.create_future()

    @property
    def gone(self) -> bool:
        return self.response.done()

    def send(self, response: Any) -> None:
        self.response.set_result(response)

    def fail(self, error: Exception) -> None:
        self.response.set_exception(error)
