"""Triton's client of a module's own server; and models have all the time that a test may take."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import tritonclient.grpc as triton

from infer_server.python_backend import executor, process
from tests.infer_server.numpy_engine import TIMEOUT_SECS
from tests.infer_server.serving import RunningServer


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give models' processes as much time to start, finalize and end as a test may take."""
    monkeypatch.setattr(executor, "_CHECK_SECS", TIMEOUT_SECS)
    monkeypatch.setattr(process, "_FINALIZE_SECS", TIMEOUT_SECS)
    monkeypatch.setattr(process, "_ENDING_SECS", TIMEOUT_SECS)
