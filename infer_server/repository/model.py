"""One version of a model, loaded: its engine, its queue, its instances and what they have counted."""
from __future__ import annotations

import asyncio
import time

from infer_server.backend import Engine, is_open, warm_up
from infer_server.batching.batcher import Batcher
from infer_server.batching.event_loop import ExpiryTimer, Waker
from infer_server.batching.instances import Instance
from infer_server.batching.request import Outcome, Request
from infer_server.batching.statistics import BatchExecution, Failure, Statistics
from infer_server.config.autocomplete import complete
from infer_server.config.config import ModelConfig, from_message
from infer_server.config.signature import ANY_ITEMS, Items, Signature
from infer_server.errors import (
    DeadlineExceededError,
    ModelConfigError,
    QueueFullError,
    ServeError,
    UnavailableError,
)
from infer_server.repository.cores import CpuDealer
from infer_server.workers import post
from protos import model_config


class Model:
    """Ready when constructed: contexts are warm and the instances' threads run.

    submit and cancel belong to the event loop; the constructor and drain block, and belong to a worker.
    """

    def __init__(self, name: str, version: int, engine: Engine, message: model_config.ModelConfig, filename: str,
                 loop: asyncio.AbstractEventLoop, instances: int, dealer: CpuDealer) -> None:
        """instances: how many where the configuration does not say; dealer: gives CPUs to threads that are pinned."""
        self.name = name
        self.version = version
        self.config_message = complete(message, name, engine, filename, instances)
        self.config = from_message(self.config_message)
        opened = is_open(engine)
        self.signature = Signature(self.config, items_of(self.config, engine), engine.check if opened else None)
        self.statistics = Statistics()
        self._loop = loop
        self._batcher = Batcher(name, self.config.batching, self.config.queueing, self._refuse,
                                self.config.instances)
        self._waker = Waker(loop, self._batcher, self.config.batching.max_batch_size)
        self._expiry = ExpiryTimer(loop, self._batcher)
        outputs = [spec.name for spec in self.config.outputs]
        cpus = [dealer.deal(engine.threads) if self.config.build.pin == "true" else None
                for _ in range(self.config.instances)]
        contexts = [engine.create_context(own) for own in cpus]
        for context in contexts:
            for batch, ns in warm_up(context, engine).items():
                self._batcher.measured(batch, ns)
        self._instances = [
            Instance(f"{name}/{version} instance {i}", self._batcher, context, outputs, engine.max_batch,
                     self._deliver, own[0] if own else None, opened)
            for i, (context, own) in enumerate(zip(contexts, cpus, strict=True))]
        for instance in self._instances:
            instance.start()

    @property
    def pending(self) -> int:
        """The number of requests that wait to be executed."""
        return len(self._batcher)

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises UnavailableError when the queue is full or closed, DeadlineExceededError when it would be late.
        """
        try:
            self._batcher.submit(request)
        except (UnavailableError, DeadlineExceededError) as error:
            rejected = isinstance(error, QueueFullError | DeadlineExceededError)
            self._failed(request, Failure.REJECTED if rejected else Failure.OTHER)
            raise
        self._waker.submitted()
        self._expiry.submitted(request)

    def cancel(self, request: Request) -> None:
        """Drops a request whose client went away. If it is executing already, its result is dropped instead."""
        if self._batcher.withdraw(request):
            self._failed(request, Failure.CANCELED)

    def drain(self) -> None:
        """Executes what waits, accepts nothing more, and ends the instances."""
        self._batcher.close()
        for instance in self._instances:
            instance.join()
        # They refer to this model, too: without this their contexts' memory would wait for the cycle collector.
        self._instances.clear()

    def _deliver(self, outcomes: list[Outcome], execution: BatchExecution | None) -> None:
        post(self._loop, self._finish, outcomes, execution)

    def _finish(self, outcomes: list[Outcome], execution: BatchExecution | None) -> None:
        """Hands out the results of a batch, on the event loop; None: its execution failed.

        Requests that were cancelled meanwhile, or whose deadline has passed, are not counted as successes.
        """
        now_ns = time.monotonic_ns()
        enqueued_ns = []
        for request, result in outcomes:
            if request.reply.gone:
                self._failed(request, Failure.CANCELED)
            elif isinstance(result, Exception):
                self._failed(request, Failure.BACKEND)
            elif 0 < request.deadline_ns < now_ns:
                self._failed(request, Failure.CANCELED)
                result = DeadlineExceededError(f"Deadline Exceeded: it passed while model '{self.name}' executed")
            else:
                enqueued_ns.append(request.enqueued_ns)
            request.finish(result)
        if execution:
            self.statistics.executed(execution, enqueued_ns)
            self._batcher.measured(execution.items, now_ns - execution.started_ns)

    def _refuse(self, expired: list[Request], error: ServeError) -> None:
        """Called on any thread. Each gets an error of its own: what is raised collects the frames it passes."""
        for request in expired:
            self._failed(request, Failure.REJECTED)
            post(self._loop, request.finish, type(error)(*error.args))

    def _failed(self, request: Request, reason: Failure) -> None:
        self.statistics.failed(reason, time.monotonic_ns() - request.received_ns)


def items_of(config: ModelConfig, engine: Engine) -> Items:
    """How many items a request for an engine may have. Raises ModelConfigError: it is to be cut, and cannot be."""
    split = config.build.split_requests == "true"
    if split and engine.dependence:
        raise ModelConfigError("parameter split_requests: the items of this model's batch depend on each other: "
                               f"{engine.dependence}; remove it")
    if not engine.max_batch:
        return Items(False, 1)
    if engine.dependence or (config.batched and not split):
        return Items(True, config.batching.max_batch_size if config.batched else engine.max_batch)
    return Items(True, ANY_ITEMS)
