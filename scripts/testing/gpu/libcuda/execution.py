"""Functions of modules, streams, graphs and events."""
from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_uint, c_ulonglong, c_void_p
from functools import partial
from typing import Any

from infer_server.engines.backends.cuda.codegen.gpu import GPUS
from scripts.testing.gpu.libcuda.library import (
    BAD_PTX,
    CAPTURE_OVER,
    HANDLE,
    INVALID,
    NOT_FOUND,
    OLD,
    TABLE,
    Event,
    Function,
    Graph,
    Libcuda,
    Out,
    Ready,
    Refused,
    Stream,
    call,
)
from scripts.testing.gpu.ptx.text import parse

MAX_COLUMNS, MAX_THREADS = 65535, 1024          # blocks along a grid's second axis; threads of a block


@call(Out(c_void_p), TABLE, c_uint, TABLE, TABLE)
def cuModuleLoadDataEx(cuda: Libcuda, module: c_void_p, image: bytes, count: int, options: Any, values: Any) -> None:
    if image[:4] == b"\x7fELF":         # the machine knows PTX only
        if not cuda.lazy:
            raise Refused(cuda.refusal)
        module.value = cuda.new({})
        return
    assert image[-1] == 0, "PTX ends with a NUL"
    text = image[:-1].decode()
    version, target = (text.partition(word)[2].split()[0] for word in (".version", ".target"))
    if float(version) > cuda.ptx:
        raise Refused(OLD)
    own = cuda.architecture == target.rstrip("a,")
    if not own and (target.endswith("a") or int(target.strip("sm_,")) > int(cuda.architecture[3:])):
        log = f"ptxas: target {target} is not {cuda.architecture}\0".encode()
        by_option = dict(zip(options, values, strict=True))
        ctypes.memmove(by_option[5], log, min(len(log), by_option[6]))
        raise Refused(BAD_PTX)
    module.value = cuda.new(parse(text))


@call(c_void_p)
def cuModuleUnload(cuda: Libcuda, module: int) -> None:
    cuda.drop(module, dict)


@call(Out(c_void_p), c_void_p, TABLE)
def cuModuleGetFunction(cuda: Libcuda, function: c_void_p, module: int, name: bytes) -> None:
    kernels = cuda.get(module, dict)
    if name.decode() not in kernels:
        raise Refused(NOT_FOUND if kernels else cuda.refusal)
    function.value = cuda.new(Function(kernels[name.decode()]))


@call(c_void_p, c_int, c_int)
def cuFuncSetAttribute(cuda: Libcuda, function: int, attribute: int, value: int) -> None:
    most = max(gpu.shared for gpu in GPUS.values() if gpu.name.rstrip("a") == cuda.architecture)
    if attribute != 8 or value > most:
        raise Refused(INVALID)
    cuda.get(function, Function).max_shared = value


# ---- streams
@call(Out(c_void_p), c_uint)
def cuStreamCreate(cuda: Libcuda, stream: c_void_p, flags: int) -> None:
    assert flags == 1, "only streams that do not wait for the legacy one"
    stream.value = cuda.new(Stream())


@call(c_void_p)
def cuStreamDestroy_v2(cuda: Libcuda, stream: int) -> None:
    cuda.stream(stream).finish()
    cuda.drop(stream, Stream)


@call(c_void_p)
def cuStreamSynchronize(cuda: Libcuda, stream: int | None) -> None:
    cuda.wait_for(cuda.stream(stream))


@call(c_void_p, *[c_uint] * 7, c_void_p, TABLE, TABLE)
def cuLaunchKernel(cuda: Libcuda, function: int, columns: int, rows: int, layers: int, threads: int, more: int,
                   most: int, shared: int, stream: int | None, table: Any, extra: None) -> None:
    entry: Function = cuda.get(function, Function)
    kernel = entry.kernel
    if (0 in (columns, rows, threads) or columns >= 1 << 31 or rows > MAX_COLUMNS or (layers, more, most) != (1, 1, 1)
            or threads > (kernel.threads or MAX_THREADS) or shared > entry.max_shared):
        raise Refused(INVALID)
    assert len(table) == len(kernel.parameters), f"{kernel.name} takes {len(kernel.parameters)} arguments"
    values = [(c_ulonglong if kind.endswith("64") else c_uint).from_address(pointer).value
              for pointer, kind in zip(table, kernel.parameters.values(), strict=True)]
    grid = columns, rows
    cuda.stream(stream).put(partial(cuda.machine.launch, kernel, grid, threads, values, shared),
                            cuda.clock(kernel, grid, threads))


# ---- graphs
@call(c_void_p, c_int)
def cuStreamBeginCapture_v2(cuda: Libcuda, stream: int, mode: int) -> None:
    stream_object = cuda.stream(stream)
    if mode != 2 or stream_object is cuda.stream(None) or stream_object.captured is not None:
        raise Refused(INVALID)
    stream_object.captured, stream_object.spoiled = [], False


@call(c_void_p, Out(c_void_p))
def cuStreamEndCapture(cuda: Libcuda, stream: int, graph: c_void_p) -> None:
    stream_object = cuda.stream(stream)
    tasks, stream_object.captured = stream_object.captured, None
    if tasks is None:
        raise Refused(INVALID)
    if stream_object.spoiled:
        raise Refused(CAPTURE_OVER)
    graph.value = cuda.new(Graph(tasks))


@call(Out(c_void_p), c_void_p, c_ulonglong)
def cuGraphInstantiateWithFlags(cuda: Libcuda, ready: c_void_p, graph: int, flags: int) -> None:
    ready.value = cuda.new(Ready(cuda.get(graph, Graph).tasks))


@call(c_void_p)
def cuGraphDestroy(cuda: Libcuda, graph: int) -> None:
    cuda.drop(graph, Graph)


@call(c_void_p)
def cuGraphExecDestroy(cuda: Libcuda, ready: int) -> None:
    cuda.drop(ready, Ready)


@call(c_void_p, c_void_p)
def cuGraphLaunch(cuda: Libcuda, ready: int, stream: int | None) -> None:
    for task, seconds in cuda.get(ready, Ready).tasks:
        cuda.stream(stream).put(task, seconds)


# ---- events
@call(Out(c_void_p), c_uint)
def cuEventCreate(cuda: Libcuda, event: c_void_p, flags: int) -> None:
    event.value = cuda.new(Event())


@call(c_void_p, c_void_p)
def cuEventRecord(cuda: Libcuda, event: int, stream: int | None) -> None:
    """Record an event. Between a first and a second one, work is counted and not run."""
    record, where = cuda.get(event, Event), cuda.stream(stream)
    record.at, record.stream = where.seconds, where
    where.timed = None if where.timed else record


@call(c_void_p)
def cuEventSynchronize(cuda: Libcuda, event: int) -> None:
    cuda.wait_for(cuda.get(event, Event).stream)


@call(Out(c_float), c_void_p, c_void_p)
def cuEventElapsedTime(cuda: Libcuda, milliseconds: c_float, begin: int, end: int) -> None:
    times = cuda.get(begin, Event).at, cuda.get(end, Event).at
    if None in times:
        raise Refused(HANDLE)
    milliseconds.value = (times[1] - times[0]) * 1e3


@call(c_void_p)
def cuEventDestroy_v2(cuda: Libcuda, event: int) -> None:
    record = cuda.get(event, Event)
    if record.stream and record.stream.timed is record:
        record.stream.timed = None
    cuda.drop(event, Event)
