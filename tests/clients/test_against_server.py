"""Tests of clients and load test against infer-server, with an engine of known speed."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from infer_server.clients import InferenceClient
from infer_server.clients.errors import InvalidRequestError, ModelNotFoundError
from infer_server.clients.load.cli import CANNOT_RUN, FINE, main
from infer_server.clients.load.statistics import PHASES
from scripts.testing.numpy_engine import write_model
from tests.infer_server.serving import serving

BATCH_SECONDS = 0.03            # many times what a client needs to ask again, even on a busy machine
MAX_BATCH = 8


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    write_model(folder, "affine", seconds=BATCH_SECONDS, max_batch=MAX_BATCH)
    return folder


def test_the_client_gets_what_the_model_computes_and_the_servers_reasons(repository: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    with serving(repository) as server, InferenceClient(server.address) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("affine")
        np.testing.assert_array_equal(client.infer("affine", {"x": x})["y"], 2 * x + 1)
        assert [(i.name, list(i.shape)) for i in client.model_metadata("affine").inputs] == [("x", [-1, 4])]
        assert client.model_config("affine").max_batch_size == MAX_BATCH
        assert client.statistics("affine")[0].inference_count == 3
        with pytest.raises(ModelNotFoundError, match="convex"):
            client.infer("convex", {"x": x})
        with pytest.raises(InvalidRequestError, match="x"):
            client.infer("affine", {"x": x[:, :2]})


def test_many_users_are_batched_and_the_split_of_their_time_adds_up(repository: Path, tmp_path: Path) -> None:
    with serving(repository) as server:
        assert main(["-m", "affine", "-u", server.address, "--concurrency", "1,32", "--duration", "0.3",
                     "--warmup", "0.1", "--json", str(tmp_path / "report.json")]) == FINE
    one, many = json.loads((tmp_path / "report.json").read_text())["levels"]
    assert one["server"]["batch_sizes"].keys() == {"1"}
    assert 1 < max(map(int, many["server"]["batch_sizes"])) <= MAX_BATCH
    for level in (one, many):
        parts = sum(level["server"][f"{phase}_ms"] for phase in PHASES)
        assert 1e3 * BATCH_SECONDS <= level["server"]["compute_infer_ms"] <= parts


def test_a_model_of_fixed_shape_is_sent_as_it_is_declared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, "fixed", max_batch=0, shape=[1, 4])
    with serving(tmp_path) as server:
        arguments = ["-m", "fixed", "-u", server.address, "--duration", "0.1", "--warmup", "0"]
        assert main(arguments) == FINE
        assert main([*arguments, "--batch", "2"]) == CANNOT_RUN
    assert "does not batch" in capsys.readouterr().err
