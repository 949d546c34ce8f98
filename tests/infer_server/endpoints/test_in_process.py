"""Tests of Server.grpc: calls by bytes on a server without ports."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from infer_server import GrpcStatusError
from infer_server.endpoints.restrictions import Secret
from infer_server.protos import HEALTH_SERVICE, INFERENCE_SERVICE, health, inference
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import RunningServer, serving

CLOSED = frozenset({"grpc", "http", "metrics"})
INFER, STREAM = f"/{INFERENCE_SERVICE}/ModelInfer", f"/{INFERENCE_SERVICE}/ModelStreamInfer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "affine")
    write_model(repository, "gated", gate="in process", max_batch=1)
    with serving(repository, closed=CLOSED, max_message_bytes=1 << 16,
                 grpc_secrets={"statistics": Secret("key", "secret")}) as running:
        yield running


def request_of(model: str = "affine", values: Any = (1, 2, 3, 4), request_id: str = "") -> bytes:
    array = np.array([values], np.float32)
    request = inference.ModelInferRequest(model_name=model, id=request_id, raw_input_contents=[array.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=array.shape)
    return request.SerializeToString()


async def each(*requests: bytes) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


async def endless(*requests: bytes) -> AsyncIterator[bytes]:
    """Yield requests, and never end."""
    for request in requests:
        yield request
    await asyncio.Event().wait()


def result_of(response: inference.ModelInferResponse) -> list[float]:
    return np.frombuffer(response.raw_output_contents[0], np.float32).tolist()


def is_idle(server: RunningServer) -> bool:
    return server.server._inflight.held_bytes == 0 and not server.server._inflight._calls


def test_a_server_without_ports_infers(server: RunningServer) -> None:
    assert (server.ports.grpc, server.ports.http, server.ports.metrics) == (0, 0, 0)
    for _ in range(3):                  # the second and third take the path of a known layout
        answer = server.run(server.server.grpc.call(INFER, request_of(request_id="seven"), timeout_secs=TIMEOUT_SECS))
        response = inference.ModelInferResponse.FromString(answer)
        assert (response.id, result_of(response)) == ("seven", [3.0, 5.0, 7.0, 9.0])
    assert is_idle(server)


def test_control_calls_and_health_answer(server: RunningServer) -> None:
    answer = server.run(server.server.grpc.call(f"/{INFERENCE_SERVICE}/ServerReady", b""))
    assert inference.ServerReadyResponse.FromString(answer).ready
    answer = server.run(server.server.grpc.call(f"/{HEALTH_SERVICE}/Check", b""))
    assert health.HealthCheckResponse.FromString(answer).status == health.HealthCheckResponse.SERVING


@pytest.mark.parametrize("method, request_bytes, code, text", [
    (INFER, request_of("nobody"), grpc.StatusCode.NOT_FOUND, "nobody"),
    (INFER, b"\xff", grpc.StatusCode.INVALID_ARGUMENT, "ModelInferRequest"),
    (INFER, request_of(values=[0] * (1 << 14)), grpc.StatusCode.RESOURCE_EXHAUSTED, "it may have 65536"),
    (f"/{INFERENCE_SERVICE}/ModelReady", b"\xff", grpc.StatusCode.INVALID_ARGUMENT, "not a ModelReadyRequest"),
    ("ModelInfer", b"", grpc.StatusCode.UNIMPLEMENTED, "methods are named like /inference.GRPCInferenceService/"),
], ids=["unknown model", "garbage", "too large", "garbage in a control call", "unknown method"])
def test_a_call_that_fails_raises_its_status(server: RunningServer, method: str, request_bytes: bytes,
                                             code: grpc.StatusCode, text: str) -> None:
    with pytest.raises(GrpcStatusError, match=text) as raised:
        server.run(server.server.grpc.call(method, request_bytes))
    assert raised.value.code is code and raised.value.details == str(raised.value)
    assert is_idle(server)


def test_metadata_is_checked_as_on_a_port(server: RunningServer) -> None:
    method = f"/{INFERENCE_SERVICE}/ModelStatistics"
    with pytest.raises(GrpcStatusError, match="restricted"):
        server.run(server.server.grpc.call(method, b"", metadata=[("triton-grpc-protocol-key", "wrong")]))
    answer = server.run(server.server.grpc.call(method, b"", metadata=[("triton-grpc-protocol-key", "secret")]))
    assert len(inference.ModelStatisticsResponse.FromString(answer).model_stats) == 2


def test_a_passed_deadline_and_a_cancelled_task_cancel_the_request(server: RunningServer) -> None:
    gate = GATES["in process"]

    async def cancel() -> None:
        call = asyncio.create_task(server.server.grpc.call(INFER, request_of("gated")))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()

    with gate.closed():
        with pytest.raises(GrpcStatusError) as raised:
            server.run(server.server.grpc.call(INFER, request_of("gated"), timeout_secs=0.05))
        assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        server.run(cancel())
        assert is_idle(server)


def test_a_stream_answers_in_order_and_reports_errors_in_messages(server: RunningServer) -> None:
    async def run() -> list[inference.ModelStreamInferResponse]:
        requests = each(request_of(request_id="0"), request_of("nobody"), request_of(values=[0] * 4, request_id="2"))
        return [inference.ModelStreamInferResponse.FromString(response)
                async for response in server.server.grpc.stream(STREAM, requests, timeout_secs=TIMEOUT_SECS)]

    first, second, third = server.run(run())
    assert (first.infer_response.id, result_of(first.infer_response)) == ("0", [3.0, 5.0, 7.0, 9.0])
    assert "nobody" in second.error_message
    assert (third.infer_response.id, result_of(third.infer_response)) == ("2", [1.0] * 4)
    assert is_idle(server)


def test_a_stream_ends_with_its_status(server: RunningServer) -> None:
    async def run(requests: AsyncIterator[bytes], **options: Any) -> None:
        async for _ in server.server.grpc.stream(STREAM, requests, **options):
            pass

    with pytest.raises(GrpcStatusError) as raised:
        server.run(run(each(request_of("nobody")), metadata=[("triton_grpc_error", "true")]))
    assert raised.value.code is grpc.StatusCode.NOT_FOUND
    with pytest.raises(GrpcStatusError, match="it may have 65536"):
        server.run(run(each(bytes(1 << 17))))
    with GATES["in process"].closed(), pytest.raises(GrpcStatusError) as raised:
        server.run(run(endless(request_of("gated")), timeout_secs=0.05))
    assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert eventually(lambda: is_idle(server))


def test_closing_a_stream_cancels_what_is_in_flight(server: RunningServer) -> None:
    async def run() -> None:
        async with aclosing(server.server.grpc.stream(STREAM, endless(request_of(), request_of("gated")))) as responses:
            await anext(responses)

    with GATES["in process"].closed():
        server.run(run())
        assert eventually(lambda: is_idle(server))


def test_watch_of_health_follows_the_server_to_its_end(tmp_path: Path) -> None:
    write_model(tmp_path, "affine")
    with serving(tmp_path, closed=CLOSED) as running:
        seen: list[int] = []

        async def watch() -> None:
            async for response in running.server.grpc.stream(f"/{HEALTH_SERVICE}/Watch", each(b"")):
                seen.append(health.HealthCheckResponse.FromString(response).status)

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(watch())

        watching = running.run(begin())
        assert eventually(lambda: seen == [health.HealthCheckResponse.SERVING])
        assert running.stop()
    assert seen == [health.HealthCheckResponse.SERVING, health.HealthCheckResponse.NOT_SERVING]
    assert watching.done()


def test_a_stream_and_a_unary_call_are_not_mixed_up(server: RunningServer) -> None:
    async def stream() -> None:
        await anext(server.server.grpc.stream(INFER, each()))

    with pytest.raises(ValueError, match="use stream"):
        server.run(server.server.grpc.call(STREAM, b""))
    with pytest.raises(ValueError, match="use call"):
        server.run(stream())
