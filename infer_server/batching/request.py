"""A request on its way through the server. It ends exactly once: answered, failed, refused, expired or cancelled."""
from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from numpy.typing import NDArray

from infer_server.errors import ServeError
from infer_server.gpu_tensors import GpuRoom
from infer_server.observing.traces import Trace

Arrays = Mapping[str, NDArray[Any]]
_NONE: Mapping[str, Any] = MappingProxyType({})


class Outputs(dict[str, NDArray[Any]]):
    """Arrays of a model that leaves some of its outputs out, or says something beside them: parameters of its
    response."""

    def __init__(self, arrays: Arrays, parameters: Mapping[str, Any]) -> None:
        super().__init__(arrays)
        self.parameters = parameters


def parameters_of(computed: Arrays) -> Mapping[str, Any]:
    return computed.parameters if isinstance(computed, Outputs) else _NONE


class Reply(Protocol):
    """Where a request's response goes: every protocol has its own. Belongs to the event loop."""

    @property
    def gone(self) -> bool:
        """Whether nobody waits for it any more: what comes then is dropped."""

    def send(self, response: Any) -> None:
        """response: what the request's `encode` made."""

    def fail(self, error: Exception) -> None: ...


@runtime_checkable
class StreamReply(Reply, Protocol):
    """A reply that takes any number of responses, as models of the decoupled transaction policy have them: part() for
    each, then end(); or fail(). Of other models it gets one send()."""

    def part(self, response: Any, is_last: bool = False) -> None:
        """A response; more may come, unless it says itself that it is the last."""

    def end(self) -> None:
        """There are no more, and may have been none. Raises ServeError: its client asked for another number of them; it
        is yet to be told, by fail()."""


class EncodesTogether(Protocol):
    """An encoder of requests that can make the responses of several at once."""

    def each(self, computed: Arrays, count: int) -> Sequence[Any] | None:
        """Return the responses of `count` requests of one item each; None if they are to be made one by one."""


@dataclass(frozen=True, slots=True)
class InSequence:
    """Where a request stands in the sequence of requests that it belongs to."""
    id: int | str                               # the correlation id
    start: bool = False
    end: bool = False


class Window(NamedTuple):
    """Limits of the responses to a request that have been made and not yet been taken."""
    responses: int                              # 0: any number
    size: int                                   # bytes


class AwaitedReply:
    """A reply that a coroutine awaits: (await reply.response) returns what is sent, or raises the error."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.response: asyncio.Future[Any] = loop.create_future()

    @property
    def gone(self) -> bool:
        return self.response.done()

    def send(self, response: Any) -> None:
        self.response.set_result(response)

    def fail(self, error: Exception) -> None:
        self.response.set_exception(error)


@dataclass(slots=True, eq=False)
class Request:
    """One inference, of some items."""
    inputs: Arrays                              # views of the received message: read there, if they are large
                                                # and the engine can, else copied into the batch slots;
                                                # or GpuTensors, on GPUs that the model's instances reach
    items: int                                  # items on the batch axis; 1 for a model without one
    shape_key: Hashable                         # the shapes of one item
    encode: Callable[[Arrays], Any]             # its items of the outputs -> its response; on an instance's thread
    reply: Reply
    timeout_us: int = 0                         # in the queue, as asked for by the client; 0: the model's default
    priority: int = 0                           # 1 is the highest; 0: the model's default
    sequence: InSequence | None = None
    id: str = ""                                # the client's
    parameters: Mapping[str, Any] = field(default_factory=dict)     # likewise
    rooms: Mapping[str, GpuRoom] = field(default_factory=dict)      # on GPUs, where outputs are to lie
    outputs: tuple[str, ...] = ()               # those asked for; none: all
    window: Window | None = None                # of a decoupled model; None: its responses come as it makes them
    taken: Callable[[], None] | None = None     # with a window, for the reply to call for each response, in order, once
                                                # that holds nothing any more
    trace: Trace | None = None                 # told of its execution, where requests are traced
    lengthy: bool = False                       # encode() does what may take longer than its batch: see Call

    received_ns: int = 0                        # set by the endpoint
    deadline_ns: int = 0                        # by the endpoint, too: when its client gives up; 0: never
    enqueued_ns: int = 0                        # the rest by the batcher
    expires_ns: int = 0                         # when its timeout in the queue ends; 0: never
    level: int = 0                              # of the queue's priority levels
    responded_ns: int = 0                       # by part(): the first of several responses was handed on

    def follow(self, trace: Trace, model: str, version: int) -> None:
        """Has a trace see its way through a model that it is about to be queued for."""
        self.trace, self.encode = trace, trace.seeing(self.encode)
        trace.asks(model, version, self.inputs)

    def part(self, response: Any, is_last: bool = False) -> None:
        """Hands on one of several responses, on the event loop; see StreamReply."""
        if not self.reply.gone and isinstance(self.reply, StreamReply):
            self.responded_ns = self.responded_ns or time.monotonic_ns()
            self.reply.part(response, is_last)

    def responding_ns(self, until_ns: int) -> int:
        """How long it had been responding by then; 0 for one that has one response."""
        return max(0, until_ns - self.responded_ns) if self.responded_ns else 0

    def finish(self, result: Any) -> None:
        """Hands a response, or an exception, to the reply, on the event loop; nothing happens if nobody waits."""
        if not self.reply.gone:
            self.end(result)

    def end(self, result: Any) -> None:
        """The same for a reply that is waited for."""
        if isinstance(result, Exception):
            self.reply.fail(result)
        elif result is NO_MORE and isinstance(self.reply, StreamReply):
            try:
                self.reply.end()
            except ServeError as error:
                self.reply.fail(error)
        else:
            self.reply.send(result)


NO_MORE = object()                              # the result of a request whose responses were all handed on as parts
AGAIN = object()                                # of one that its model has not done with: it is executed once more
Outcome = tuple[Request, Any]                   # its response, or the exception that it ends with
