"""The module triton_python_backend_utils, as a model.py imports it: Triton's names, behind which is this server.

https://github.com/triton-inference-server/python_backend
Runs in the process of the model. What reaches the server goes through `server`, which the process sets.
"""
from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from infer_server.protocol.codec import DATATYPES, encode_raw, object_array
from infer_server.python_backend.channel import Tensors, Typed, datatype_of
from infer_server.python_backend.pb_config import ModelConfig as ModelConfig
from infer_server.python_backend.pb_config import get_input_config_by_name as get_input_config_by_name
from infer_server.python_backend.pb_config import get_output_config_by_name as get_output_config_by_name
from infer_server.python_backend.pb_config import numpy_to_triton_type as numpy_to_triton_type
from infer_server.python_backend.pb_config import triton_string_to_numpy as triton_string_to_numpy
from infer_server.python_backend.pb_config import triton_to_numpy_type as triton_to_numpy_type
from infer_server.python_backend.pb_config import using_decoupled_model_transaction_policy as _is_decoupled

_INT64 = range(-2**63, 2**63)           # what a parameter's message holds

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 1


class Server(Protocol):
    """What the process of a model asks of the server."""

    def respond(self, request: int, response: InferenceResponse | None, final: bool) -> None: ...

    def is_cancelled(self, request: int) -> bool: ...

    def infer(self, request: InferenceRequest, decoupled: bool) -> Iterator[InferenceResponse]: ...

    def log(self, level: str, text: str) -> None: ...

    def ask(self, kind: str, tensors: Tensors = ..., **head: Any) -> Any: ...

    def tell(self, kind: str, **head: Any) -> None: ...


server = cast(Server, None)             # set once, before the model is imported
model_dir = ""                          # likewise: the folder of the version


class TritonModelException(Exception):  # noqa: N818  (Triton's name)
    """What a model raises to end a request, or its loading, with a message."""


class TritonError:
    """An error as a response has it."""
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if code not in range(8):
            raise TritonModelException(f"TritonError: {code} is none of its codes")
        self._message, self._code = message, int(code)

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: NDArray[Any]) -> None:
        self._name, self._array = _text(name), np.asarray(array)
        datatype_of(self._array)

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> Tensor:
        return cls(name, np.from_dlpack(tensor))

    def to_dlpack(self) -> Any:
        return self._array.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> NDArray[Any]:
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> int:
        return datatype_of(self._array).config

    def is_cpu(self) -> bool:
        return True


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | str | None = None,
                 parameters: Mapping[str, Any] | None = None) -> None:
        self._tensors = list(output_tensors)
        self._error = TritonError(error) if isinstance(error, str) else error
        self._parameters = dict(parameters or {})
        for name, value in self._parameters.items():
            if not isinstance(name, str):
                raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
            if type(value) not in (bool, int, str):
                raise TritonModelException("Expect parameters values to have type bool/int/str, found type "
                                           f"{type(value)}")
            if type(value) is int and value not in _INT64:
                raise TritonModelException(f"Parameter '{name}': {value} does not fit in 64 bits")

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return json.dumps(self._parameters)


class ResponseSender:
    """InferenceResponseSender: responses of one request, one after the other, from any thread."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.is_closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        self.is_closed = bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if response is None and not self.is_closed:
            raise TritonModelException("Inference Response object must be provided when the response flags is set to "
                                       "zero.")
        server.respond(self._number, response, self.is_closed)

    def is_cancelled(self) -> bool:
        return server.is_cancelled(self._number)


InferenceResponseSender = ResponseSender


class InferenceRequest:
    """A request that the model was given, or one that it makes of another model: exec(), async_exec()."""

    def __init__(self, request_id: str = "", correlation_id: int | str = 0, inputs: Iterable[Tensor] = (),
                 requested_output_names: Sequence[str] = (), model_name: str = "", model_version: int = -1,
                 flags: int = 0, timeout: int = 0, preferred_memory: Any = None, trace: Any = None,
                 parameters: Mapping[str, Any] | None = None, *, priority: int = 0, number: int = -1) -> None:
        self._model, self._version = _text(model_name), model_version
        self._outputs = [_text(name) for name in requested_output_names]
        self._inputs, self._id, self._correlation = list(inputs), _text(request_id), correlation_id
        self._flags, self._timeout, self._priority = flags, timeout, priority
        self._parameters = dict(parameters or {})
        self.number = number           # of a request that was given: what the server knows it by
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
        """TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: it is executed once more."""
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

    def trace(self) -> None:
        return None

    def is_cancelled(self) -> bool:
        return server.is_cancelled(self.number)

    def get_response_sender(self) -> ResponseSender:
        if self.sender is None:
            self.sender = ResponseSender(self.number)
        return self.sender

    def exec(self, decoupled: bool = False) -> Any:
        """The response of another model; of a decoupled one an iterator of them."""
        responses = server.infer(self, decoupled)
        return responses if decoupled else _only(responses)

    async def async_exec(self, decoupled: bool = False) -> Any:
        if decoupled:
            return server.infer(self, decoupled)
        return await asyncio.get_running_loop().run_in_executor(None, lambda: _only(server.infer(self, False)))


def _text(given: str | bytes) -> str:
    """Where Triton takes a name it takes bytes, too: an element of a BYTES tensor may be one."""
    return given.decode() if isinstance(given, bytes) else given


def _only(responses: Iterator[InferenceResponse]) -> InferenceResponse:
    """The response of a model that has one each. Not by next() alone: no coroutine may raise its StopIteration."""
    for response in responses:
        return response
    return InferenceResponse(error=TritonError("the model gave no response"))


class PreferredMemory:
    """Where a response is wanted: there is one kind of memory here."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type, self.preferred_device_id = preferred_memory_type, preferred_device_id


class Logger:
    """Lines in the server's log."""
    INFO, WARNING, ERROR, VERBOSE = range(4)

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
    """A metric of a family; instances with the same labels share it, so that value() is what all of them did."""

    def __init__(self, family: MetricFamily, labels: Mapping[str, str] | None = None,
                 buckets: Sequence[float] | None = None) -> None:
        self._kind = family.kind
        named = {key: str(value) for key, value in (labels or {}).items()}
        self._head: dict[str, Any] = {"family": family.name, "labels": named}
        server.ask("metric", what="make", of=family.kind, text=family.description, **self._head, buckets=[
            bound.item() if isinstance(bound, np.generic) else bound for bound in (() if buckets is None else buckets)])

    def increment(self, value: float) -> None:
        if self._kind == "histogram" or self._kind == "counter" and value < 0:
            raise TritonModelException(f"a {self._kind} cannot be incremented by {value}")
        server.tell("metric", what="increment", value=float(value), **self._head)

    def set(self, value: float) -> None:
        self._refuse_unless("gauge", "set")
        server.tell("metric", what="set", value=float(value), **self._head)

    def observe(self, value: float) -> None:
        self._refuse_unless("histogram", "observed")
        server.tell("metric", what="observe", value=float(value), **self._head)

    def value(self) -> float:
        if self._kind == "histogram":
            raise TritonModelException("a histogram has no single value")
        return float(server.ask("metric", what="value", **self._head))

    def _refuse_unless(self, kind: str, what: str) -> None:
        if self._kind != kind:
            raise TritonModelException(f"a {self._kind} cannot be {what}: that is for a {kind}")


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.description, self.kind = name, description, kind

    def Metric(self, labels: Mapping[str, str] | None = None,      # noqa: N802  (Triton's name)
               buckets: Sequence[float] | None = None) -> Metric:
        return Metric(self, labels, buckets)


# ---- functions, by Triton's names
using_decoupled_model_transaction_policy = _is_decoupled


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in response.output_tensors() if tensor.name() == name), None)


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Loads or reloads a model, where clients may. config, files: instead of its folder, as in a client's request:
    ModelConfig as JSON, {"file:1/model.onnx": its content}."""
    contents = {path: Typed("UINT8", np.frombuffer(content, np.uint8)) for path, content in (files or {}).items()}
    server.ask("load", contents, model=model_name, config=config)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    server.ask("unload", model=model_name, unload_dependents=unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    return bool(server.ask("ready", model=model_name, version=str(model_version)))


def get_model_dir() -> str:
    return model_dir


def serialize_byte_tensor(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.frombuffer(encode_raw(array, DATATYPES["BYTES"]), np.uint8)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> NDArray[Any]:
    data, end, elements = memoryview(encoded_tensor), 0, []
    while end < len(data):
        begin = end + 4
        end = begin + int.from_bytes(data[end:begin], "little")
        elements.append(bytes(data[begin:end]))
    return object_array(elements)
