"""Fixture: a server with two frontend workers for tests that leave it as it is."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.testing.numpy_engine import write_model
from tests.infer_server.serving import WORKERS, RunningServer, serving


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "m", gate="signalled")
    write_model(repository, "text", kind="echo", dtype="object", shape=[1], max_batch=1)
    write_model(repository, "wide", shape=[512])
    with serving(repository, grpc_front=WORKERS[0]) as running:
        yield running
