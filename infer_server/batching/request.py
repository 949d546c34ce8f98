"""Inference requests inside the server. Each ends exactly once: answered, failed, refused, expired or cancelled."""
from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from numpy.typing import NDArray

from infer_server.backend import CacheContext
from infer_server.errors import ServeError
from infer_server.gpu_tensors import GpuBuffer
from infer_server.observing.traces import RequestTrace

Arrays = Mapping[str, NDArray[Any]]
_NONE: Mapping[str, Any] = MappingProxyType({})


class Outputs(dict[str, NDArray[Any]]):
    """Outputs with response parameters, or with some outputs left out."""

    def __init__(self, arrays: Arrays, parameters: Mapping[str, Any]) -> None:
        super().__init__(arrays)
        self.parameters = parameters


def parameters_of(computed: Arrays) -> Mapping[str, Any]:
    return computed.parameters if isinstance(computed, Outputs) else _NONE


class Reply(Protocol):
    """Receiver of a request's response; each protocol has its own. Belongs to the event loop."""

    @property
    def gone(self) -> bool:
        """True if nobody waits for the response any more; later ones are dropped."""

    def send(self, response: Any) -> None:
        """Send the response, a result of the request's `encode`."""

    def fail(self, error: Exception) -> None: ...


@runtime_checkable
class StreamReply(Reply, Protocol):
    """Receiver of any number of responses, as decoupled models send them.

    A decoupled model calls part() for each response, then end(), or else fail(). Other models call send() once.
    """

    def part(self, response: Any, is_last: bool = False) -> None:
        """Send a response; more may follow unless `is_last`."""

    def end(self) -> None:
        """End the responses, of which there may be none.

        Raises ServeError if the client's call requires another number of responses; then fail() is yet to be called.
        """


class EncodesTogether(Protocol):
    """Encoder that can make the responses of several requests with one call."""

    def each(self, computed: Arrays, count: int) -> Sequence[Any] | None:
        """Return the responses of `count` requests with equally many items, or None if each is to be encoded alone."""


@dataclass(frozen=True, slots=True)
class InSequence:
    """Position of a request in its sequence."""
    id: int | str                               # correlation id
    start: bool = False
    end: bool = False


class SequenceCache:
    """Cache of one sequence; it takes memory from the first request on, until it is released."""
    __slots__ = ("context",)

    def __init__(self) -> None:
        self.context: CacheContext | None = None

    def release(self) -> None:
        """Free the memory. No request of the sequence executes."""
        self.context = None


class FlowWindow(NamedTuple):
    """Flow control window: limits of the responses to a request that were made but not yet consumed."""
    responses: int                              # limit of their number; 0 for none
    size: int                                   # limit of their bytes


@dataclass(slots=True, eq=False)
class Request:
    """Inference request with one or more items."""
    inputs: Arrays                              # views of the received message, or GpuTensors on GPUs in the
                                                # model's `zero_copy_devices`; large ones may be read in place
    items: int                                  # items on the batch axis; 1 for a model without one
    shape_key: Hashable                         # shapes of one item
    encode: Callable[[Arrays], Any]             # makes the response from the outputs, on an instance's thread
    reply: Reply
    timeout_us: int = 0                         # queue timeout set by the client; 0 is the model's default
    priority: int = 0                           # 1 is the highest; 0 is the model's default
    sequence: InSequence | None = None
    cache: SequenceCache | None = None          # states of the sequence that grow in place
    id: str = ""                                # request id set by the client
    parameters: Mapping[str, Any] = field(default_factory=dict)     # custom parameters set by the client
    output_buffers: Mapping[str, GpuBuffer] = field(default_factory=dict)   # GPU memory to write outputs to
    outputs: tuple[str, ...] = ()               # requested outputs; empty for all
    window: FlowWindow | None = None                # limits a decoupled model; None for no flow control
    on_consumed: Callable[[], None] | None = None   # with a window: the reply calls it for each response, in order,
                                                # once the response holds no more memory
    trace: RequestTrace | None = None                  # records the execution, if requests are traced
    lengthy: bool = False                       # encode() may take longer than the execution: see InferenceCall

    received_ns: int = 0                        # set by the endpoint
    deadline_ns: int = 0                        # client's deadline, set by the endpoint; 0 for none
    enqueued_ns: int = 0                        # this and the following are set by the batcher
    expires_ns: int = 0                         # time at which the queue timeout ends; 0 for never
    level: int = 0                              # index of the priority level
    responded_ns: int = 0                       # time of the first of several responses, set by part()

    def follow(self, trace: RequestTrace, model: str, version: int) -> None:
        """Attach a trace before the request is queued."""
        self.trace, self.encode = trace, trace.wrap_encoder(self.encode)
        trace.set_model(model, version, self.inputs)

    def part(self, response: Any, is_last: bool = False) -> None:
        """Send one of several responses, on the event loop; see StreamReply."""
        if not self.reply.gone and isinstance(self.reply, StreamReply):
            self.responded_ns = self.responded_ns or time.monotonic_ns()
            self.reply.part(response, is_last)

    def responding_ns(self, until_ns: int) -> int:
        """Return the time from the first response until `until_ns`; 0 for a request with a single response."""
        return max(0, until_ns - self.responded_ns) if self.responded_ns else 0

    def finish(self, result: Any) -> None:
        """End with a response or an exception, on the event loop; do nothing if nobody waits."""
        if not self.reply.gone:
            self.end(result)

    def end(self, result: Any) -> None:
        """End with a response or an exception, on the event loop, without checking that somebody waits."""
        if isinstance(result, Exception):
            self.reply.fail(result)
        elif result is NO_MORE and isinstance(self.reply, StreamReply):
            try:
                self.reply.end()
            except ServeError as error:
                self.reply.fail(error)
        else:
            self.reply.send(result)


NO_MORE = object()                              # result of a request whose responses were all sent as parts
RESCHEDULE = object()                           # result of a request that its model wants to execute again
Outcome = tuple[Request, Any]                   # request with its response or exception
