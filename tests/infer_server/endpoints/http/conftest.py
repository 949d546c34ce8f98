"""Fixtures: a server of small models as one process and with two workers, and Triton's HTTP client for it."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import tritonclient.http as triton

from infer_server.protos import http2
from scripts.testing.numpy_engine import write_model
from tests.infer_server.endpoints.http import plain
from tests.infer_server.serving import WORKERS, RunningServer, serving


@pytest.fixture(scope="package", params=("grpcio", WORKERS[0]))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "affine")
    write_model(repository, "two", kind="two", shape=[2, 3])
    write_model(repository, "half", dtype="float16")
    write_model(repository, "large", shape=[1 << 18])
    write_model(repository, "small", dtype="int8")
    write_model(repository, "truth", dtype="int64", shape=[2])
    write_model(repository, "fragile", kind="fails_on_negative")
    write_model(repository, "gated", gate="http")
    write_model(repository, "a model")
    (write_model(repository, "corrupt") / "1" / "model.plan").write_bytes(b"\0not a plan")
    with serving(repository, max_body_bytes=1 << 21, explicit_control=True, load_models=None,
                 grpc_front=request.param) as running:
        yield running


@pytest.fixture(params=("HTTP/1.1", "HTTP/2"))
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the HTTP version that plain.ask() uses."""
    if request.param == "HTTP/2" and not http2.is_installed:
        pytest.skip("ngh2 is not installed")
    monkeypatch.setattr(plain, "version", request.param)
    return str(request.param)


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.ports.http}", concurrency=4) as connected:
        yield connected
