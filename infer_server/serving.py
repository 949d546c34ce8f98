"""What happens to an inference, whatever protocol it came by: its model is found, it is compared with that, queued,
counted and, if its client goes away, cancelled.

An endpoint writes a Call, which decodes its protocol's messages, and a Reply, which takes the response:

    submitted = inferences.submit(call, reply)      # raises a ServeError
    submitted.cancel()                              # its client went away
"""
from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from infer_server.batching.request import Arrays, InSequence, Reply, Request, StreamReply
from infer_server.batching.statistics import Failure
from infer_server.config.config import TensorSpec
from infer_server.config.sequences import sequence_of
from infer_server.config.signature import Fit
from infer_server.errors import InvalidRequestError, MemoryLimitError, NotServedError, UnavailableError
from infer_server.gpu_tensors import GpuRoom
from infer_server.observing.access_log import CANCELED, OK, AccessEntry, AccessLog
from infer_server.observing.traces import Trace, Tracer
from infer_server.protocol.codec import InputTensor
from infer_server.protocol.parameters import Parameters, check_forwarded, check_reserved, for_models, natural
from infer_server.repository.model import Model
from infer_server.repository.repository import Repository

_KEPT = 256                         # of the forms of a model's requests
_NONE: Mapping[str, Any] = MappingProxyType({})
# Where requests are answered with one response each, by protocol, in Triton's words.
_ONE_RESPONSE = {"gRPC": "ModelInfer RPC", "HTTP": "HTTP end point"}


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What a response says of where it comes from, and the outputs that it has."""
    model: str
    version: int
    outputs: tuple[TensorSpec, ...]
    batched: bool                   # they have a leading batch axis
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)       # of their classes, by output


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What follows of a request's form alone: it is found once for all requests of a model that have the same."""
    tensors: Sequence[InputTensor]
    fit: Fit
    served: Served
    answer_bytes: int               # 0: not known before
    parameters: Parameters
    timeout_us: int
    priority: int
    sequence: InSequence | None
    outputs: tuple[str, ...]        # their names


class Call(ABC):
    """An inference as an endpoint received it. Its methods are called in the order in which they stand here, so that no
    more is decoded of a message than fits the model; each may raise a ServeError. Of a form that the model has met,
    inputs(), outputs() and parameters() are not called."""
    model: str
    version: str                    # "": the highest that is ready
    received_ns: int
    deadline_ns: int = 0            # when its client gives up; 0: never
    id: str = ""                    # the client's name of it
    protocol: str                   # for the access log, and for errors: "gRPC" or "HTTP"
    form: Hashable = None           # equal for requests that differ in contents and id alone; None: not known
    rooms: Mapping[str, GpuRoom] = {}       # of outputs on GPUs; known when encoder() has been called
    lengthy: bool = False           # encoder()'s compresses the response, or copies outputs into shared memory

    @abstractmethod
    def client(self) -> str:
        """Its address, for the access log."""

    def headers(self) -> Iterable[tuple[str, str]]:
        """What came beside the message: names, in small letters, and texts."""
        return ()

    def header(self, name: str) -> str:
        """What came beside the message under that name; "": nothing."""
        return dict(self.headers()).get(name, "")

    @abstractmethod
    def inputs(self) -> Sequence[InputTensor]:
        """As the message declares them."""

    @abstractmethod
    def outputs(self) -> Iterable[str]:
        """The names of those asked for; none: all of the model's."""

    @abstractmethod
    def parameters(self) -> Parameters:
        """What its client asks for beside the tensors: timeout (in us), priority, sequence_id, ..."""

    @abstractmethod
    def expect(self, response_bytes: int, decoded_bytes: int) -> None:
        """Takes the bytes that the tensors of the response will have, and those of tensors that are made of files.
        Raises MemoryLimitError."""

    @abstractmethod
    def contents(self, tensors: Sequence[InputTensor], devices: Set[int | None]) -> Mapping[str, Any]:
        """The arrays of the inputs, which fit the model; in the memory of these devices the very tensors of clients."""

    @abstractmethod
    def encoder(self, served: Served) -> Callable[[Arrays], Any]:
        """What makes the response of the outputs' arrays, on an instance's thread; or returns the ServeError why there
        is none."""


class Submitted(NamedTuple):
    """A request in the queue of its model."""
    model: Model
    request: Request

    def cancel(self) -> None:
        """Drops it, for nobody waits any more; if it is executing already, its result is dropped instead."""
        self.model.cancel(self.request)
        if isinstance(self.request.reply, LoggedReply):
            self.request.reply.end_with(CANCELED)


class LoggedReply:
    """A reply whose end is told: to the access log, to the tracer."""

    def __init__(self, reply: Reply, entry: AccessEntry, trace: Trace | None,
                 tell: Callable[[LoggedReply, str], None]) -> None:
        self._reply, self.entry, self.trace, self._tell = reply, entry, trace, tell
        self._ended = False

    @property
    def gone(self) -> bool:
        return self._reply.gone

    def send(self, response: Any) -> None:
        self._responding()
        self._reply.send(response)
        self.entry.responses += 1
        self.end_with(OK)

    def fail(self, error: Exception) -> None:
        self._responding()
        self._reply.fail(error)
        self.end_with(type(error).__name__)

    def end_with(self, status: str) -> None:
        if not self._ended:
            self._ended = True
            self._tell(self, status)

    def _responding(self) -> None:
        if self.trace:
            self.trace.responding()


class LoggedStreamReply(LoggedReply):
    """The same of one that takes any number of responses."""
    _reply: StreamReply

    def part(self, response: Any, is_last: bool = False) -> None:
        self._responding()
        self._reply.part(response, is_last)
        self.entry.responses += 1

    def end(self) -> None:
        self._responding()
        self._reply.end()
        self.end_with(OK)


class Inferences:
    """The way from every endpoint to the models. Belongs to the event loop."""

    def __init__(self, repository: Repository, access_log: AccessLog | None = None,
                 tracer: Tracer | None = None, forwarded: Mapping[str, re.Pattern[str]] = _NONE) -> None:
        """forwarded: of headers that become parameters, by protocol: whose names it finds."""
        self._repository, self._forwarded = repository, forwarded
        self._access_log, self._tracer = access_log, tracer
        self._closed = False

    def observes(self, protocol: str) -> bool:
        """Return True if requests over a protocol are traced or logged, or if their headers become parameters."""
        return bool(self._tracer or self._access_log or protocol in self._forwarded)

    def find(self, model: str, version: str) -> Model:
        """Return a model that takes requests. Raises ServeErrors."""
        found = self._repository.find(model, version)
        if self._closed:
            raise UnavailableError.closed(found.name)
        return found

    def close(self) -> None:
        """Takes no more; what models ask of each other for those that were taken goes on."""
        self._closed = True

    def submit(self, call: Call, reply: Reply) -> Submitted:
        """Queues an inference. Raises ServeErrors: no such model, what does not fit it, no room, too late."""
        trace = self._tracer.begin(call.model, call.header) if self._tracer else None
        if not (trace or self._access_log):
            submitted = self._prepared(call, reply)
            submitted.model.submit(submitted.request)
            return submitted
        entry = AccessEntry(call.client(), call.protocol, call.id, call.model, call.version, call.received_ns)
        kind = LoggedStreamReply if isinstance(reply, StreamReply) else LoggedReply
        logged = kind(reply, entry, trace, self._ended)
        try:
            submitted = model, request = self._prepared(call, logged)
            entry.batch = request.items
            if trace:
                request.follow(trace, model.name, model.version)
            model.submit(request)
        except Exception as error:
            logged.end_with(type(error).__name__)
            raise
        return submitted

    def _ended(self, reply: LoggedReply, status: str) -> None:
        if self._access_log:
            self._access_log.end(reply.entry, status)
        if reply.trace:
            reply.trace.end(reply.entry, status)

    def _prepared(self, call: Call, reply: Reply) -> Submitted:
        """The request, to be submitted to its model."""
        model = self.find(call.model, call.version)
        if model.config.decoupled and not isinstance(reply, StreamReply):
            raise NotServedError(f"{_ONE_RESPONSE[call.protocol]} doesn't support models with decoupled transaction "
                                 f"policy: model '{model.name}' has any number of responses; ask for it in a stream "
                                 "(ModelStreamInfer, generate_stream)")
        try:
            request = _request(call, model, reply)
            if pattern := self._forwarded.get(call.protocol):
                found = {name: text for name, text in call.headers() if pattern.search(name)}
                check_forwarded(found)
                request.parameters = {**request.parameters, **found}
        except (InvalidRequestError, NotServedError, MemoryLimitError):
            model.statistics.failed(Failure.OTHER, time.monotonic_ns() - call.received_ns)
            raise
        return Submitted(model, request)


def _request(call: Call, model: Model, reply: Reply) -> Request:
    prepared: Prepared | None = model.prepared.get(call.form) if call.form is not None else None
    if prepared is None:
        prepared = _prepare(call, model)
        if call.form is not None:
            if len(model.prepared) >= _KEPT:
                model.prepared.clear()
            model.prepared[call.form] = prepared
    call.expect(prepared.answer_bytes, prepared.fit.decoded_bytes)
    return Request(
        inputs=model.signature.to_model(call.contents(prepared.tensors, model.zero_copy_devices), prepared.fit.items),
        items=prepared.fit.items,
        shape_key=prepared.fit.shape_key, encode=model.signature.to_client(call.encoder(prepared.served)), reply=reply,
        lengthy=call.lengthy, output_buffers=call.rooms if model.zero_copy_devices else {},
        timeout_us=prepared.timeout_us, received_ns=call.received_ns, deadline_ns=call.deadline_ns, id=call.id,
        parameters=prepared.parameters, priority=prepared.priority, sequence=prepared.sequence,
        outputs=prepared.outputs)


def _prepare(call: Call, model: Model) -> Prepared:
    tensors = call.inputs()
    fit = model.signature.fit(tensors)
    outputs = model.signature.choose_outputs(call.outputs())
    parameters = call.parameters()
    if parameters:
        check_reserved(parameters)
    batched, names = model.config.batched, tuple(spec.name for spec in outputs)
    return Prepared(tensors, fit, _served(model, outputs, names),
                    (fit.items if batched else 1) * sum(spec.item_bytes for spec in outputs), for_models(parameters),
                    natural(parameters, "timeout"), natural(parameters, "priority"), sequence_of(parameters), names)


def _served(model: Model, outputs: tuple[TensorSpec, ...], names: tuple[str, ...]) -> Served:
    """One for all forms with these outputs, by which encoders know what they have encoded before: a sequence alone has
    a form for each of its requests."""
    served: Served | None = model.served.get(names)
    if served is None:
        if len(model.served) >= _KEPT:
            model.served.clear()
        served = model.served[names] = Served(model.name, model.version, outputs, model.config.batched, model.labels)
    return served
