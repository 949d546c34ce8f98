"""What is seen of a request on its way through the server, for those who trace it: spans.py, trace_files.py.

    Trace of a request ─┬─ executions: its wait in the queue of its model, and the batch that it was part of
                        └─ steps, if it asks an ensemble: a Trace of each
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from infer_server.observing.access_log import Entry

Arrays = Mapping[str, NDArray[Any]]

OFF = "OFF"
TIMESTAMPS = "TIMESTAMPS"
TENSORS = "TENSORS"
LEVELS = (TIMESTAMPS, TENSORS)

_MOST_BYTES = 256 << 20         # of one request: a stream may have no end
_TRACE_BYTES = 4 << 10          # of a trace, about, beside its tensors


class Executed(Protocol):
    """How long an execution took: batching.statistics.BatchExecution."""
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


class Apart(NamedTuple):
    """An execution whose responses came apart from it: it took until the last of them."""
    items: int
    started_ns: int
    encoded_ns: int

    @property
    def copied_ns(self) -> int:
        return self.started_ns

    @property
    def computed_ns(self) -> int:
        return self.encoded_ns


class Tensor(NamedTuple):
    """A copy of an input or an output."""
    activity: str               # Triton's name of where it was seen
    name: str
    array: NDArray[Any]


class Tracer(Protocol):
    """Says which requests are traced, and takes what was seen of them. Belongs to the event loop."""

    def begin(self, model: str, header: Callable[[str], str]) -> Trace | None:
        """The trace of a request for a model, with these headers; None: it is not traced."""

    def settings_of(self, model: str) -> Mapping[str, Sequence[str]]:
        """The trace settings of a model, by their names in Triton's trace extension, as texts; "": those of all models.
        https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_trace.md"""

    def update(self, model: str, settings: Mapping[str, Sequence[str]]) -> None:
        """Changes these trace settings of a model; "": of all models. A setting without a value becomes that of all
        models again, or that of the command line. Raises NotServedError, InvalidRequestError."""

    def close(self) -> None:
        """Sends, or writes, what is left. Blocks."""


@dataclass(slots=True, eq=False)
class Kept:
    """What a request's trace, and those of its steps, have in memory."""
    traces: int = 1
    tensor_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.tensor_bytes + self.traces * _TRACE_BYTES

    @property
    def is_cut(self) -> bool:
        """What comes now is left out."""
        return self.bytes > _MOST_BYTES


@dataclass(slots=True, eq=False)
class Trace:
    """Of one request, or of a step, until it ends."""
    record: Callable[[Trace, Entry, str], None]     # takes it when its request has ended
    keeps_tensors: bool = False
    parent: Any = None                              # the client's span, for OpenTelemetry
    model: str = ""                                 # "": none has it
    version: int = -1
    began_ns: int = field(default_factory=time.monotonic_ns)
    responded_ns: int = 0                           # an answer is about to be handed to its protocol
    ended_ns: int = 0
    executions: list[tuple[int, Executed]] = field(default_factory=list)    # and when it was enqueued for each
    under_way: tuple[int, int, int] | None = None   # an execution, as executing() was told of it
    tensors: list[Tensor] = field(default_factory=list)
    steps: list[Trace] = field(default_factory=list)
    kept: Kept = field(default_factory=Kept)

    def asks(self, model: str, version: int, inputs: Arrays) -> None:
        """To be called before the request is queued for the model."""
        self.model, self.version = model, version
        if self.keeps_tensors:
            self._keep("TENSOR_QUEUE_INPUT", inputs)

    def seeing(self, encode: Callable[[Arrays], Any]) -> Callable[[Arrays], Any]:
        """Wraps what makes the response of the outputs, so that copies of the outputs are kept as well."""
        if not self.keeps_tensors:
            return encode

        def seen(computed: Arrays) -> Any:          # on an instance's thread
            self._keep("TENSOR_BACKEND_OUTPUT", computed)
            return encode(computed)

        return seen

    def _keep(self, activity: str, tensors: Arrays) -> None:
        for name, array in tensors.items():
            if isinstance(array, np.ndarray) and not self.kept.is_cut:          # and no tensor on a GPU
                self.tensors.append(Tensor(activity, name, array.copy()))
                self.kept.tensor_bytes += array.nbytes + (_bytes_of_texts(array) if array.dtype == np.object_ else 0)

    def step(self) -> Trace:
        """The trace of a request that is made for this one."""
        step = Trace(self.record, self.keeps_tensors, kept=self.kept)
        if not self.kept.is_cut:
            self.steps.append(step)
            self.kept.traces += 1
        return step

    def executing(self, enqueued_ns: int, items: int, started_ns: int) -> None:
        """To be told when a Python model begins to execute a batch with the request in it: where its response sender
        sends the responses later, executed() is never called, and ended() closes the execution."""
        self.under_way = enqueued_ns, items, started_ns

    def executed(self, enqueued_ns: int, execution: Executed) -> None:
        """A batch with the request in it was executed."""
        self.under_way = None
        self.executions.append((enqueued_ns, execution))

    def responding(self) -> None:
        """What is done from now on is to hand an answer on."""
        self.responded_ns = time.monotonic_ns()

    def ended(self) -> None:
        """To be called when a step ends."""
        self.ended_ns = time.monotonic_ns()
        if self.under_way:
            enqueued_ns, items, started_ns = self.under_way
            self.executed(enqueued_ns, Apart(items, started_ns, max(started_ns, self.responded_ns or self.ended_ns)))

    def end(self, entry: Entry, status: str) -> None:
        """To be called when the request ends. status: see AccessLog.end."""
        self.ended()
        self.responded_ns = self.responded_ns or self.ended_ns
        self.record(self, entry, status)


def _bytes_of_texts(array: NDArray[Any]) -> int:
    return sum(len(each) for each in array.flat if isinstance(each, bytes | str))
