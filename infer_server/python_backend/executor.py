"""An instance of a Python model: its process, started again when it has ended."""
from __future__ import annotations

import logging
from collections.abc import Callable

from infer_server.batching.request import Outcome, Request
from infer_server.batching.statistics import BatchExecution
from infer_server.errors import ExecutionError, RepositoryError
from infer_server.python_backend.process import ModelProcess

log = logging.getLogger(__name__)


class PythonExecutor:
    def __init__(self, process: ModelProcess, start: Callable[[], ModelProcess]) -> None:
        """process: the first one. start: starts another. Raises RepositoryError."""
        self._process = process
        self._start = start

    def execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution | None]:
        if not self._process.is_alive:
            log.warning("the process of a Python model has ended; it is started again")
            try:
                self._process = self._start()
            except RepositoryError as error:
                raise ExecutionError(f"it could not be started again: {error}") from error
        return self._process.execute(batch)

    def cancel(self, request: Request) -> None:
        self._process.cancel(request)

    def forget(self, request: Request) -> None:
        self._process.forget(request)

    def close(self) -> None:
        self._process.close()
