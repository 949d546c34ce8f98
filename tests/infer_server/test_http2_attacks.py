"""Invalid HTTP/2 harms no other client. scripts/http2_attacks.py is the same at full size."""
from __future__ import annotations

from pathlib import Path

import pytest

from infer_server.process import resident_bytes
from infer_server.protos import http2
from scripts.http2_attacks import ATTACKS, CLOSED, GRPC, HTTP, Port, run
from scripts.testing.numpy_engine import write_model
from tests.infer_server.serving import serving


@pytest.mark.skipif(not http2.is_installed, reason="ngh2 is not installed")
@pytest.mark.parametrize("port", [GRPC, HTTP], ids=["gRPC port", "HTTP port"])
def test_attacks_leave_other_clients_alone(tmp_path: Path, port: Port) -> None:
    write_model(tmp_path, "m")
    with serving(tmp_path, send_timeout_secs=0.3) as server:
        before = resident_bytes()
        seen, watcher = run(f"127.0.0.1:{server.ports.grpc if port is GRPC else server.ports.http}", 150, port=port,
                            linger_secs=0.5)
        assert not watcher.failure and watcher.answered, watcher.failure
        assert sum(seen.values()) == len(ATTACKS) + 150
        assert resident_bytes() - before < 150 << 20
        ended = {what.partition(":")[0] for what in seen if "closed" in what}
        assert {attack.__name__ for attack in CLOSED} <= ended, seen
