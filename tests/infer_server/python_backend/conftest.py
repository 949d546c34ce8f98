"""Triton's client of a module's own server."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import tritonclient.grpc as triton

from tests.infer_server.serving import RunningServer


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected
