"""Loading, reloading and unloading while others are served."""
from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.server.numpy_engine import CONTEXTS, GATES, write_model
from tests.server.serving import RunningServer, serving
from tests.server.test_serving import eventually, infer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    write_model(tmp_path, "good")
    with serving(tmp_path, explicit_control=True, load_models=("good",)) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


def states(client: triton.InferenceServerClient) -> dict[str, str]:
    return {f"{model.name}/{model.version}": model.state for model in client.get_model_repository_index().models}


def test_under_explicit_control_only_what_was_asked_for_is_loaded(
        client: triton.InferenceServerClient, tmp_path: Path) -> None:
    write_model(tmp_path, "other")
    assert states(client) == {"good/1": "READY", "other/": ""}
    client.load_model("other")
    assert infer(client, "other").all()
    client.unload_model("other")
    with pytest.raises(InferenceServerException, match="model 'other' is not ready: unloaded") as caught:
        infer(client, "other")
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    assert states(client) == {"good/1": "READY", "other/1": "UNAVAILABLE"}
    client.load_model("other")
    assert infer(client, "other").all()


def test_a_repository_without_models_and_a_model_that_is_not_in_it_are_reported(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path):
        assert eventually(lambda: "there is no model in" in caplog.text)
    with serving(tmp_path, explicit_control=True, load_models=("absent",)):
        assert eventually(lambda: "model 'absent' is not in the repository" in caplog.text)


def test_a_model_that_cannot_be_loaded_says_why_and_harms_nobody(
        client: triton.InferenceServerClient, tmp_path: Path) -> None:
    (write_model(tmp_path, "corrupt") / "1" / "model.plan").write_bytes(b"\0")
    write_model(tmp_path, "crashing", crash=True)
    write_model(tmp_path, "contradicting", config="max_batch_size: 99")
    for name, reason in (("corrupt", "is no plan"), ("crashing", "ZeroDivisionError: a loader's bug"),
                         ("contradicting", "--max-batch 99")):
        with pytest.raises(InferenceServerException, match=reason):
            client.load_model(name)
        with pytest.raises(InferenceServerException, match=reason):
            infer(client, name)
    assert infer(client, "good").all()


def test_one_bad_version_does_not_take_the_other_with_it(client: triton.InferenceServerClient, tmp_path: Path) -> None:
    write_model(tmp_path, "m", 1, "version_policy { all {} }")
    (write_model(tmp_path, "m", 2) / "2" / "model.plan").write_bytes(b"\0")
    with pytest.raises(InferenceServerException, match="version 2: .*is no plan"):
        client.load_model("m")
    assert infer(client, "m").all()
    assert states(client)["m/1"] == "READY" and states(client)["m/2"] == "UNAVAILABLE"


def test_a_reload_serves_the_new_files_and_a_failed_one_goes_on_with_the_old(
        client: triton.InferenceServerClient, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "good", max_batch=3)
    client.load_model("good")
    assert client.get_model_config("good").config.max_batch_size == 3
    (folder / "1" / "model.plan").write_bytes(b"\0")
    with pytest.raises(InferenceServerException, match="is no plan"):
        client.load_model("good")
    assert infer(client, "good").all()
    (folder / "config.pbtxt").write_text("nonsense")
    with pytest.raises(InferenceServerException, match="config.pbtxt:1"):
        client.load_model("good")
    assert infer(client, "good").all()


def test_a_reload_under_load_refuses_nobody(client: triton.InferenceServerClient, tmp_path: Path) -> None:
    done = threading.Event()

    def ask() -> int:
        count = 0
        while not done.is_set():
            infer(client, "good")
            count += 1
        return count

    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(ask) for _ in range(4)]
        for version in (2, 3):
            write_model(tmp_path, "good", version, seconds=0.002)
            client.load_model("good")
        done.set()
        assert all(future.result() for future in asking)
    assert states(client) == {"good/3": "READY"}


def test_unloading_answers_what_was_accepted(server: RunningServer, client: triton.InferenceServerClient,
                                             tmp_path: Path) -> None:
    write_model(tmp_path, "slow", config="max_batch_size: 1", gate="unloading")
    client.load_model("slow")
    model = server.server.repository.find("slow")
    with ThreadPoolExecutor(5) as clients:
        with GATES["unloading"].closed():
            accepted = [clients.submit(infer, client, "slow") for _ in range(4)]
            assert eventually(lambda: model.pending == 3)
            unloading = clients.submit(client.unload_model, "slow")
            assert eventually(lambda: states(client)["slow/1"] == "UNLOADING")
            with pytest.raises(InferenceServerException, match="is not ready: unloading"):
                infer(client, "slow")
        assert all(future.result().all() for future in accepted)
        unloading.result()


def test_an_unloaded_model_gives_back_its_memory_at_once(
        client: triton.InferenceServerClient, tmp_path: Path) -> None:
    gc.collect()
    before = len(CONTEXTS)
    write_model(tmp_path, "large", config="instance_group { count: 3 }")
    gc.disable()
    try:
        client.load_model("large")
        infer(client, "large")
        assert len(CONTEXTS) == before + 3
        client.unload_model("large")
        assert len(CONTEXTS) == before
    finally:
        gc.enable()


def test_a_load_may_bring_its_configuration(client: triton.InferenceServerClient) -> None:
    client.load_model("good", config='{"max_batch_size": 2}')
    assert client.get_model_config("good").config.max_batch_size == 2
    with pytest.raises(InferenceServerException, match="batch-size must be within 1..2"):
        tensor = triton.InferInput("x", [3, 4], "FP32")
        tensor.set_data_from_numpy(np.ones((3, 4), np.float32))
        client.infer("good", [tensor])
    with pytest.raises(InferenceServerException, match="max_batchsize"):
        client.load_model("good", config='{"max_batchsize": 2}')


def test_a_model_that_loads_slowly_holds_up_nobody(
        client: triton.InferenceServerClient, tmp_path: Path) -> None:
    write_model(tmp_path, "slow", gate="loading")
    with ThreadPoolExecutor(1) as loader:
        with GATES["loading"].closed():
            loading = loader.submit(client.load_model, "slow")
            assert GATES["loading"].holds(1), "warming up executes it"
            assert states(client)["slow/1"] == "LOADING"
            assert infer(client, "good").all()
            with pytest.raises(InferenceServerException, match="is not ready: loading"):
                infer(client, "slow")
            assert not loading.done()
        loading.result()
    assert client.is_model_ready("slow")


def test_unknown_models_cannot_be_loaded_or_unloaded(client: triton.InferenceServerClient) -> None:
    for call in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException) as caught:
            call("nobody")
        assert caught.value.status() == "StatusCode.NOT_FOUND"
