"""No accident costs anybody else an answer. scripts/soak.py has the same for as long as one likes."""
from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scripts.soak import soak, write_repository
from scripts.stress import serving
from tests.infer_server.serving import FRONTS


@pytest.mark.parametrize("front", FRONTS)
def test_killed_clients_half_open_connections_and_reloads_cost_no_other_client_an_answer(
        tmp_path: Path, front: str) -> None:
    write_repository(tmp_path)
    with serving(tmp_path, "--grpc-front", front, "--model-control-mode", "explicit", "--load-model=*",
                 "--drain-grace-secs", "0") as server:
        seen = asyncio.run(soak(server, 1.0))
    assert not [what for what in seen if what.startswith("failure")]
    assert {"steady over gRPC", "reloaded over HTTP", "reloads", "killed clients", "half-open connections",
            "mortal over gRPC", "killed processes of models"} <= set(seen)
