"""Fixtures: Triton's gRPC and HTTP clients of a server per module."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http

from tests.infer_server.serving import RunningServer


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> Any:
    return {"grpc": tritonclient.grpc, "http": tritonclient.http}[request.param]


@pytest.fixture
def client(server: RunningServer, protocol: Any) -> Iterator[Any]:
    port = server.ports.grpc if protocol is tritonclient.grpc else server.ports.http
    with protocol.InferenceServerClient(f"127.0.0.1:{port}") as connected:
        yield connected
