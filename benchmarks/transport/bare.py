"""A served model under a closed loop of single items, asked over a bare connection (http2.py)."""
from __future__ import annotations

import time
from typing import Any

import grpc
import numpy as np

import protos
from benchmarks.transport.http2 import Connection
from protos import inference

_WARM_SECS = 1.0


def level(address: str, model: str, concurrency: int, seconds: float) -> dict[str, Any]:
    """What load-test's JSON says of a level, as far as the table of benchmarks.serving needs it."""
    with grpc.insecure_channel(address) as channel:
        def ask(call: str, request: Any) -> bytes:
            answer: bytes = channel.unary_unary(f"/{protos.INFERENCE_SERVICE}/{call}")(request.SerializeToString())
            return answer

        def counted() -> tuple[int, int]:
            found = inference.ModelStatisticsResponse.FromString(
                ask("ModelStatistics", inference.ModelStatisticsRequest(name=model))).model_stats[0]
            return found.inference_count, found.execution_count

        metadata = inference.ModelMetadataResponse.FromString(
            ask("ModelMetadata", inference.ModelMetadataRequest(name=model)))
        connection = Connection(int(address.rpartition(":")[2]), f"/{protos.INFERENCE_SERVICE}/ModelInfer",
                                _one_item(model, metadata).SerializeToString(), concurrency)
        connection.run(_WARM_SECS)
        items, executions = counted()
        began = time.perf_counter()
        ended = connection.run(seconds)
        took = time.perf_counter() - began
        items, executions = (now - before for now, before in zip(counted(), (items, executions), strict=True))
        connection.close()
    p50, p99 = np.percentile(ended.seconds, (50, 99)) * 1e3
    if ended.failed:
        raise SystemExit(f"{ended.failed} requests failed")
    return {"throughput": ended.answered / took, "latency_ms": {"p50": float(p50), "p99": float(p99)},
            "server": {"mean_batch": items / max(1, executions)}}


def _one_item(model: str, metadata: inference.ModelMetadataResponse) -> inference.ModelInferRequest:
    """Random values between 0 and 1, of FP32."""
    request = inference.ModelInferRequest(model_name=model)
    for tensor in metadata.inputs:
        shape = [1, *tensor.shape[1:]]
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        request.raw_input_contents.append(np.random.default_rng(0).random(shape, np.float32).tobytes())
    return request
