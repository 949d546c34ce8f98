"""Fixtures: Triton's client of a server per module, and long timeouts for Python models."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import tritonclient.grpc as triton

from infer_server.python_backend import executor, process
from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.infer_server.serving import RunningServer


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the processes of models a test's whole time limit to start, finalize and end."""
    monkeypatch.setattr(executor, "_CHECK_SECS", TIMEOUT_SECS)
    monkeypatch.setattr(process, "_FINALIZE_SECS", TIMEOUT_SECS)
    monkeypatch.setattr(process, "_ENDING_SECS", TIMEOUT_SECS)
