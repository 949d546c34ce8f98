"""The module triton_python_backend_utils that a model.py imports, with Triton's names.

https://github.com/triton-inference-server/python_backend

It runs in the process of the model and reaches the server through `server`, which the stub sets.
"""
from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from operator import index
from typing import Any, Protocol, cast

import numpy as np

from infer_server.python_backend.channel import Tensors, Typed
from infer_server.python_backend.failures import escape_surrogates
from infer_server.python_backend.pb_config import TRITON_STRING_TO_NUMPY as TRITON_STRING_TO_NUMPY
from infer_server.python_backend.pb_config import ModelConfig as ModelConfig
from infer_server.python_backend.pb_config import get_input_config_by_name as get_input_config_by_name
from infer_server.python_backend.pb_config import get_output_config_by_name as get_output_config_by_name
from infer_server.python_backend.pb_config import numpy_to_triton_type as numpy_to_triton_type
from infer_server.python_backend.pb_config import triton_string_to_numpy as triton_string_to_numpy
from infer_server.python_backend.pb_config import triton_to_numpy_type as triton_to_numpy_type
from infer_server.python_backend.pb_config import (
    using_decoupled_model_transaction_policy as using_decoupled_model_transaction_policy,
)
from infer_server.python_backend.pb_tensor import Tensor as Tensor
from infer_server.python_backend.pb_tensor import TritonModelException as TritonModelException
from infer_server.python_backend.pb_tensor import as_tensors, as_text
from infer_server.python_backend.pb_tensor import deserialize_bytes_tensor as deserialize_bytes_tensor
from infer_server.python_backend.pb_tensor import serialize_byte_tensor as serialize_byte_tensor

_INT64 = range(-2**63, 2**63)           # range of an integer parameter

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 1


class StubServer(Protocol):
    """Interface of the stub to the server."""

    def respond(self, request: int, response: InferenceResponse | None, final: bool) -> None: ...

    def is_cancelled(self, request: int) -> bool: ...

    def infer(self, request: InferenceRequest, decoupled: bool) -> ResponseIterator: ...

    def log(self, level: str, text: str) -> None: ...

    def call(self, kind: str, tensors: Tensors = ..., **head: Any) -> Any: ...

    def notify(self, kind: str, **head: Any) -> None: ...


server = cast(StubServer, None)             # set once, before the model is imported
model_dir = ""                          # folder of the version, set once before the model is imported
is_decoupled = False                    # transaction policy, set before the model is created


class TritonError:
    """Error of a response."""
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if code not in range(8):
            raise TritonModelException(f"TritonError: unknown code {code}; expected 0 to 7")
        self._message, self._code = message, int(code)

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


def _validated(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of request or response parameters after checking that both protocols can encode them."""
    if not isinstance(parameters, Mapping | None):
        raise TritonModelException(f"Expect a dict of parameters, got {type(parameters)}")
    for name, value in (parameters or {}).items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if type(value) not in (bool, int, str):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
        if type(value) is int and value not in _INT64:
            raise TritonModelException(f"Parameter '{name}': {value} does not fit in 64 bits")
        if any(escape_surrogates(text) != text for text in (name, value) if isinstance(text, str)):
            raise TritonModelException(f"Parameter {name!r}: {value!r} contains a lone surrogate and cannot be encoded")
    return dict(parameters or {})


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | str | None = None,
                 parameters: Mapping[str, Any] | None = None) -> None:
        self._tensors = as_tensors(output_tensors)
        self._error = TritonError(error) if isinstance(error, str) else error
        self._parameters = _validated(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return json.dumps(self._parameters)


class ResponseSender:
    """Sender of one request's responses, usable from any thread."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._has_sent = False
        self.is_closed = self.is_forgotten = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and not flags:
            raise TritonModelException("Inference Response object must be provided when the response flags is set to "
                                       "zero.")
        if not is_decoupled and self._has_sent == (response is not None):
            raise TritonModelException("Unable to send response. Non-decoupled model cannot send " + (
                "more than one response." if response else "complete final before sending a response."))
        if self.is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        server.respond(self._number, response, bool(flags))     # if this raises, another response may be sent
        self._has_sent, self.is_closed = True, self.is_closed or bool(flags)

    def is_cancelled(self) -> bool:
        return self.is_forgotten or server.is_cancelled(self._number)


InferenceResponseSender = ResponseSender


class ResponseIterator:
    """Iterator over the responses of a decoupled model; a second loop repeats those already received."""

    def __init__(self, responses: Iterator[InferenceResponse], cancel: Callable[[], None]) -> None:
        self._responses, self._cancel = responses, cancel
        self._received: list[InferenceResponse] = []
        self._at = 0
        self._has_ended = False

    def __iter__(self) -> ResponseIterator:
        if self._has_ended and self._at == len(self._received):
            self._at = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._at == len(self._received):
            try:
                self._received.append(next(self._responses))
            except StopIteration:
                self._has_ended = True
                raise
        self._at += 1
        return self._received[self._at - 1]

    def begun(self) -> ResponseIterator:
        """Return the iterator itself after waiting for its first response or its end."""
        for _ in self:
            self._at = 0
            break
        return self

    def cancel(self) -> None:
        """Cancel the request: unless all responses have arrived, the last one is an error with the code CANCELLED."""
        if not self._has_ended:
            self._cancel()


class InferenceTrace:
    """Trace handle: pass it to an InferenceRequest to make that a child span."""

    def __init__(self, number: int = -1) -> None:
        """Refer to the trace of the executing request `number`; -1 is no trace."""
        self.number = number

    def get_context(self) -> str | None:
        """Return None: spans are created after a request has ended, so that there is no context yet."""
        return None


class InferenceRequest:
    """Request to this model, or one that it sends to another model with exec() or async_exec() (BLS)."""

    def __init__(self, request_id: str = "", correlation_id: int | str = 0, inputs: Iterable[Tensor] = (),
                 requested_output_names: Sequence[str] = (), model_name: str = "", model_version: int = -1,
                 flags: int = 0, timeout: int = 0, preferred_memory: Any = None, trace: Any = None,
                 parameters: Mapping[str, Any] | None = None, *, priority: int = 0, number: int = -1) -> None:
        self._model, self._version = as_text(model_name), index(model_version)
        self._outputs = [as_text(name) for name in requested_output_names]
        self._inputs, self._id, self._correlation = as_tensors(inputs), as_text(request_id), correlation_id
        if not isinstance(correlation_id, int | str):
            raise TypeError(f"correlation_id: expected a number or text, got {correlation_id!r}")
        self._flags, self._timeout, self._priority = index(flags), index(timeout), priority
        is_received = number >= 0
        self._parameters = dict(parameters or {}) if is_received else _validated(parameters)  # clients may send floats
        self.number = number            # the server's number of a request to this model; -1 for a BLS request
        self._trace = InferenceTrace(number) if is_received else trace
        self.sender: ResponseSender | None = None
        self.release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    @property
    def is_rescheduled(self) -> bool:
        return self.release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        return self._correlation

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def model_name(self) -> str:
        return self._model

    def model_version(self) -> int:
        return self._version

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def set_release_flags(self, flags: int) -> None:
        """Set TRITONSERVER_REQUEST_RELEASE_RESCHEDULE to execute the request again."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException("Unable to set request release flags: expected TRITONSERVER_REQUEST_RELEASE_ALL "
                                       f"or TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, got {flags}")
        self.release_flags = flags

    def timeout(self) -> int:
        return self._timeout

    def priority(self) -> int:
        return self._priority

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def trace(self) -> InferenceTrace:
        return self._trace if isinstance(self._trace, InferenceTrace) else InferenceTrace()

    def is_cancelled(self) -> bool:
        return self.sender.is_cancelled() if self.sender else server.is_cancelled(self.number)

    def get_response_sender(self) -> ResponseSender:
        if self.sender is None:
            self.sender = ResponseSender(self.number)
        return self.sender

    def exec(self, decoupled: bool = False) -> Any:
        """Execute on another model and return its response, or an iterator of responses if `decoupled`."""
        responses = server.infer(self, decoupled)
        return responses if decoupled else _only(responses)

    async def async_exec(self, decoupled: bool = False) -> Any:
        """Execute like exec() without blocking the event loop until the first response is available."""
        def first() -> Any:
            responses = server.infer(self, decoupled)
            return responses.begun() if decoupled else _only(responses)

        return await asyncio.get_running_loop().run_in_executor(None, first)


def _only(responses: ResponseIterator) -> InferenceResponse:
    """Return the single response. Avoids a bare next(), whose StopIteration a coroutine must not raise."""
    for response in responses:
        return response
    return InferenceResponse(error=TritonError("the model gave no response"))


class PreferredMemory:
    """Preferred memory of a response, which is ignored: only CPU memory is supported."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type, self.preferred_device_id = preferred_memory_type, preferred_device_id


class LogLevel(IntEnum):
    INFO, WARNING, ERROR, VERBOSE = range(4)


class Logger:
    """Logger that writes to the server's log."""
    LogLevel = LogLevel
    INFO, WARNING, ERROR, VERBOSE = LogLevel

    @staticmethod
    def log(message: str, level: int = INFO) -> None:
        server.log(("info", "warning", "error", "debug")[level], message)

    @staticmethod
    def log_info(message: str) -> None:
        server.log("info", message)

    @staticmethod
    def log_warn(message: str) -> None:
        server.log("warning", message)

    @staticmethod
    def log_error(message: str) -> None:
        server.log("error", message)

    @staticmethod
    def log_verbose(message: str) -> None:
        server.log("debug", message)


class Metric:
    """Custom metric of a family; objects with equal labels share one value."""

    def __init__(self, family: MetricFamily, labels: Mapping[str, str] | None = None,
                 buckets: Sequence[float] | None = None) -> None:
        self._kind = family.kind
        named = {key: str(value) for key, value in (labels or {}).items()}
        self._head: dict[str, Any] = {"family": family.name, "labels": named}
        server.call("metric", operation="make", of=family.kind, text=family.description, **self._head, buckets=[
            bound.item() if isinstance(bound, np.generic) else bound for bound in (() if buckets is None else buckets)])

    def increment(self, value: float) -> None:
        if self._kind == "histogram" or self._kind == "counter" and value < 0:
            raise TritonModelException(f"a {self._kind} cannot be incremented by {value}")
        server.notify("metric", operation="increment", value=float(value), **self._head)

    def set(self, value: float) -> None:
        self._refuse_unless("gauge", "set")
        server.notify("metric", operation="set", value=float(value), **self._head)

    def observe(self, value: float) -> None:
        self._refuse_unless("histogram", "observed")
        server.notify("metric", operation="observe", value=float(value), **self._head)

    def value(self) -> float:
        if self._kind == "histogram":
            raise TritonModelException("a histogram has no single value")
        return float(server.call("metric", operation="value", **self._head))

    def _refuse_unless(self, kind: str, operation: str) -> None:
        if self._kind != kind:
            raise TritonModelException(f"a {self._kind} cannot be {operation}: that is for a {kind}")


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.description, self.kind = name, description, kind

    def Metric(self, labels: Mapping[str, str] | None = None,      # noqa: N802  (Triton's name)
               buckets: Sequence[float] | None = None) -> Metric:
        return Metric(self, labels, buckets)


# ---- functions, by Triton's names
def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in response.output_tensors() if tensor.name() == name), None)


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model; `config` (JSON) and `files` ({"file:1/model.onnx": bytes}) replace its folder."""
    contents = {path: Typed("UINT8", np.frombuffer(content, np.uint8)) for path, content in (files or {}).items()}
    server.call("load", contents, model=model_name, config=config)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    server.call("unload", model=model_name, unload_dependents=unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    return bool(server.call("ready", model=model_name, version=str(model_version)))


def get_model_dir() -> str:
    return model_dir
