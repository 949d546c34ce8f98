"""One version of a model, loaded: what every kind of it has, and the one whose requests queue for instances."""
from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from infer_server.batching.batcher import Batcher
from infer_server.batching.instances import Executor, Instance
from infer_server.batching.queue import RequestQueue
from infer_server.batching.request import Outcome, Request
from infer_server.batching.statistics import BatchExecution, Failure, Statistics
from infer_server.config.config import ModelConfig, from_message
from infer_server.config.signature import Signature
from infer_server.errors import DeadlineExceededError, QueueFullError, ServeError, UnavailableError
from infer_server.workers import post
from protos import model_config


class Model(ABC):
    """Ready when constructed.

    submit and cancel belong to the event loop; the constructor and drain block, and belong to a worker.
    """
    platform: str                       # what executes it

    def __init__(self, name: str, version: int, message: model_config.ModelConfig, config: ModelConfig,
                 signature: Signature) -> None:
        """message: the completed configuration; config: the same, read."""
        self.name = name
        self.version = version
        self.config_message = message
        self.config = config
        self.signature = signature
        self.statistics = Statistics()

    @property
    @abstractmethod
    def pending(self) -> int:
        """The number of requests that wait to be executed."""

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises UnavailableError when the queue is full or closed, DeadlineExceededError when it would be late.
        """

    @abstractmethod
    def cancel(self, request: Request) -> None:
        """Drops a request whose client went away. If it is executing already, its result is dropped instead."""

    @abstractmethod
    def drain(self) -> None:
        """Executes what waits, accepts nothing more, and ends what executes."""

    def failed(self, request: Request, reason: Failure) -> None:
        self.statistics.failed(reason, time.monotonic_ns() - request.received_ns)


class QueuedModel(Model):
    """Its requests wait in a queue for instances, which execute batches of them."""

    def __init__(self, name: str, version: int, message: model_config.ModelConfig, signature: Signature,
                 loop: asyncio.AbstractEventLoop) -> None:
        config = from_message(message)
        super().__init__(name, version, message, config, signature)
        self._loop = loop
        self.batcher = Batcher(name, config.batching, config.queueing, self._refuse, config.instances)
        self._queue = RequestQueue(loop, self.batcher, config.batching.max_batch_size)
        self._instances: list[Instance] = []

    @property
    def pending(self) -> int:
        return len(self.batcher)

    def start(self, executors: Sequence[Executor], cpus: Sequence[int | None] = ()) -> None:
        """Gives it its instances, one for each executor; cpus: what their threads are pinned to, if given."""
        self._instances = [
            Instance(f"{self.name}/{self.version} instance {i}", self.batcher, executor, self.deliver,
                     cpus[i] if cpus else None)
            for i, executor in enumerate(executors)]
        for instance in self._instances:
            instance.start()

    def submit(self, request: Request) -> None:
        try:
            self._queue.submit(request)
        except (UnavailableError, DeadlineExceededError) as error:
            rejected = isinstance(error, QueueFullError | DeadlineExceededError)
            self.failed(request, Failure.REJECTED if rejected else Failure.OTHER)
            raise

    def cancel(self, request: Request) -> None:
        if self.batcher.withdraw(request):
            self.failed(request, Failure.CANCELED)

    def drain(self) -> None:
        self.batcher.close()
        for instance in self._instances:
            instance.join()
        # They refer to this model, too: without this their contexts' memory would wait for the cycle collector.
        self._instances.clear()

    def deliver(self, outcomes: list[Outcome], execution: BatchExecution | None) -> None:
        """Hands out what an execution gave, from any thread; None: it failed, or what it gave came later."""
        post(self._loop, self._finish, outcomes, execution)

    def _finish(self, outcomes: list[Outcome], execution: BatchExecution | None) -> None:
        """Hands out the results of a batch, on the event loop; None: its execution failed.

        Requests that were cancelled meanwhile, or whose deadline has passed, are not counted as successes.
        """
        now_ns = time.monotonic_ns()
        enqueued_ns = []
        for request, result in outcomes:
            if request.reply.gone:
                self.failed(request, Failure.CANCELED)
            elif isinstance(result, Exception):
                self.failed(request, Failure.BACKEND)
            elif 0 < request.deadline_ns < now_ns:
                self.failed(request, Failure.CANCELED)
                result = DeadlineExceededError(f"Deadline Exceeded: it passed while model '{self.name}' executed")
            else:
                enqueued_ns.append(request.enqueued_ns)
            request.finish(result)
        if execution:
            self.statistics.executed(execution, enqueued_ns)
            self.batcher.measured(execution.items, now_ns - execution.started_ns)
        elif enqueued_ns:
            self.statistics.answered(enqueued_ns, now_ns)

    def _refuse(self, expired: list[Request], error: ServeError) -> None:
        """Called on any thread. Each gets an error of its own: what is raised collects the frames it passes."""
        for request in expired:
            self.failed(request, Failure.REJECTED)
            post(self._loop, request.finish, type(error)(*error.args))
