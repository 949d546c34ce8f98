"""The deployment without a cluster: handlers in a gRPC server of Serve's class, and the methods that Serve calls."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("ray.serve", reason="needs the extra ray")

from infer_server.protos import HEALTH_SERVICE, INFERENCE_SERVICE, health, inference
from infer_server.ray import servicer
from infer_server.ray.autoscaling import LOAD, ONGOING
from infer_server.ray.options import builder_arguments
from infer_server.ray.replica import InferServer

INFER, STREAM = f"/{INFERENCE_SERVICE}/ModelInfer", f"/{INFERENCE_SERVICE}/ModelStreamInfer"
HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", 2 * each.inputs()[0].as_numpy())])
                for each in requests]
"""
CONFIG = """
backend: "python"
input [ { name: "x" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_INT32 dims: [ 2 ] } ]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "double" / "1").mkdir(parents=True)
    (tmp_path / "double" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "double" / "1" / "model.py").write_text(MODEL)
    return tmp_path


def with_replica(repository: Path, use: Callable[[Any], Awaitable[None]], **init: Any) -> None:
    """Run `use` with a replica, as Serve makes and ends one."""
    async def run() -> None:
        replica: Any = object.__new__(InferServer)
        await replica.__init__(builder_arguments({"model_repository": str(repository)}).server, **init)
        try:
            await use(replica)
        finally:
            await replica.close()
    try:
        asyncio.run(run())
    finally:
        servicer._in_replica = None


def request_of(model: str = "double") -> bytes:
    request = inference.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="INT32", shape=[2]).contents.int_contents[:] = [3, 4]
    return request.SerializeToString()


def doubled(answer: bytes) -> bool:
    return inference.ModelInferResponse.FromString(answer).raw_output_contents[0] == bytes([6, 0, 0, 0, 8, 0, 0, 0])


def test_the_grpc_server_of_a_replica_calls_the_server_directly(
        repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HAPROXY, "1")
    from ray.serve._private.grpc_util import gRPCGenericServer

    async def use(replica: Any) -> None:
        server = gRPCGenericServer(lambda **_: None)       # whose own handlers would be None
        servicer.add_services(None, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await replica.record_autoscaling_stats()
            assert doubled(await channel.unary_unary(INFER)(request_of()))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary(INFER)(request_of("nobody"))
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
            answers = [answer async for answer in channel.stream_stream(STREAM)(iter([request_of()] * 3))]
            assert len(answers) == 3
            checked = await channel.unary_unary(f"/{HEALTH_SERVICE}/Check")(b"")
            assert health.HealthCheckResponse.FromString(checked).status == health.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await anext(aiter(channel.unary_stream(f"/{HEALTH_SERVICE}/Watch")(b"")))
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
            stats = await replica.record_autoscaling_stats()
            assert stats[ONGOING] > 0 and stats[LOAD] > 0
        await server.stop(None)

    with_replica(repository, use)


class Context:
    """Context as Serve passes it to a method."""

    def __init__(self) -> None:
        self.code, self.details = None, ""

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        return []

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


def test_serve_can_call_the_methods_by_name(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HAPROXY, raising=False)

    async def requests() -> AsyncIterator[bytes]:
        yield request_of()

    async def use(replica: Any) -> None:
        replica.check_health()
        context = Context()
        assert doubled((await replica.ModelInfer(request_of(), grpc_context=context)).SerializeToString())
        assert context.code is None
        await replica.ModelInfer(request_of("nobody"), grpc_context=context)
        assert context.code is grpc.StatusCode.NOT_FOUND and "nobody" in context.details
        stream = replica.ModelStreamInfer(requests(), grpc_context=context)
        answers = [each.SerializeToString() async for each in stream]
        assert doubled(inference.ModelStreamInferResponse.FromString(answers[0]).infer_response.SerializeToString())

    with_replica(repository, use, allow_python_proxy=True)


def test_serves_python_proxy_is_refused_with_the_reason(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HAPROXY, raising=False)
    replica: Any = object.__new__(InferServer)
    with pytest.raises(RuntimeError, match="14 to 21 times the CPU time .*RAY_SERVE_ENABLE_HA_PROXY=1.*"
                                           "allow_python_proxy=true"):
        asyncio.run(replica.__init__(builder_arguments({"model_repository": str(repository)}).server))


def test_a_replica_whose_model_fails_does_not_start(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HAPROXY, "1")
    (repository / "double" / "1" / "model.py").write_text("raise ValueError('broken')")

    async def use(_: Any) -> None:
        pytest.fail("it has started")

    with pytest.raises(RuntimeError, match="double version 1: .*broken"):
        with_replica(repository, use)
