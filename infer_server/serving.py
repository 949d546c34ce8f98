"""Common path of inferences of all protocols: look up the model, check the request, queue it, log it, cancel it.

An endpoint implements an InferenceCall, which decodes its protocol's messages, and a Reply, which gets the response:

    submitted = inferences.submit(call, reply)      # raises a ServeError
    submitted.cancel()                              # its client has disconnected
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
from infer_server.gpu_tensors import GpuBuffer
from infer_server.observing.access_log import CANCELED, OK, AccessEntry, AccessLog
from infer_server.observing.traces import RequestTrace, Tracer
from infer_server.protocol.codec import InputTensor
from infer_server.protocol.parameters import Parameters, check_forwarded, check_reserved, for_models, natural
from infer_server.repository.model import Model
from infer_server.repository.repository import Repository

_MAX_CACHED_LAYOUTS = 256           # number of request layouts cached for each model
_NONE: Mapping[str, Any] = MappingProxyType({})
# Triton's names of the calls with a single response, by protocol.
_ONE_RESPONSE = {"gRPC": "ModelInfer RPC", "HTTP": "HTTP end point"}


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Metadata of a response: model and outputs."""
    model: str
    version: int
    outputs: tuple[TensorSpec, ...]
    batched: bool                   # True if the outputs have a leading batch axis
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)       # class labels by output


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Checked request layout, shared by all requests to a model that differ only in contents and id."""
    tensors: Sequence[InputTensor]
    fit: Fit
    served: Served
    answer_bytes: int               # size of the response's tensors; 0 if not known in advance
    parameters: Parameters
    timeout_us: int
    priority: int
    sequence: InSequence | None
    outputs: tuple[str, ...]        # names of the outputs to send


class InferenceCall(ABC):
    """Inference as an endpoint received it.

    Its methods are called in the order in which they are defined, so that no more of a message is decoded than matches
    the model; each may raise a ServeError. inputs(), outputs() and parameters() are skipped for a known layout.
    """
    model: str
    version: str                    # "" for the highest ready version
    received_ns: int
    deadline_ns: int = 0            # client's deadline; 0 for none
    id: str = ""                    # request id of the client
    protocol: str                   # "gRPC" or "HTTP", for the access log and for errors
    form: Hashable = None           # equal for requests that differ only in contents and id; None if not known
    gpu_buffers: Mapping[str, GpuBuffer] = {}  # output buffers on GPUs, known after encoder() was called
    lengthy: bool = False           # True if the encoder compresses the response or writes to shared memory

    @abstractmethod
    def client(self) -> str:
        """Return the client's address, for the access log."""

    def headers(self) -> Iterable[tuple[str, str]]:
        """Return the request headers: names in lower case, and values."""
        return ()

    def header(self, name: str) -> str:
        """Return the value of a header; "" if there is none."""
        return dict(self.headers()).get(name, "")

    @abstractmethod
    def inputs(self) -> Sequence[InputTensor]:
        """Return the inputs that the message declares."""

    @abstractmethod
    def outputs(self) -> Iterable[str]:
        """Return the names of the requested outputs; empty for all."""

    @abstractmethod
    def parameters(self) -> Parameters:
        """Return the parameters of the request: timeout (in us), priority, sequence_id, ..."""

    @abstractmethod
    def expect(self, response_bytes: int, decoded_bytes: int) -> None:
        """Reserve memory for the tensors of the response and for decoded files. Raises MemoryLimitError."""

    @abstractmethod
    def contents(self, tensors: Sequence[InputTensor], devices: Set[int | None]) -> Mapping[str, Any]:
        """Return the arrays of the inputs, which match the model.

        On `devices`, tensors in clients' memory are not copied.
        """

    @abstractmethod
    def encoder(self, served: Served) -> Callable[[Arrays], Any]:
        """Return a function that makes the response on an instance's thread, or returns a ServeError."""


class Submitted(NamedTuple):
    """Request in the queue of its model."""
    model: Model
    request: Request

    def cancel(self) -> None:
        """Drop the request, or its result if it is already executing."""
        self.model.cancel(self.request)
        if isinstance(self.request.reply, LoggedReply):
            self.request.reply.end_with(CANCELED)


class LoggedReply:
    """Reply that reports its end to the access log and the tracer."""

    def __init__(self, reply: Reply, entry: AccessEntry, trace: RequestTrace | None,
                 on_end: Callable[[LoggedReply, str], None]) -> None:
        self._reply, self.entry, self.trace, self._on_end = reply, entry, trace, on_end
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
            self._on_end(self, status)

    def _responding(self) -> None:
        if self.trace:
            self.trace.responding()


class LoggedStreamReply(LoggedReply):
    """StreamReply that reports its end to the access log and the tracer."""
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
    """Entry point of all endpoints to the models. Belongs to the event loop."""

    def __init__(self, repository: Repository, access_log: AccessLog | None = None,
                 tracer: Tracer | None = None, forwarded: Mapping[str, re.Pattern[str]] = _NONE) -> None:
        """Serve the models of a repository.

        Headers that match a pattern of `forwarded`, by protocol, become parameters.
        """
        self._repository, self._forwarded = repository, forwarded
        self._access_log, self._tracer = access_log, tracer
        self._closed = False

    def observes(self, protocol: str) -> bool:
        """Return True if requests of a protocol are traced or logged, or if their headers become parameters."""
        return bool(self._tracer or self._access_log or protocol in self._forwarded)

    def find(self, model: str, version: str) -> Model:
        """Return a model that accepts requests. Raises ServeError."""
        loaded = self._repository.find(model, version)
        if self._closed:
            raise UnavailableError.closed(loaded.name)
        return loaded

    def close(self) -> None:
        """Refuse new inferences; requests between models for accepted ones continue."""
        self._closed = True

    def submit(self, call: InferenceCall, reply: Reply) -> Submitted:
        """Queue an inference.

        Raises ServeError if the model is unknown, the request invalid, memory full, or it is too late.
        """
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

    def _prepared(self, call: InferenceCall, reply: Reply) -> Submitted:
        """Return the request for submission to its model."""
        model = self.find(call.model, call.version)
        if model.config.decoupled and not isinstance(reply, StreamReply):
            raise NotServedError(f"{_ONE_RESPONSE[call.protocol]} doesn't support models with decoupled transaction "
                                 f"policy: model '{model.name}' has any number of responses; use a stream "
                                 "(ModelStreamInfer, generate_stream)")
        try:
            request = _request(call, model, reply)
            if pattern := self._forwarded.get(call.protocol):
                forwarded = {name: text for name, text in call.headers() if pattern.search(name)}
                check_forwarded(forwarded)
                request.parameters = {**request.parameters, **forwarded}
        except (InvalidRequestError, NotServedError, MemoryLimitError):
            model.statistics.failed(Failure.OTHER, time.monotonic_ns() - call.received_ns)
            raise
        return Submitted(model, request)


def _request(call: InferenceCall, model: Model, reply: Reply) -> Request:
    prepared: Prepared | None = model.prepared.get(call.form) if call.form is not None else None
    if prepared is None:
        prepared = _prepare(call, model)
        if call.form is not None:
            if len(model.prepared) >= _MAX_CACHED_LAYOUTS:
                model.prepared.clear()
            model.prepared[call.form] = prepared
    call.expect(prepared.answer_bytes, prepared.fit.decoded_bytes)
    return Request(
        inputs=model.signature.to_model(call.contents(prepared.tensors, model.zero_copy_devices), prepared.fit.items),
        items=prepared.fit.items,
        shape_key=prepared.fit.shape_key, encode=model.signature.to_client(call.encoder(prepared.served)), reply=reply,
        lengthy=call.lengthy, output_buffers=call.gpu_buffers if model.zero_copy_devices else {},
        timeout_us=prepared.timeout_us, received_ns=call.received_ns, deadline_ns=call.deadline_ns, id=call.id,
        parameters=prepared.parameters, priority=prepared.priority, sequence=prepared.sequence,
        outputs=prepared.outputs)


def _prepare(call: InferenceCall, model: Model) -> Prepared:
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
    """Return the response metadata for these outputs, one object for all request layouts.

    Encoders cache by this object; requests of sequences have many layouts.
    """
    served: Served | None = model.served.get(names)
    if served is None:
        if len(model.served) >= _MAX_CACHED_LAYOUTS:
            model.served.clear()
        served = model.served[names] = Served(model.name, model.version, outputs, model.config.batched, model.labels)
    return served
