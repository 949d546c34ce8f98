"""Tests of model control mode "poll": changes of the repository are served once they are complete."""
from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from infer_server.errors import RepositoryError
from infer_server.repository.polling import Poller
from infer_server.repository.roots import LocalFolder
from scripts.testing.numpy_engine import write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import RunningServer, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    write_model(tmp_path, "m", kind="echo")
    write_model(tmp_path, "other")
    with serving(tmp_path) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


@pytest.fixture
def poller(server: RunningServer) -> Poller:
    """Return a poller that polls only when a test calls it."""
    repository = server.server.repository
    created = Poller(repository, repository.roots, 3600)
    server.run(created.begin())
    return created


def answer(client: triton.InferenceServerClient, model: str = "m") -> Any:
    tensor = triton.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.float32([[1, 2, 3, 4]]))
    return client.infer(model, [tensor]).as_numpy("y").tolist()[0]


def test_models_come_change_and_go(
        server: RunningServer, client: triton.InferenceServerClient, poller: Poller, tmp_path: Path) -> None:
    loaded = server.server.repository.find("other")
    assert not server.run(poller.poll())
    write_model(tmp_path, "m", 2)
    write_model(tmp_path, "new")
    shutil.rmtree(tmp_path / "other")
    assert server.run(poller.poll()), "it may still be being copied"
    assert answer(client) == [1, 2, 3, 4] and not client.is_model_ready("new") and not client.is_model_ready("other")
    assert not server.run(poller.poll())
    assert answer(client) == answer(client, "new") == [3, 5, 7, 9]
    assert server.server.repository.find("new") is not loaded and client.is_server_ready()


def test_a_model_that_is_half_copied_is_let_alone_and_harms_nobody(
        server: RunningServer, client: triton.InferenceServerClient, poller: Poller, tmp_path: Path) -> None:
    (tmp_path / "m" / "2").mkdir()
    for size in range(3):                       # it grows from poll to poll
        (tmp_path / "m" / "2" / "model.plan").write_bytes(b"{" * size)
        assert server.run(poller.poll()) and answer(client) == [1, 2, 3, 4]
        assert client.get_model_repository_index().models[0].version == "1"
    assert not server.run(poller.poll()), "it has stopped growing, and is no plan"
    assert answer(client) == [1, 2, 3, 4] and client.is_server_ready()
    reasons = {each.version: each.reason for each in client.get_model_repository_index().models if each.name == "m"}
    assert "is no plan" in reasons["2"] and not reasons["1"]
    (tmp_path / "m" / "2" / "model.plan").write_text("{}")
    server.run(poller.poll())
    server.run(poller.poll())
    assert answer(client) == [3, 5, 7, 9]


def test_a_repository_that_is_gone_for_a_while_changes_nothing(
        server: RunningServer, client: triton.InferenceServerClient, poller: Poller, tmp_path: Path,
        caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.rename(tmp_path.with_name("away"))
    for _ in range(2):
        assert not server.run(poller.poll())
    tmp_path.with_name("away").rename(tmp_path)
    assert not server.run(poller.poll()) and answer(client) == [1, 2, 3, 4]
    assert caplog.text.count("polling: model repository") == 1


def test_a_model_whose_files_cannot_be_looked_at_keeps_nobody_from_being_served(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def poll(place: LocalFolder, name: str) -> Any:
        if name == "odd":
            raise RepositoryError("'1//x' is not a path in the model's folder")
        return fingerprint(place, name)

    fingerprint = LocalFolder.fingerprint
    monkeypatch.setattr(LocalFolder, "fingerprint", poll)
    for name in ("m", "odd"):
        write_model(tmp_path, name, kind="echo")
    with serving(tmp_path, poll_secs=3600) as running, triton.InferenceServerClient(running.address) as client:
        assert answer(client) == [1, 2, 3, 4]
        poller = running.server._poller
        assert poller is not None
        write_model(tmp_path, "m")
        assert running.run(poller.poll()) and not running.run(poller.poll())
        assert answer(client) == [3, 5, 7, 9]


def test_a_model_that_was_in_two_places_is_served_when_it_is_in_one(tmp_path: Path) -> None:
    places = tmp_path / "1", tmp_path / "2"
    for place in places:
        write_model(place, "m")
    with serving(tmp_path, model_repositories=places, poll_secs=3600) as running:
        repository, poller = running.server.repository, running.server._poller
        assert poller is not None and not repository.versions("m")
        shutil.rmtree(places[0] / "m")
        assert running.run(poller.poll()) and not running.run(poller.poll())
        assert repository.versions("m") == [1]


def test_a_server_that_polls_is_live_when_its_repository_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    with serving(folder, poll_secs=0.05) as running, triton.InferenceServerClient(running.address) as client:
        assert not client.is_server_live() and not client.is_server_ready()
        write_model(folder, "m")
        assert eventually(lambda: client.is_model_ready("m"))
        assert client.is_server_live() and client.is_server_ready()


def test_a_server_that_polls_finds_changes_by_itself(tmp_path: Path) -> None:
    write_model(tmp_path, "m", kind="echo")
    with serving(tmp_path, poll_secs=0.05) as running, triton.InferenceServerClient(running.address) as client:
        assert answer(client) == [1, 2, 3, 4]
        write_model(tmp_path, "m")
        assert eventually(lambda: answer(client) == [3, 5, 7, 9])
        with pytest.raises(InferenceServerException, match="--model-control-mode explicit"):
            client.load_model("m")
