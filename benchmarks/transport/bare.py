"""Closed loop of single items against a served model, over bare connections (http2.py, http1.py)."""
from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import grpc
import numpy as np

from benchmarks.transport.http1 import Connections
from benchmarks.transport.http2 import Connection
from infer_server import protos
from infer_server.protos import inference
from infer_server.server import Ports

WAYS = ("grpc", "http", "shared memory")        # ways to send inputs; requests with inputs in shared memory use gRPC
_WARM_SECS = 1.0
_REGION = "items"

Call = Callable[[str, Any], bytes]              # a method of the service, and its request


def level(ports: Ports, model: str, concurrency: int, seconds: float, way: str) -> dict[str, Any]:
    """Measure a concurrency level; return the fields of load-test's JSON that benchmarks.serving needs.

    way: an element of WAYS.
    """
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel, ExitStack() as stack:
        def call(method: str, request: Any) -> bytes:
            answer: bytes = channel.unary_unary(f"/{protos.INFERENCE_SERVICE}/{method}")(request.SerializeToString())
            return answer

        def counted() -> tuple[int, int]:
            statistics = inference.ModelStatisticsResponse.FromString(
                call("ModelStatistics", inference.ModelStatisticsRequest(name=model))).model_stats[0]
            return statistics.inference_count, statistics.execution_count

        request = _one_item(model, inference.ModelMetadataResponse.FromString(
            call("ModelMetadata", inference.ModelMetadataRequest(name=model))))
        if way == "shared memory":
            stack.enter_context(_in_shared_memory(request, call))
        client = (Connections(ports.http, f"/v2/models/{model}/infer", *_over_http(request), concurrency)
                  if way == "http" else
                  Connection(ports.grpc, f"/{protos.INFERENCE_SERVICE}/ModelInfer", request.SerializeToString(),
                             concurrency))
        stack.callback(client.close)
        client.run(_WARM_SECS)
        items, executions = counted()
        began = time.perf_counter()
        ended = client.run(seconds)
        elapsed = time.perf_counter() - began
        items, executions = (now - before for now, before in zip(counted(), (items, executions), strict=True))
    p50, p99 = np.percentile(ended.seconds, (50, 99)) * 1e3
    if ended.failed:
        raise SystemExit(f"{ended.failed} requests failed")
    return {"throughput": ended.answered / elapsed, "latency_ms": {"p50": float(p50), "p99": float(p99)},
            "server": {"mean_batch": items / max(1, executions)}}


def _one_item(model: str, metadata: inference.ModelMetadataResponse) -> inference.ModelInferRequest:
    """Return random FP32 values between 0 and 1."""
    request = inference.ModelInferRequest(model_name=model)
    for tensor in metadata.inputs:
        shape = [1, *tensor.shape[1:]]
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        request.raw_input_contents.append(np.random.default_rng(0).random(shape, np.float32).tobytes())
    return request


def _over_http(request: inference.ModelInferRequest) -> tuple[dict[str, str], bytes]:
    """Return the headers and body of the request over HTTP, with binary tensors in both directions."""
    head = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [
        {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape),
         "parameters": {"binary_data_size": len(content)}}
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)]}).encode()
    return {"Inference-Header-Content-Length": str(len(head))}, b"".join((head, *request.raw_input_contents))


@contextmanager
def _in_shared_memory(request: inference.ModelInferRequest, call: Call) -> Iterator[None]:
    """Move a request's inputs into one system shared-memory region, registered with the server."""
    contents = list(request.raw_input_contents)
    request.ClearField("raw_input_contents")
    memory = SharedMemory(create=True, size=sum(map(len, contents)))
    try:
        call("SystemSharedMemoryRegister", inference.SystemSharedMemoryRegisterRequest(
             name=_REGION, key=f"/{memory.name.lstrip('/')}", byte_size=memory.size))
        at, target = 0, memory.buf
        assert target is not None
        for tensor, content in zip(request.inputs, contents, strict=True):
            target[at:at + len(content)] = content
            tensor.parameters["shared_memory_region"].string_param = _REGION
            tensor.parameters["shared_memory_offset"].int64_param = at
            tensor.parameters["shared_memory_byte_size"].int64_param = len(content)
            at += len(content)
        yield
        call("SystemSharedMemoryUnregister", inference.SystemSharedMemoryUnregisterRequest(name=_REGION))
    finally:
        memory.close()
        memory.unlink()
