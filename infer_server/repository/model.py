"""Loaded version of a model: the base class, and models whose requests queue for instances."""
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

from infer_server.backend import GpuDevice
from infer_server.batching.batch_times import ShortBatches
from infer_server.batching.batcher import Batcher
from infer_server.batching.cache import CachedResponses, ResponseCache
from infer_server.batching.event_loop import RequestQueue
from infer_server.batching.instances import Executor, Instance
from infer_server.batching.request import NO_MORE, RESCHEDULE, Outcome, Request
from infer_server.batching.sequences import Sequences
from infer_server.batching.statistics import BatchExecution, Failure, Statistics
from infer_server.config.config import ModelConfig, complete_policy
from infer_server.config.signature import ModelSignature
from infer_server.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    QueueFullError,
    RepositoryError,
    ServeError,
    UnavailableError,
    UnknownModelError,
)
from infer_server.observing.closing import closing_reason
from infer_server.protocol.parameters import digits
from infer_server.protos import model_config
from infer_server.rate_limiter import RateLimiter
from infer_server.repository.folders import Fingerprint
from infer_server.workers import post

log = logging.getLogger(__name__)

_LOADS = count()                    # distinguishes cached responses of a reloaded model

_RESCHEDULED_SECS = 30.0            # time for which a draining model may still reschedule requests


class VersionState(Enum):
    """State of a model version, with Triton's names as in RepositoryIndex."""
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True)
class Status:
    """State of one version of a model, and the reason for it."""
    state: VersionState
    reason: str = ""                    # why the version is not ready
    model: Model | None = None          # set while the version is ready
    replaces: bool = False              # True if an older version is served meanwhile, so that this is not a failure
    fingerprint: Fingerprint = field(default_factory=dict, compare=False)      # fingerprint of the loaded files

    @property
    def why(self) -> str:
        """Reason why the version is not ready, or its state."""
        return self.reason or self.state.value.lower()

    def matches(self, fingerprint: Fingerprint) -> bool:
        """Return True if loading a version with this fingerprint would give the loaded model again."""
        return self.model is not None and self.model.is_current and self.fingerprint == fingerprint

    def with_policy(self, message: model_config.ModelConfig) -> Status:
        """Return the status of a version that stays loaded under a configuration with another version_policy."""
        if self.model:
            self.model.config_message.version_policy.CopyFrom(message.version_policy)
            complete_policy(self.model.config_message)
        return replace(self, reason="")


def loaded_version(name: str, version: str, statuses: Mapping[int, Status]) -> Model:
    """Return the version of a model that a request names.

    Raises InvalidRequestError; UnknownModelError; UnavailableError if the version is not ready.
    """
    number = digits(version)
    if number is None:
        raise InvalidRequestError(f"failed to get model version from specified version string '{version}', "
                                  "version should be an integral value > 0")
    status = statuses.get(number)
    if status is None:
        known = ", ".join(map(str, sorted(statuses)))
        raise UnknownModelError(f"Request for unknown model: '{name}' version {version} is not found; it has {known}")
    if status.model is None:
        raise UnavailableError(f"Request for unknown model: '{name}' version {version} is not at ready state: "
                               f"{status.why}")
    return status.model


class Model(ABC):
    """Loaded version of a model, ready when constructed.

    `submit` and `cancel` belong to the event loop; the constructor and `drain` block and run on a worker thread.
    """
    memory_bytes: int = 0               # estimated memory use in bytes; 0 if unknown
    device_bytes: Mapping[int | None, int] = MappingProxyType({})   # memory_bytes by GPU number; None is the host
    gpus: Sequence[GpuDevice] = ()            # GPUs on which instances execute
    zero_copy_devices: Set[int | None] = frozenset()    # GPU numbers, or None for the host, whose shared memory
                                        # instances read in place; clients may write to the host's meanwhile
    load_secs: float = 0.0              # duration of the load in seconds, set by the repository
    warmup_secs: float = 0.0            # duration of the warm-up in seconds, included in load_secs
    precision: str = ""                 # precision of the engine; "" if there is none
    built_secs: float = 0.0             # build time of the engine in seconds since the epoch; 0 if there is none
    loaded_ns: int = 0                  # time at which the load ended, on the clock of Counters.used_ns
    labels: Mapping[str, Sequence[str]] = MappingProxyType({})      # class labels by output

    def __init__(self, name: str, version: int, message: model_config.ModelConfig, config: ModelConfig,
                 signature: ModelSignature) -> None:
        """Create a model; `message` is the completed configuration and `config` is parsed from it."""
        self.name = name
        self.version = version
        self.config_message = message
        self.config = config
        self.signature = signature
        self.statistics = Statistics()
        self.prepared: dict[Hashable, Any] = {}         # serving.py's checked request layouts
        self.repeated: dict[Hashable, Any] = {}         # the endpoints' fast path for layouts that come again
        self.served: dict[tuple[str, ...], Any] = {}    # serving.py's response layouts, by requested outputs
        self._key = f"{name}/{version} {next(_LOADS)} ".encode()
        self._cached: CachedResponses | None = None

    def use_cache(self, cache: ResponseCache) -> None:
        """Enable the response cache. Call this before the first request."""
        self._cached, self.zero_copy_devices = CachedResponses(cache, self.statistics, self._key), frozenset()

    @property
    def platform(self) -> str:
        """Platform or backend that the configuration names."""
        return self.config_message.platform or self.config_message.backend

    @property
    def revision(self) -> bytes:
        """Bytes that identify this load of the model; they change when it is loaded again."""
        return self._key

    @property
    def is_current(self) -> bool:
        """True if the models that this one calls are still those that it was loaded with."""
        return True

    @property
    def is_decoupled(self) -> bool:
        """True if requests may have any number of responses."""
        return self.config.decoupled

    @property
    def is_repeatable(self) -> bool:
        """True if equal requests have equal single responses, which the response cache requires."""
        return not self.config.decoupled and self.config.sequences is None

    @property
    @abstractmethod
    def pending(self) -> int:
        """Number of requests that wait to be executed."""

    @property
    def is_busy(self) -> bool:
        """True if there are requests that would fail if the model were unloaded."""
        return self.pending > 0

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises
        ------
        UnavailableError
            The queue is full or closed.
        DeadlineExceededError
            The request's deadline would pass in the queue.
        """

    @abstractmethod
    def cancel(self, request: Request) -> None:
        """Drop a request whose client has disconnected, or its result if it is already executing."""

    @abstractmethod
    def drain(self) -> None:
        """Accept no more requests, execute the queued ones, and close the instances."""

    async def is_ready(self) -> bool:
        """Return the model's own readiness and that of the models it calls."""
        return True

    def failed(self, request: Request, reason: Failure) -> None:
        self.statistics.failed(reason, time.monotonic_ns() - request.received_ns)


class QueuedModel(Model):
    """Model whose requests wait in a queue for instances, which execute them in batches."""

    def __init__(self, name: str, version: int, message: model_config.ModelConfig, config: ModelConfig,
                 signature: ModelSignature, loop: asyncio.AbstractEventLoop) -> None:
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

    def record_time(self, items: int, ns: int) -> None:
        """Record that a batch of `items` took `ns` nanoseconds."""
        for queue in self.queues:
            queue.batcher.record_time(items, ns)

    def start(self, executors: Sequence[Executor], limiter: RateLimiter | None,
              cpus: Sequence[int | None] = (), short: ShortBatches | None = None) -> None:
        """Create and start one instance for each executor.

        Parameters
        ----------
        executors : sequence of Executor
            Executors on the devices of `config.devices`.
        limiter : RateLimiter, optional
            Limiter of the executions of models with a rate_limiter.
        cpus : sequence of int, optional
            CPU to which each instance's thread is pinned.
        short : ShortBatches, optional
            Measured times of batches that may be executed on the event loop, for instances on the CPU.

        Raises
        ------
        ModelConfigError
            An instance could never execute under its rate limits.
        RepositoryError
            A thread could not be started.
        """
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
        while self._sequences and self._sequences.may_reschedule and (     # rescheduling happens on the event loop
                time.monotonic() < end or not self._sequences.iterative):
            time.sleep(0.01)
        for queue in self.queues:
            queue.batcher.close()
        for instance in self._instances:
            instance.join()
        if self._cached:
            self._cached.drop()
        if self._sequences:
            post(self._loop, self._sequences.close)     # after the results of the last executions
        # Break the reference cycle with this model, so that contexts are freed without the cycle collector.
        self._instances.clear()

    def deliver(self, outcomes: list[Outcome], execution: BatchExecution | None) -> None:
        """Deliver the results of an execution, from any thread.

        `outcomes` is empty if response senders sent the responses; `execution` is None if it failed or ended before
        the outcomes came.
        """
        if self._sequences:
            outcomes = [outcome for outcome in outcomes if not self._reschedules(*outcome, execution)]
        post(self._loop, self._finish, outcomes, execution)

    def _execute_short(self) -> bool:
        """Execute a short batch on the event loop if an instance is free and such a batch waits."""
        for instance in self._instances:
            if done := instance.execute_short():
                self._finish(*done)
                return True
            if instance.may_execute_short:          # no batch is short: all instances have one queue
                return False
        return False

    def _reschedules(self, request: Request, result: Any, execution: BatchExecution | None) -> bool:
        """Reschedule a request if its model returned RESCHEDULE; return False if it is finished."""
        if result is not RESCHEDULE or request.reply.gone:
            return False
        assert self._sequences is not None
        if request.trace and execution:
            post(self._loop, request.trace.executed, request.enqueued_ns, execution)
        try:
            self._sequences.reschedule(request)
        except ServeError as error:
            post(self._loop, self._refuse_one, request, error)
        return True

    def _finish(self, outcomes: list[Outcome], execution: BatchExecution | None) -> None:
        """Deliver the results of a batch on the event loop; `execution` is None if the execution failed.

        Requests that were cancelled meanwhile or whose deadline has passed are not counted as successes.
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
                except Exception as error:      # an endpoint's internal error must not affect the rest of the batch
                    log.error("model '%s': a request could not be answered", self.name, exc_info=error)
                    with suppress(Exception):
                        request.finish(error)
            self._after(request)
        if execution:
            batching = self.config.batching
            self.statistics.executed(execution, enqueued_ns, closing_reason(
                execution.items, execution.started_ns - execution.enqueued_ns, batching.max_batch_size,
                batching.preferred_batch_sizes, batching.max_queue_delay_us), responding_ns)
            self.record_time(execution.items, now_ns - execution.started_ns)
        elif enqueued_ns:
            self.statistics.answered(enqueued_ns, now_ns, responding_ns)

    def _refuse(self, expired: list[Request], error: ServeError) -> None:
        """Fail expired requests from any thread, each with its own exception: a shared one collects tracebacks."""
        for request in expired:
            post(self._loop, self._refuse_one, request, type(error)(*error.args))

    def _refuse_one(self, request: Request, error: ServeError) -> None:
        """Fail a request that was not executed, on the event loop."""
        self.failed(request, Failure.REJECTED)
        request.finish(error)
        self._after(request)

    def _after(self, request: Request) -> None:
        if self._sequences:
            self._sequences.finished(request)
