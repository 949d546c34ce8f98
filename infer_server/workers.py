"""Blocking work beside the event loop."""
from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Runs a function on a thread of its own and returns (or raises) what it did.

    Unlike an executor's threads it is not joined at exit: a load that hangs in native code, which nothing can cancel,
    must not keep the process alive after everything accepted is answered.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def complete(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)     # type: ignore[arg-type]    # a T, as there was no error

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as caught:     # handed to whoever awaits
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(complete, result, error)

    threading.Thread(target=run, name=f"worker {getattr(function, '__qualname__', '')}", daemon=True).start()
    return await done
