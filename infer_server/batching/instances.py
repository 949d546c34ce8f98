"""What executes batches: a thread for each instance of a model, or who finds a short one while that is idle."""
from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

from infer_server.batching.batch_times import ShortBatches
from infer_server.batching.batcher import Admission, Batcher
from infer_server.batching.request import Outcome, Request
from infer_server.batching.statistics import BatchExecution
from infer_server.errors import ExecutionError
from infer_server.workers import start

log = logging.getLogger(__name__)


class Executor(Protocol):
    """What runs a model for one instance; used by one thread at a time."""

    def execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution | None]:
        """The outcome of each request of the batch; None: nothing was executed. What it raises ends all of them."""

    def close(self) -> None: ...


class Instance:
    """Pulls batches and executes them until the batcher is closed and empty."""

    def __init__(self, name: str, batcher: Batcher, executor: Executor,
                 deliver: Callable[[list[Outcome], BatchExecution | None], None], cpu: int | None = None,
                 gate: Admission | None = None, short: ShortBatches | None = None) -> None:
        """cpu: the CPU that its thread is pinned to; None: not pinned. gate: of the rate limiter, if there is one.
        short: the batches that others may execute in its place; None: none."""
        self._batcher = batcher
        self._executor = executor
        self._deliver = deliver                     # hands results to the event loop: once a batch; None: it failed
        self._cpu, self._gate = cpu, gate
        self._short = short if cpu is None and gate is None else None
        self._executing = threading.Lock()          # held by the thread that uses the executor
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Raises RepositoryError: there are no more threads."""
        start(self._thread)

    def join(self) -> None:
        self._thread.join()

    def execute_short(self) -> tuple[list[Outcome], BatchExecution | None] | None:
        """Executes what waits on the calling thread, if it is free and that is done at once; None: it was not."""
        if self._short is None or not self._executing.acquire(blocking=False):
            return None
        try:
            batch = self._batcher.take_short(self._short.holds)
            return self._execute(batch) if batch else None
        finally:
            self._executing.release()

    def _run(self) -> None:
        if self._cpu is not None:
            os.sched_setaffinity(0, {self._cpu})
        while self._serve_batch():
            pass
        self.end()

    def end(self) -> None:
        """Lets go of what it executes with. For its thread, or who could not start that."""
        if self._gate:
            self._gate.close()
        with self._executing:
            self._executor.close()

    def _serve_batch(self) -> bool:
        """Waits for a batch, serves it, and keeps no reference to it. False: the queue is closed and empty."""
        batch = self._batcher.take(self._gate)
        if batch is None:
            return False
        try:
            with self._executing:
                outcomes, execution = self._execute(batch)
            self._deliver(outcomes, execution)
        except Exception:                   # a front's bug: who waits for the next batch must not notice
            log.exception("%s could not hand out the answers of a batch", self._thread.name)
        finally:
            if self._gate:
                self._gate.leave()
        return True

    def _execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution | None]:
        try:
            outcomes, execution = self._executor.execute(batch)
        except Exception as error:          # whatever an engine raises ends this batch, and never the thread
            log.exception("%s failed on a batch of %d requests", self._thread.name, len(batch))
            reason = f"the engine failed: {error}"
            return [(request, ExecutionError(reason)) for request in batch], None
        if self._short is not None and execution and not any([request.lengthy for request in batch]):
            self._short.add(execution.items, execution.computed_ns - execution.copied_ns,
                            execution.encoded_ns - execution.started_ns)
        return outcomes, execution
