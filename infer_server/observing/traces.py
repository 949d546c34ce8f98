"""Traces of requests: what spans.py and trace_files.py record of a request's way through the server.

    Trace of a request ─┬─ executions: its time in the queue, and the batch that it was part of
                        └─ steps of an ensemble: a Trace for each
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from infer_server.observing.access_log import AccessEntry

Arrays = Mapping[str, NDArray[Any]]

OFF = "OFF"
TIMESTAMPS = "TIMESTAMPS"
TENSORS = "TENSORS"
LEVELS = (TIMESTAMPS, TENSORS)

_MAX_BYTES = 256 << 20          # limit of the memory of one request's traces: a stream may be endless
_TRACE_BYTES = 4 << 10          # estimated memory of a trace without its tensors


class ExecutionTimes(Protocol):
    """Times of an execution; implemented by batching.statistics.BatchExecution."""
    @property
    def items(self) -> int: ...
    @property
    def started_ns(self) -> int: ...
    @property
    def copied_ns(self) -> int: ...
    @property
    def computed_ns(self) -> int: ...
    @property
    def encoded_ns(self) -> int: ...


class LateExecution(NamedTuple):
    """Execution whose responses are sent after it returned; its span ends with the last of them."""
    items: int
    started_ns: int
    encoded_ns: int

    @property
    def copied_ns(self) -> int:
        return self.started_ns

    @property
    def computed_ns(self) -> int:
        return self.encoded_ns


class TracedTensor(NamedTuple):
    """Copy of an input or an output."""
    activity: str               # Triton's name of the point at which it was copied
    name: str
    array: NDArray[Any]


class Tracer(Protocol):
    """Interface that selects the requests to trace and receives their traces. Belongs to the event loop."""

    def begin(self, model: str, header: Callable[[str], str]) -> RequestTrace | None:
        """Return a trace for a request to a model with these headers, or None if it is not traced."""

    def settings_of(self, model: str) -> Mapping[str, Sequence[str]]:
        """Return the trace settings of a model, or of all models for "", as texts by Triton's names.

        https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_trace.md
        """

    def update(self, model: str, settings: Mapping[str, Sequence[str]]) -> None:
        """Change trace settings of a model, or of all models for "".

        A setting without a value becomes that of all models again, or that of the command line.

        Raises
        ------
        NotServedError
            The settings cannot be changed.
        InvalidRequestError
            A setting is not valid.
        """

    def close(self) -> None:
        """Send or write the remaining traces. Blocks."""


@dataclass(slots=True, eq=False)
class TraceMemory:
    """Memory use of the traces of a request and its steps."""
    traces: int = 1
    tensor_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.tensor_bytes + self.traces * _TRACE_BYTES

    @property
    def is_cut(self) -> bool:
        """True if the limit is reached, so that further data is left out."""
        return self.bytes > _MAX_BYTES


@dataclass(slots=True, eq=False)
class RequestTrace:
    """Trace of a request or of a step, until it ends."""
    record: Callable[[RequestTrace, AccessEntry, str], None]     # called with the trace when its request has ended
    keeps_tensors: bool = False
    parent: Any = None                              # context of the client's OpenTelemetry span
    model: str = ""                                 # "" until the request is queued
    version: int = -1
    began_ns: int = field(default_factory=time.monotonic_ns)
    responded_ns: int = 0                           # time at which a response is handed to the protocol
    ended_ns: int = 0
    executions: list[tuple[int, ExecutionTimes]] = field(default_factory=list)    # with the time of queueing for each
    under_way: tuple[int, int, int] | None = None   # arguments of executing() for the current execution
    tensors: list[TracedTensor] = field(default_factory=list)
    steps: list[RequestTrace] = field(default_factory=list)
    memory: TraceMemory = field(default_factory=TraceMemory)

    def set_model(self, model: str, version: int, inputs: Arrays) -> None:
        """Record model and inputs. Call this before the request is queued."""
        self.model, self.version = model, version
        if self.keeps_tensors:
            self._keep("TENSOR_QUEUE_INPUT", inputs)

    def wrap_encoder(self, encode: Callable[[Arrays], Any]) -> Callable[[Arrays], Any]:
        """Wrap an encoder so that copies of the outputs are recorded, if the trace keeps tensors."""
        if not self.keeps_tensors:
            return encode

        def seen(computed: Arrays) -> Any:          # on an instance's thread
            self._keep("TENSOR_BACKEND_OUTPUT", computed)
            return encode(computed)

        return seen

    def _keep(self, activity: str, tensors: Arrays) -> None:
        for name, array in tensors.items():
            if isinstance(array, np.ndarray) and not self.memory.is_cut:          # tensors on GPUs are skipped
                self.tensors.append(TracedTensor(activity, name, array.copy()))
                self.memory.tensor_bytes += array.nbytes + (_bytes_of_texts(array) if array.dtype == np.object_ else 0)

    def step(self) -> RequestTrace:
        """Return a new trace for a request that is made on behalf of this one."""
        step = RequestTrace(self.record, self.keeps_tensors, memory=self.memory)
        if not self.memory.is_cut:
            self.steps.append(step)
            self.memory.traces += 1
        return step

    def executing(self, enqueued_ns: int, items: int, started_ns: int) -> None:
        """Record that a Python model begins to execute a batch with the request.

        If its response sender sends the responses later, executed() is not called, and ended() completes the execution.
        """
        self.under_way = enqueued_ns, items, started_ns

    def executed(self, enqueued_ns: int, execution: ExecutionTimes) -> None:
        """Record an execution of a batch with the request."""
        self.under_way = None
        self.executions.append((enqueued_ns, execution))

    def responding(self) -> None:
        """Record that the response is being handed to the protocol."""
        self.responded_ns = time.monotonic_ns()

    def ended(self) -> None:
        """Record the end of a step."""
        self.ended_ns = time.monotonic_ns()
        if self.under_way:
            enqueued_ns, items, started_ns = self.under_way
            ended_ns = max(started_ns, self.responded_ns or self.ended_ns)
            self.executed(enqueued_ns, LateExecution(items, started_ns, ended_ns))

    def end(self, entry: AccessEntry, status: str) -> None:
        """Record the end of the request; see AccessLog.end for `status`."""
        self.ended()
        self.responded_ns = self.responded_ns or self.ended_ns
        self.record(self, entry, status)


def _bytes_of_texts(array: NDArray[Any]) -> int:
    return sum(len(each) for each in array.flat if isinstance(each, bytes | str))
