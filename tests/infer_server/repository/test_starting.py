"""Tests of requests to a server that has not loaded its models yet."""
from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from infer_server.repository import repository
from infer_server.server import Ports, Server
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, load_numpy_engine, write_model
from tests.infer_server.serving import options


def answers(ports: Ports, model: str) -> tuple[str, int]:
    """Return the gRPC status and the HTTP status of requests to a model."""
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.ModelInfer(service_pb2.ModelInferRequest(model_name=model), timeout=TIMEOUT_SECS)
    with pytest.raises(HTTPError) as refused:
        urlopen(f"http://127.0.0.1:{ports.http}/v2/models/{model}/infer", b'{"inputs": []}', TIMEOUT_SECS)
    with refused.value as response:
        return raised.value.code().name, response.code


def test_a_server_that_starts_knows_no_model_before_it_has_listed_them(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "first", gate="starting")
    write_model(tmp_path, "second", gate="starting")
    may_list, listed = threading.Event(), repository.model_names

    def listed_late(roots: Sequence[repository.RepositoryRoot]) -> list[str]:
        assert may_list.wait(TIMEOUT_SECS)
        return listed(roots)

    async def start() -> None:
        server = Server(options(tmp_path, load_threads=1), load_numpy_engine)
        ports = await server.start()
        unready, unknown = ("UNAVAILABLE", 503), ("NOT_FOUND", 404)
        with GATES["starting"].closed():
            assert await asyncio.to_thread(answers, ports, "second") == unready
            assert await asyncio.to_thread(answers, ports, "nobody") == unready
            may_list.set()
            assert await asyncio.to_thread(GATES["starting"].holds, 1)
            for name in ("first", "second"):
                assert await asyncio.to_thread(answers, ports, name) == unready, "one is loaded, the other waits"
            assert await asyncio.to_thread(answers, ports, "nobody") == unknown
        await server.loaded()
        assert server.repository.find("second") and await asyncio.to_thread(answers, ports, "nobody") == unknown
        await server.stop()

    monkeypatch.setattr(repository, "model_names", listed_late)
    asyncio.run(start())
