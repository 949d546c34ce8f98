"""Cases of the transport benchmark, and the measurement of one turn."""
from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from statistics import median

import grpc
import numpy as np

from benchmarks.transport.http1 import Connections
from benchmarks.transport.http2 import Connection
from benchmarks.transport.models import SHAPES
from benchmarks.transport.processes import Running
from infer_server import protos
from infer_server.protos import inference

_WARM_SECS = 0.15
_REGION = "benchmarked"


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    protocol: str
    at_a_time: int
    shared: bool = False                # the input is in system shared memory
    as_json: bool = False               # the tensors are numbers in the JSON


CASES = (
    Case("16 floats, gRPC", "floats", "gRPC", 64),
    Case("16 floats, gRPC, 8 at a time", "floats", "gRPC", 8),
    Case("16 floats, gRPC, alone", "floats", "gRPC", 1),
    Case("16 floats, HTTP", "floats", "HTTP", 64),
    Case("16 floats, HTTP, alone", "floats", "HTTP", 1),
    Case("600 KB, gRPC", "picture", "gRPC", 8),
    Case("600 KB, HTTP", "picture", "HTTP", 8),
    Case("600 KB as JSON, HTTP", "picture", "HTTP", 4, as_json=True),
    Case("600 KB in shared memory, gRPC", "picture", "gRPC", 8, shared=True),
)


@dataclass(frozen=True)
class Measured:
    cpu_us: float                       # CPU time per request of the server's first process
    others_us: float                    # CPU time per request of the processes that it has started
    engine_us: float                    # the engine's part of this time
    rate: float
    p50_us: float
    failed: int


def measure(server: Running, case: Case, seconds: float) -> Measured:
    with ExitStack() as stack:
        if case.shared:
            stack.enter_context(_registered(server, case.model))
        client = _client(server, case)
        stack.callback(client.close)
        client.run(_WARM_SECS)
        before_ns, cpu_ns = _engine_ns(server, case.model), server.cpu_ns()
        ended = client.run(seconds)
        count = max(1, ended.answered)
        cpu_us, others_us = ((now - then) / 1e3 / count for now, then in zip(server.cpu_ns(), cpu_ns, strict=True))
        engine_ns = _engine_ns(server, case.model) - before_ns
    return Measured(cpu_us, others_us, engine_ns / 1e3 / count, count / seconds,
                    median(ended.seconds or [math.nan]) * 1e6, ended.failed)


def _client(server: Running, case: Case) -> Connection | Connections:
    if case.protocol == "HTTP":
        return Connections(server.ports.http, path_of(case), *over_http(case), case.at_a_time)
    return Connection(server.ports.grpc, _path("ModelInfer"), over_grpc(case), case.at_a_time)


def path_of(case: Case) -> str:
    """Return the path of the case's HTTP request."""
    return f"/v2/models/{case.model}/infer"


def over_http(case: Case) -> tuple[dict[str, str], bytes]:
    """Return the headers and body of the case's request over HTTP."""
    shape = [1, *SHAPES[case.model]]
    if case.as_json:
        return {"Content-Type": "application/json"}, json.dumps({"inputs": [
            {"name": "x", "datatype": "FP32", "shape": shape, "data": [1.0] * math.prod(shape)}]}).encode()
    content = np.ones(shape, np.float32).tobytes()
    head = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": shape,
                                   "parameters": {"binary_data_size": len(content)}}],
                       "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return headers, head + content


def over_grpc(case: Case) -> bytes:
    """Return the case's serialised ModelInferRequest."""
    shape = [1, *SHAPES[case.model]]
    content = np.ones(shape, np.float32).tobytes()
    request = inference.ModelInferRequest(model_name=case.model)
    tensor = request.inputs.add(name="x", datatype="FP32", shape=shape)
    request.outputs.add(name="y")
    if case.shared:
        tensor.parameters["shared_memory_region"].string_param = _REGION
        tensor.parameters["shared_memory_byte_size"].int64_param = len(content)
    else:
        request.raw_input_contents.append(content)
    data: bytes = request.SerializeToString()
    return data


@contextmanager
def _registered(server: Running, model: str) -> Iterator[None]:
    """Register an input of a model in shared memory."""
    size = 4 * math.prod(SHAPES[model])
    memory = SharedMemory(create=True, size=size)
    try:
        _call(server, "SystemSharedMemoryRegister", inference.SystemSharedMemoryRegisterRequest(
            name=_REGION, key=f"/{memory.name.lstrip('/')}", byte_size=size))
        yield
        _call(server, "SystemSharedMemoryUnregister", inference.SystemSharedMemoryUnregisterRequest(name=_REGION))
    finally:
        memory.close()
        memory.unlink()


def _engine_ns(server: Running, model: str) -> int:
    """Return the total execution time of a model so far, in nanoseconds."""
    answer = inference.ModelStatisticsResponse.FromString(
        _call(server, "ModelStatistics", inference.ModelStatisticsRequest(name=model)))
    return sum(batch.compute_infer.ns for entry in answer.model_stats for batch in entry.batch_stats)


def _call(server: Running, call: str, request: inference.ModelStatisticsRequest
          | inference.SystemSharedMemoryRegisterRequest | inference.SystemSharedMemoryUnregisterRequest) -> bytes:
    with grpc.insecure_channel(f"127.0.0.1:{server.ports.grpc}") as channel:
        answer: bytes = channel.unary_unary(_path(call))(request.SerializeToString())
    return answer


def _path(call: str) -> str:
    return f"/{protos.INFERENCE_SERVICE}/{call}"
