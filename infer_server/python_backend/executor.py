"""Instance of a Python model: its process, which is restarted after it has ended."""
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

_CHECK_SECS = 5.0               # timeout of is_ready(), as in Triton


class PythonExecutor:
    """Executor that runs a Python model in a process."""
    def __init__(self, process: ModelProcess, start: Callable[[], ModelProcess], post: Callable[..., None]) -> None:
        """Use a started process; `start` starts another one, `post` calls a function on the event loop."""
        self._process = process
        self._start, self._post = start, post

    def execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution | None]:
        if not self._process.is_alive:
            log.warning("the process of a Python model has ended and is restarted")
            try:
                self._process = self._start()
            except RepositoryError as error:
                raise ExecutionError(f"its process could not be restarted: {error}") from error
        if traces := [(request.trace, request.enqueued_ns) for request in batch if request.trace]:
            items, now_ns = sum(request.items for request in batch), time.monotonic_ns()
            for trace, enqueued_ns in traces:
                self._post(trace.executing, enqueued_ns, items, now_ns)
        return self._process.execute(batch)

    async def is_ready(self) -> bool:
        """Return the result of the model's is_ready(), or False if it takes too long."""
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
