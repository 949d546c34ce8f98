"""Invalid messages are refused, and the server continues. scripts/fuzz.py is the same at full size."""
from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scripts.fuzz import MODEL, fuzz
from scripts.testing.numpy_engine import write_model
from tests.infer_server.serving import FRONTS, WORKERS, serving


@pytest.mark.parametrize("front", FRONTS + WORKERS)
def test_what_is_no_message_is_refused_over_both_protocols(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, front: str) -> None:
    monkeypatch.setattr("scripts.fuzz.MORE_SECS", 0.15)
    write_model(tmp_path, MODEL)
    with serving(tmp_path, allow_client_shm=True, grpc_front=front) as server:
        seen = asyncio.run(fuzz(server.address, server.ports.http, 600, 0))
    assert not [what for what in seen if what.startswith("failure")]
    assert seen["grpc OK"] and seen["grpc INVALID_ARGUMENT"] and seen["http 200"] and seen["http 400"]
