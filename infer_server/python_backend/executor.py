"""An instance of a Python model: its process, started again when it has ended."""
from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from infer_server.batching.request import Outcome, Request
from infer_server.batching.statistics import BatchExecution
from infer_server.errors import ExecutionError, RepositoryError
from infer_server.python_backend.process import ModelProcess

log = logging.getLogger(__name__)

_CHECK_SECS = 5.0               # for is_ready(), as in Triton


class PythonExecutor:
    def __init__(self, process: ModelProcess, start: Callable[[], ModelProcess], post: Callable[..., None]) -> None:
        """process: the first one. start: starts another; raises RepositoryError. post: calls a function on the event
        loop."""
        self._process = process
        self._start, self._post = start, post

    def execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution | None]:
        if not self._process.is_alive:
            log.warning("the process of a Python model has ended; it is started again")
            try:
                self._process = self._start()
            except RepositoryError as error:
                raise ExecutionError(f"it could not be started again: {error}") from error
        if traces := [(request.trace, request.enqueued_ns) for request in batch if request.trace]:
            items, now_ns = sum(request.items for request in batch), time.monotonic_ns()
            for trace, enqueued_ns in traces:
                self._post(trace.executing, enqueued_ns, items, now_ns)
        return self._process.execute(batch)

    async def is_ready(self) -> bool:
        """What the model says of itself, or that it does not say it in time."""
        try:
            async with asyncio.timeout(_CHECK_SECS):
                return await asyncio.shield(asyncio.wrap_future(self._process.check()))
        except TimeoutError:
            log.warning("is_ready() of a Python model took more than %g s", _CHECK_SECS)
            return False

    def cancel(self, request: Request) -> None:
        self._process.cancel(request)

    def forget(self, request: Request) -> None:
        self._process.forget(request)

    def close(self) -> None:
        self._process.close()
