"""Instances of a model: threads that execute batches. Short batches may execute on the event loop instead."""
from __future__ import annotations

import logging
import os
import threading
import time
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
    """Interface that runs a model for one instance; used by one thread at a time."""

    def execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution | None]:
        """Execute a batch and return the outcome of each request, and the execution, or None if nothing was executed.

        An exception fails all requests of the batch.
        """

    def close(self) -> None: ...


class Instance:
    """Thread that takes batches and executes them until the batcher is closed and empty."""

    def __init__(self, name: str, batcher: Batcher, executor: Executor,
                 deliver: Callable[[list[Outcome], BatchExecution | None], None], cpu: int | None = None,
                 gate: Admission | None = None, short: ShortBatches | None = None) -> None:
        """Create an instance.

        Parameters
        ----------
        name : str
            Name of the thread.
        batcher : Batcher
            Queue to take batches from.
        executor : Executor
            Executor of the batches.
        deliver : callable
            Function that passes the outcomes of a batch to the event loop.
        cpu : int, optional
            CPU to pin the thread to.
        gate : Admission, optional
            Gate of the rate limiter.
        short : ShortBatches, optional
            Record of batches that `execute_short` may execute.
        """
        self._batcher = batcher
        self._executor = executor
        self._deliver = deliver
        self._cpu, self._gate = cpu, gate
        self._short = short if cpu is None and gate is None else None
        self._executing = threading.Lock()          # held while the executor is in use
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. Raises RepositoryError if the system has no more threads."""
        start(self._thread)

    def join(self) -> None:
        self._thread.join()

    @property
    def may_execute_short(self) -> bool:
        """True if the instance is free and may execute short batches."""
        return self._short is not None and not self._executing.locked()

    def execute_short(self) -> tuple[list[Outcome], BatchExecution | None] | None:
        """Execute a waiting short batch on the calling thread; return None if the instance is busy or there is none."""
        if self._short is None or not self._executing.acquire(blocking=False):
            return None
        try:
            batch = self._batcher.take_short(self._short.is_short)
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
        """Close the gate and the executor. Called by the instance's thread, or if that could not be started."""
        if self._gate:
            self._gate.close()
        with self._executing:
            self._executor.close()

    def _serve_batch(self) -> bool:
        """Take a batch, execute it and keep no reference to it; return False if the queue is closed and empty."""
        batch = self._batcher.take(self._gate)
        if batch is None:
            return False
        try:
            with self._executing:
                outcomes, execution = self._execute(batch, time.thread_time_ns())
            self._deliver(outcomes, execution)
        except Exception:                   # an internal error of an endpoint must not end the thread
            log.exception("%s could not deliver the responses of a batch", self._thread.name)
        finally:
            if self._gate:
                self._gate.leave()
        return True

    def _execute(self, batch: list[Request], thread_ns: int = 0) -> tuple[list[Outcome], BatchExecution | None]:
        """Execute a batch.

        thread_ns: time.thread_time_ns() on an instance's own thread. Its waits for the interpreter lock, which the
        event loop would not have, do not count as time of the batch.
        """
        try:
            outcomes, execution = self._executor.execute(batch)
        except Exception as error:          # an engine may raise anything, which must not end the thread
            log.exception("%s failed on a batch of %d requests", self._thread.name, len(batch))
            reason = f"the engine failed: {error}"
            return [(request, ExecutionError(reason)) for request in batch], None
        if self._short is not None and execution and not any([request.lengthy for request in batch]):
            computing_ns = execution.computed_ns - execution.copied_ns
            whole_ns = execution.encoded_ns - execution.started_ns
            if thread_ns:
                used_ns = time.thread_time_ns() - thread_ns
                computing_ns, whole_ns = min(computing_ns, used_ns), min(whole_ns, used_ns)
            self._short.add(execution.items, computing_ns, whole_ns)
        return outcomes, execution
