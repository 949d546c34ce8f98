"""Write traces of inferences to JSON files in Triton's format, which its trace_summary.py reads.

A file is a list. A trace, and that of each step of an ensemble below it, consists of several objects with one id:

    {"id": 1, "model_name": "digits", "model_version": 1, "request_id": "7"}            a step's has a parent_id
    {"id": 1, "timestamps": [{"name": "REQUEST_START", "ns": 2356425054785863}]}
    {"id": 1, "activity": "TENSOR_QUEUE_INPUT", "tensor": {"name": "x", "data": "1.5,2", "shape": "1,2", ...}}

https://github.com/triton-inference-server/server/blob/main/docs/user_guide/trace.md
"""
from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infer_server.observing.access_log import AccessEntry
from infer_server.observing.trace_settings import Sampler, SettingsByModel, TraceSettings
from infer_server.observing.traces import TENSORS, TIMESTAMPS, RequestTrace, TracedTensor
from infer_server.protocol.codec import DATATYPES

log = logging.getLogger(__name__)

_MAX_BYTES = 64 << 20           # limit of the traces that wait to be written; more are dropped
_FILE_BYTES = 16 << 20          # tensor bytes at which a file is written before it has log_frequency traces


class _Ended(NamedTuple):
    """Trace of a request that has ended."""
    trace: RequestTrace
    entry: AccessEntry


class TraceFiles:
    """Tracer that writes files, on a thread that is started with the first trace."""

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = SettingsByModel(settings, self._retire)
        self._retired: set[Sampler] = set()         # replaced samplers with open traces
        self._writer = _TraceWriter(settings.file)

    def begin(self, model: str, header: Callable[[str], str]) -> RequestTrace | None:
        sampler = self._settings.of(model)
        if not sampler.sample():
            return None

        def record(trace: RequestTrace, entry: AccessEntry, status: str) -> None:
            sampler.open -= 1
            sampler.ended.append(_Ended(trace, entry))
            sampler.tensor_bytes += trace.memory.tensor_bytes
            if trace.memory.is_cut:
                log.warning("the trace of a request of model '%s' is too large, and its end is left out", trace.model)
            if _is_due(sampler):
                self._write(sampler)
            if not sampler.open:
                self._retired.discard(sampler)

        return RequestTrace(record, keeps_tensors=TENSORS in sampler.settings.levels)

    def settings_of(self, model: str) -> Mapping[str, Sequence[str]]:
        return self._settings.of(model).now().texts()

    def update(self, model: str, settings: Mapping[str, Sequence[str]]) -> None:
        self._settings.update(model, settings)

    def close(self) -> None:
        for sampler in (*self._settings.all(), *self._retired):
            self._write(sampler)
        self._writer.close()

    def _retire(self, sampler: Sampler) -> None:
        if sampler.open:
            self._retired.add(sampler)
        else:
            self._write(sampler)

    def _write(self, sampler: Sampler) -> None:
        """Queue the ended traces of a sampler for writing."""
        if sampler.ended:
            settings = sampler.settings
            numbered = (settings.log_frequency > 0 or sampler.remaining == 0
                        or (settings.count > 0 and _is_full(sampler)))
            size = sum(each.trace.memory.bytes for each in sampler.ended)
            self._writer.put(_Batch(sampler.ended, settings.levels, numbered, size))
            sampler.ended, sampler.tensor_bytes = [], 0


def _is_due(sampler: Sampler) -> bool:
    settings = sampler.settings
    if _is_full(sampler) or (not sampler.open and (sampler.is_retired or sampler.remaining == 0)):
        return True
    if settings.log_frequency:
        return len(sampler.ended) >= settings.log_frequency
    return settings.count < 0           # with a count, they get a numbered file once all have ended


def _is_full(sampler: Sampler) -> bool:
    return sampler.tensor_bytes >= _FILE_BYTES


class _Batch(NamedTuple):
    """Traces that are written together."""
    traces: Sequence[_Ended]
    levels: Sequence[str]
    numbered: bool                      # True if they get a numbered file
    size: int                           # bytes of memory


class _TraceWriter:
    """Writer thread. put() and close() are called by other threads; everything else belongs to the writer."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting_bytes, self._lock = 0, threading.Lock()
        self._dropped = 0
        self._numbers, self._ids = count(), count(1)
        self._open: FileIO | None = None            # the file without a number
        self._before = "["                          # text before the next trace in it
        self._fails = False

    def put(self, batch: _Batch) -> None:
        with self._lock:
            if self._waiting_bytes > _MAX_BYTES:
                if not self._dropped:
                    log.warning("requests are traced faster than %s can be written, and some traces are dropped: "
                                "raise the rate, or leave out %s", self._file, TENSORS)
                self._dropped += len(batch.traces)
                return
            self._waiting_bytes += batch.size
        if not self._thread:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()
        self._batches.put(batch)

    def close(self) -> None:
        if self._thread:
            self._batches.put(None)
            self._thread.join()
        if self._dropped:
            log.warning("%d traces were dropped", self._dropped)

    def _run(self) -> None:
        while batch := self._batches.get():
            self._try(self._write, batch)
            with self._lock:
                self._waiting_bytes -= batch.size
            del batch                   # free its memory now
        self._try(self._end)

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
            self._fails = False
        except OSError as error:
            if not self._fails:
                log.error("traces are lost, because %s cannot be written: %s", self._file, error)
            self._fails = True

    def _end(self) -> None:
        if self._open:
            with self._open:
                _append(self._open, "[]" if self._before == "[" else "]")

    def _write(self, batch: _Batch) -> None:
        text = ",\n".join(json.dumps(each, separators=(",", ":")) for ended in batch.traces
                          for each in _objects(ended.trace, ended.entry, batch.levels, self._ids))
        if batch.numbered:
            _write_file(f"{self._file}.{next(self._numbers)}", f"[{text}]")
            return
        if not self._open:
            self._open = open(self._file, "wb", buffering=0)    # noqa: SIM115      # closed by _end()
        _append(self._open, self._before + text)
        self._before = ",\n"


def _write_file(name: str, text: str) -> None:
    """Write a file completely, or delete it: a part of it would not be valid JSON."""
    with open(name, "wb", buffering=0) as file:
        try:
            _append(file, text)
        except OSError:
            Path(name).unlink()
            raise


def _append(file: FileIO, text: str) -> None:
    """Append a text completely, or not at all; a pipe may get a part of it."""
    rest, begin = memoryview(text.encode()), file.tell() if file.seekable() else 0
    try:
        while rest:
            rest = rest[file.write(rest):]
    except OSError:
        if file.seekable():
            file.seek(begin)
            file.truncate()
        raise


def _objects(trace: RequestTrace, entry: AccessEntry, levels: Sequence[str],
             ids: Iterator[int]) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a request's trace."""
    number = next(ids)
    if TIMESTAMPS in levels:
        if entry.protocol == "HTTP":
            yield _timestamp(number, "HTTP_RECV_START", entry.received_ns)
            yield _timestamp(number, "HTTP_RECV_END", trace.began_ns)
        else:           # the time at which grpcio began to receive is not known
            yield _timestamp(number, "GRPC_WAITREAD_START", entry.received_ns)
            yield _timestamp(number, "GRPC_WAITREAD_END", entry.received_ns)
    yield from _objects_of(trace, number, 0, entry, trace.responded_ns, levels, ids)
    if TIMESTAMPS in levels:
        protocol = "HTTP" if entry.protocol == "HTTP" else "GRPC"
        yield _timestamp(number, "INFER_RESPONSE_COMPLETE", trace.responded_ns)
        yield _timestamp(number, f"{protocol}_SEND_START", trace.responded_ns)
        yield _timestamp(number, f"{protocol}_SEND_END", trace.ended_ns)


def _objects_of(trace: RequestTrace, number: int, parent: int, entry: AccessEntry, ended_ns: int, levels: Sequence[str],
                ids: Iterator[int]) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a request or of a step, as its model sees it."""
    about = {"request_id": entry.id} if entry.id else {}
    yield {"id": number, "model_name": trace.model or entry.model, "model_version": trace.version, **about,
           **({"parent_id": parent} if parent else {})}
    if TIMESTAMPS in levels:
        yield _timestamp(number, "REQUEST_START", trace.began_ns)
        for enqueued_ns, execution in trace.executions:
            for name, at_ns in (("QUEUE_START", enqueued_ns), ("COMPUTE_START", execution.started_ns),
                                ("COMPUTE_INPUT_END", execution.copied_ns),
                                ("COMPUTE_OUTPUT_START", execution.computed_ns),
                                ("COMPUTE_END", execution.encoded_ns)):
                yield _timestamp(number, name, at_ns)
        yield _timestamp(number, "REQUEST_END", ended_ns)
    for tensor in trace.tensors:
        yield {"id": number, "activity": tensor.activity, "tensor": _described(tensor)}
    for step in trace.steps:
        yield from _objects_of(step, next(ids), number, entry, step.ended_ns or ended_ns, levels, ids)


def _timestamp(number: int, name: str, at_ns: int) -> Mapping[str, Any]:
    return {"id": number, "timestamps": [{"name": name, "ns": at_ns}]}


def _described(tensor: TracedTensor) -> Mapping[str, str]:
    array = tensor.array
    datatype = next((each.name for each in DATATYPES.values() if each.array == array.dtype), str(array.dtype))
    return {"name": tensor.name, "data": ",".join(_texts(array)), "shape": ",".join(map(str, array.shape)),
            "dtype": datatype}


def _texts(array: NDArray[Any]) -> Iterator[str]:
    if array.dtype == np.object_:
        for each in array.flat:
            text = each.decode(errors="backslashreplace") if isinstance(each, bytes) else str(each)
            yield '"' + text.replace('"', '""') + '"'            # quoted as in CSV
    else:
        yield from map(str, (array.astype(np.uint8) if array.dtype == np.bool_ else array).flat)
