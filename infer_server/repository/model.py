"""One version of a model, loaded: what every kind of it has, and the one whose requests queue for instances."""
from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from types import MappingProxyType
from typing import Any

from infer_server.backend import Gpu
from infer_server.batching.batch_times import ShortBatches
from infer_server.batching.batcher import Batcher
from infer_server.batching.cache import CachedResponses, ResponseCache
from infer_server.batching.instances import Executor, Instance
from infer_server.batching.queue import RequestQueue
from infer_server.batching.request import AGAIN, NO_MORE, Outcome, Request
from infer_server.batching.sequences import Sequences
from infer_server.batching.statistics import BatchExecution, Failure, Statistics
from infer_server.config.config import ModelConfig, complete_policy
from infer_server.config.signature import Signature
from infer_server.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    QueueFullError,
    RepositoryError,
    ServeError,
    UnavailableError,
)
from infer_server.observing.closing import why_closed
from infer_server.rate_limiter import RateLimiter
from infer_server.repository.folders import Fingerprint
from infer_server.workers import post
from protos import model_config

log = logging.getLogger(__name__)

_LOADS = count()                    # so that a model that is loaded again finds nothing of before

_RESCHEDULED_SECS = 30.0            # that a model which is let go of may yet reschedule requests


class State(Enum):
    """Triton's names of them, as RepositoryIndex answers."""
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True)
class Status:
    """The state of one version of a model, and the reason for it."""
    state: State
    reason: str = ""                    # why it is not ready
    model: Model | None = None          # while it is ready
    replaces: bool = False              # a version that is still served, and so is no failure
    fingerprint: Fingerprint = field(default_factory=dict, compare=False)      # of what the model was loaded from

    def is_of(self, fingerprint: Fingerprint) -> bool:
        """Return whether loading again would give the model that is loaded."""
        return self.model is not None and self.model.is_current and self.fingerprint == fingerprint

    def kept(self, message: model_config.ModelConfig) -> Status:
        """Return the status of a version that stays loaded. message: its configuration now, of which only the
        version_policy may have changed."""
        if self.model:
            self.model.config_message.version_policy.CopyFrom(message.version_policy)
            complete_policy(self.model.config_message)
        return replace(self, reason="")


class Model(ABC):
    """Ready when constructed.

    submit and cancel belong to the event loop; the constructor and drain block, and belong to a worker.
    """
    memory_bytes: int = 0               # about what it holds; 0 where that is not known
    device_bytes: Mapping[int | None, int] = MappingProxyType({})   # the same by GPU; None: in the host's memory
    gpus: Sequence[Gpu] = ()            # that instances of it execute on
    reached: Set[int | None] = frozenset()      # devices, GPUs by number, in whose memory instances take tensors where
                                        # their clients have them; None: the host's, which clients may write meanwhile
    load_secs: float = 0.0              # that its loading took; set by who loads it
    warmup_secs: float = 0.0            # that its warm-up took, a part of load_secs
    precision: str = ""                 # that its engine was built with; "": it has none
    built_secs: float = 0.0             # when its engine was built, since the epoch; 0: it was not built
    loaded_ns: int = 0                  # when that ended, by the clock of Counters.used_ns
    labels: Mapping[str, Sequence[str]] = MappingProxyType({})      # of the classes that outputs score

    def __init__(self, name: str, version: int, message: model_config.ModelConfig, config: ModelConfig,
                 signature: Signature) -> None:
        """message: the completed configuration; config: the same, read."""
        self.name = name
        self.version = version
        self.config_message = message
        self.config = config
        self.signature = signature
        self.statistics = Statistics()
        self.prepared: dict[Hashable, Any] = {}         # what serving.py keeps of the forms of its requests,
        self.repeated: dict[Hashable, Any] = {}         # and endpoints of those that come again
        self.served: dict[tuple[str, ...], Any] = {}    # and of their responses, by the names of the outputs
        self._key = f"{name}/{version} {next(_LOADS)} ".encode()
        self._cached: CachedResponses | None = None

    def use_cache(self, cache: ResponseCache) -> None:
        """Keeps its responses there, by the contents of requests. Before the first request."""
        self._cached, self.reached = CachedResponses(cache, self.statistics, self._key), frozenset()

    @property
    def platform(self) -> str:
        """What executes it, as its configuration calls that."""
        return self.config_message.platform or self.config_message.backend

    @property
    def revision(self) -> bytes:
        """What is another one when the model is loaded again."""
        return self._key

    @property
    def is_current(self) -> bool:
        """Return whether the models that it calls are those that it was loaded with."""
        return True

    @property
    def is_decoupled(self) -> bool:
        """Whether requests have any number of responses."""
        return self.config.decoupled

    @property
    def is_repeatable(self) -> bool:
        """Whether a request has one response, and equal ones have equal: what is cached counts on it."""
        return not self.config.decoupled and self.config.sequences is None

    @property
    @abstractmethod
    def pending(self) -> int:
        """The number of requests that wait to be executed."""

    @property
    def is_busy(self) -> bool:
        """Whether it has requests that would fail without it."""
        return self.pending > 0

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

    async def is_ready(self) -> bool:
        """Whether a model that is loaded says so itself, or those do that it asks."""
        return True

    def failed(self, request: Request, reason: Failure) -> None:
        self.statistics.failed(reason, time.monotonic_ns() - request.received_ns)


class QueuedModel(Model):
    """Its requests wait in a queue for instances, which execute batches of them."""

    def __init__(self, name: str, version: int, message: model_config.ModelConfig, config: ModelConfig,
                 signature: Signature, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name, version, message, config, signature)
        self._loop = loop
        batching = config.sequences.batching if config.sequences else config.batching
        shared = 1 if config.sequences else config.instances        # instances of one queue
        self.queues = [
            RequestQueue(loop, Batcher(name, batching, config.queueing, self._refuse, shared), batching.max_batch_size,
                         self._execute_short)
            for _ in range(config.instances // shared)]
        self._sequences = Sequences(name, config.sequences.policy, self.queues, loop, self._refuse_one) if (
            config.sequences) else None
        self._instances: list[Instance] = []
    @property
    def pending(self) -> int:
        return sum(len(queue.batcher) for queue in self.queues) + (self._sequences.waiting if self._sequences else 0)

    def measured(self, items: int, ns: int) -> None:
        """A batch of `items` took `ns`."""
        for queue in self.queues:
            queue.batcher.measured(items, ns)

    def start(self, executors: Sequence[Executor], limiter: RateLimiter | None,
              cpus: Sequence[int | None] = (), short: ShortBatches | None = None) -> None:
        """Gives it its instances, one for each executor. limiter: lets those execute that have a rate_limiter; cpus:
        what their threads are pinned to, if given; short: the batches that need not wait for the threads of those on
        the CPU. Raises ModelConfigError: one could never execute; RepositoryError: there are no more threads."""
        batchers = [self.queues[i % len(self.queues)].batcher for i in range(len(executors))]
        limits = self.config.rate_limits
        gates = limiter.gates(limits, [batcher.wake_all for batcher in batchers]) if limiter and limits else (
            [None] * len(executors))
        instances = [
            Instance(f"{self.name}/{self.version} instance {i}" + ("" if device is None else f" on GPU {device}"),
                     batchers[i], executor, self.deliver, cpus[i] if cpus else None, gates[i],
                     short if device is None else None)
            for i, (executor, device) in enumerate(zip(executors, self.config.devices, strict=True))]
        for instance in instances:
            try:
                instance.start()
            except RepositoryError:
                for other in instances[len(self._instances):]:
                    other.end()
                self.drain()
                raise
            self._instances.append(instance)

    def submit(self, request: Request) -> None:
        if not (self._cached and self._cached.answers(request, self.revision)):
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        try:
            if self._sequences:
                self._sequences.submit(request)
            else:
                self.queues[0].submit(request)
        except (UnavailableError, DeadlineExceededError, InvalidRequestError) as error:
            rejected = isinstance(error, QueueFullError | DeadlineExceededError)
            self.failed(request, Failure.REJECTED if rejected else Failure.OTHER)
            raise

    def cancel(self, request: Request) -> None:
        if self._sequences and self._sequences.withdraw(request):
            self.failed(request, Failure.CANCELED)
        elif any(queue.batcher.withdraw(request) for queue in self.queues):
            self.failed(request, Failure.CANCELED)
            self._after(request)

    def drain(self) -> None:
        end = time.monotonic() + _RESCHEDULED_SECS
        while self._sequences and self._sequences.comes_again and (     # what they wait for is done on the loop
                time.monotonic() < end or not self._sequences.iterative):
            time.sleep(0.01)
        for queue in self.queues:
            queue.batcher.close()
        for instance in self._instances:
            instance.join()
        if self._cached:
            self._cached.drop()
        if self._sequences:
            post(self._loop, self._sequences.close)     # behind what their last executions gave
        # They refer to this model, too: without this their contexts' memory would wait for the cycle collector.
        self._instances.clear()

    def deliver(self, outcomes: list[Outcome], execution: BatchExecution | None) -> None:
        """Hands out what an execution gave, from any thread: nothing, where responses were sent one by one. None: it
        failed, or what it gave came later."""
        if self._sequences:
            outcomes = [outcome for outcome in outcomes if not self._comes_again(*outcome, execution)]
        post(self._loop, self._finish, outcomes, execution)

    def _execute_short(self) -> bool:
        """Executes a short batch on the event loop, if an instance is free and one waits."""
        for instance in self._instances:
            if (done := instance.execute_short()) is not None:
                self._finish(*done)
                return True
        return False

    def _comes_again(self, request: Request, result: Any, execution: BatchExecution | None) -> bool:
        """Whether a request is queued once more, for its model has not done with it; or ends as one that its queue does
        not take."""
        if result is not AGAIN or request.reply.gone:
            return False
        assert self._sequences is not None
        if request.trace and execution:
            post(self._loop, request.trace.executed, request.enqueued_ns, execution)
        try:
            self._sequences.again(request)
        except ServeError as error:
            post(self._loop, self._refuse_one, request, error)
        return True

    def _finish(self, outcomes: list[Outcome], execution: BatchExecution | None) -> None:
        """Hands out the results of a batch, on the event loop; None: its execution failed.

        Requests that were cancelled meanwhile, or whose deadline has passed, are not counted as successes.
        """
        now_ns = time.monotonic_ns()
        enqueued_ns, responding_ns = [], []
        for request, result in outcomes:
            if request.trace and execution:
                request.trace.executed(request.enqueued_ns, execution)
            if request.reply.gone:
                self.failed(request, Failure.CANCELED)
            else:
                if isinstance(result, Exception):
                    self.failed(request, Failure.BACKEND)
                elif 0 < request.deadline_ns < now_ns:
                    self.failed(request, Failure.CANCELED)
                    result = DeadlineExceededError(f"Deadline Exceeded: it passed while model '{self.name}' executed")
                else:
                    enqueued_ns.append(request.enqueued_ns)
                    if self.config.decoupled:
                        responding_ns.append(request.responding_ns(execution.encoded_ns if execution else now_ns))
                try:
                    if result is NO_MORE or isinstance(result, Exception):
                        request.end(result)
                    else:
                        request.reply.send(result)
                except Exception as error:      # a front's bug, which the others of the batch must not notice
                    log.error("model '%s': a request could not be answered", self.name, exc_info=error)
                    with suppress(Exception):
                        request.finish(error)
            self._after(request)
        if execution:
            batching = self.config.batching
            self.statistics.executed(execution, enqueued_ns, why_closed(
                execution.items, execution.started_ns - execution.enqueued_ns, batching.max_batch_size,
                batching.preferred_batch_sizes, batching.max_queue_delay_us), responding_ns)
            self.measured(execution.items, now_ns - execution.started_ns)
        elif enqueued_ns:
            self.statistics.answered(enqueued_ns, now_ns, responding_ns)

    def _refuse(self, expired: list[Request], error: ServeError) -> None:
        """Called on any thread. Each gets an error of its own: what is raised collects the frames it passes."""
        for request in expired:
            post(self._loop, self._refuse_one, request, type(error)(*error.args))

    def _refuse_one(self, request: Request, error: ServeError) -> None:
        """Ends a request that was not executed, on the event loop."""
        self.failed(request, Failure.REJECTED)
        request.finish(error)
        self._after(request)

    def _after(self, request: Request) -> None:
        if self._sequences:
            self._sequences.finished(request)
