"""Tests of loading, reloading and unloading a model while others are served."""
from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from infer_server import protos
from infer_server.errors import RepositoryError
from infer_server.protos import health
from infer_server.repository.folders import Source
from infer_server.repository.model import Model
from infer_server.repository.repository import Repository
from infer_server.repository.roots import LocalFolder
from scripts.testing.numpy_engine import CONTEXTS, GATES, TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_serving import eventually, infer, page
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import RunningServer, serving

INITIALIZED_LATE = HEAD + """
import os, time
class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]
        open(f"{self.folder}/started", "w").close()
        while not os.path.exists(f"{self.folder}/go"):
            time.sleep(0.01)

    def execute(self, requests):
        return []

    def finalize(self):
        open(f"{self.folder}/finalized", "w").close()
"""


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


def test_what_nobody_foresaw_of_a_models_files_is_its_failure_and_not_silence(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    with patch("infer_server.repository.repository.read_model", side_effect=AttributeError("no such thing")), serving(
            tmp_path) as running, triton.InferenceServerClient(running.address) as connected:
        assert not connected.is_server_ready()
        assert list(running.server.failures().values()) == ["AttributeError: no such thing"]


def test_under_explicit_control_only_what_was_asked_for_is_loaded(
        client: triton.InferenceServerClient, tmp_path: Path) -> None:
    write_model(tmp_path, "other")
    assert states(client) == {"good/1": "READY", "other/": ""}
    client.load_model("other")
    assert infer(client, "other").all()
    client.unload_model("other")
    for version, output, status in (("", "unknown model: 'other' has no available versions: unloaded", "NOT_FOUND"),
                                    ("1", "model: 'other' version 1 is not at ready state: unloaded", "UNAVAILABLE")):
        with pytest.raises(InferenceServerException, match=output) as caught:
            client.get_model_metadata("other", version)
        assert caught.value.status() == f"StatusCode.{status}"
    assert states(client) == {"good/1": "READY", "other/1": "UNAVAILABLE"}
    client.load_model("other")
    assert infer(client, "other").all()


def test_a_repository_without_models_and_a_model_that_is_not_in_it_are_reported(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path):
        assert eventually(lambda: "there is no model in" in caplog.text)
    with serving(tmp_path, explicit_control=True, load_models=("absent",)):
        assert eventually(lambda: "model 'absent' is not in the repository" in caplog.text)


def test_a_model_that_is_to_be_loaded_at_the_start_may_be_named_twice(server: RunningServer, tmp_path: Path) -> None:
    write_model(tmp_path, "other")
    server.run(server.server.repository.load_all(("other", "other")))
    assert server.server.repository.versions("other") == [1]


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
    with pytest.raises(InferenceServerException, match="version 2 is at UNAVAILABLE state: .*is no plan"):
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

    def ask() -> bool:
        right = bool(infer(client, "good").all())
        while not done.is_set():
            right &= bool(infer(client, "good").all())
        return right

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
            with pytest.raises(InferenceServerException, match="has no available versions: unloading"):
                infer(client, "slow")
        assert all(future.result().all() for future in accepted)
        unloading.result()


def test_a_repository_that_closes_waits_for_what_is_being_unloaded(tmp_path: Path) -> None:
    write_model(tmp_path, "m", gate="closing")
    with serving(tmp_path) as running, triton.InferenceServerClient(running.address) as client:
        repository = running.server.repository
        with ThreadPoolExecutor(1) as asking:
            with GATES["closing"].closed():
                answer = asking.submit(infer, client, "m")
                assert GATES["closing"].holds(1)
                unloading = asyncio.run_coroutine_threadsafe(repository.unload("m"), running.loop)
                assert eventually(lambda: not repository.versions("m"))
                closing = asyncio.run_coroutine_threadsafe(repository.close(), running.loop)
                for _ in range(10):
                    running.run(asyncio.sleep(0))
                assert not closing.done()
            closing.result(TIMEOUT_SECS)
            unloading.result(TIMEOUT_SECS)
            answer.result()


@pytest.mark.parametrize("is_given_up", [False, True])
def test_what_becomes_ready_while_the_server_ends_is_finalized(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_given_up: bool) -> None:
    monkeypatch.setattr("infer_server.python_backend.process._FINALIZE_SECS", TIMEOUT_SECS)    # on a slow machine, too
    write_model(tmp_path, "m", gate="ending")
    python_model(tmp_path, "p", INITIALIZED_LATE, """backend: "python"
        input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_FP32 dims: 4 }""")
    with serving(tmp_path, explicit_control=True, load_models=("m",)) as running, triton.InferenceServerClient(
            running.address) as client, ThreadPoolExecutor(1) as asking:
        repository = running.server.repository
        with GATES["ending"].closed():
            answer = asking.submit(infer, client, "m")
            assert GATES["ending"].holds(1)
            loading = asyncio.run_coroutine_threadsafe(repository.load("p"), running.loop)
            assert eventually((tmp_path / "p" / "started").exists)
            if is_given_up:                             # as the server does with those that it has begun itself
                loading.cancel()
            closing = asyncio.run_coroutine_threadsafe(repository.close(), running.loop)
            (tmp_path / "p" / "go").touch()
            assert eventually((tmp_path / "p" / "finalized").exists), "while another model is drained"
        closing.result(TIMEOUT_SECS)
        assert answer.result().all() and not repository.versions("p")
        if not is_given_up:
            with pytest.raises(RepositoryError, match="shutting down"):
                loading.result(TIMEOUT_SECS)


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
    with pytest.raises(InferenceServerException, match="batch-size must be <= 2"):
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
            with pytest.raises(InferenceServerException, match="has no available versions: loading"):
                infer(client, "slow")
            assert not loading.done()
        loading.result()
    assert client.is_model_ready("slow")


@pytest.mark.parametrize("what", ["Load", "Unload"])
def test_a_load_or_unload_goes_on_when_its_client_leaves(
        server: RunningServer, client: triton.InferenceServerClient, tmp_path: Path, what: str) -> None:
    write_model(tmp_path, "slow", gate="left")
    if what == "Unload":
        client.load_model("slow")
    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(1) as asking:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with GATES["left"].closed():
            if what == "Unload":
                answer = asking.submit(infer, client, "slow")
                assert GATES["left"].holds(1)
            call = getattr(stub, f"RepositoryModel{what}").future(
                getattr(service_pb2, f"RepositoryModel{what}Request")(model_name="slow"))
            assert eventually(lambda: states(client).get("slow/1") == f"{what.upper()}ING") and GATES["left"].holds(1)
            call.cancel()
            for _ in range(10):                         # on the same connection, behind the cancellation
                assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=TIMEOUT_SECS).live
            assert states(client)["slow/1"] == f"{what.upper()}ING"
        if what == "Unload":
            assert answer.result().all()
    assert eventually(lambda: states(client)["slow/1"] == {"Load": "READY", "Unload": "UNAVAILABLE"}[what])
    assert eventually(lambda: not server.server._service.models._changes)


def test_unknown_models_cannot_be_loaded_or_unloaded(client: triton.InferenceServerClient) -> None:
    for call in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException) as caught:
            call("nobody")
        assert caught.value.status() == "StatusCode.NOT_FOUND"


def test_a_server_is_not_ready_while_a_model_has_failed(tmp_path: Path) -> None:
    write_model(tmp_path, "good")
    plan = write_model(tmp_path, "bad") / "1" / "model.plan"
    sound = plan.read_bytes()
    plan.write_bytes(b"\0")
    with (serving(tmp_path, explicit_control=True, load_models=None) as server,
          triton.InferenceServerClient(server.address) as client):
        assert not client.is_server_ready() and page(server, "/v2/health/ready") == 503
        assert infer(client, "good").all()
        plan.write_bytes(sound)
        client.load_model("bad")
        assert client.is_server_ready() and page(server, "/v2/health/ready") == 200
        plan.write_bytes(b"\0")
        with pytest.raises(InferenceServerException):
            client.load_model("bad")
        assert client.is_server_ready(), "what was loaded before is served"
        client.unload_model("bad")
        assert client.is_server_ready(), "nobody wants it served"


def test_readiness_may_be_had_in_spite_of_failures(tmp_path: Path) -> None:
    write_model(tmp_path, "bad", crash=True)
    with serving(tmp_path, strict_readiness=False) as server, triton.InferenceServerClient(server.address) as client:
        assert client.is_server_ready()


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_a_server_is_not_ready_without_what_it_was_told_to_serve(tmp_path: Path, folder: str) -> None:
    with (serving(tmp_path, model_repositories=(tmp_path / folder,), explicit_control=folder == ".",
                  load_models=("absent",)) as server, triton.InferenceServerClient(server.address) as client):
        assert not client.is_server_ready()
        if folder == ".":
            with pytest.raises(InferenceServerException, match="there is no folder absent"):
                infer(client, "absent")


def test_a_health_watcher_sees_a_model_fail_and_recover(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    with (serving(tmp_path, explicit_control=True) as server, grpc.insecure_channel(server.address) as channel,
          triton.InferenceServerClient(server.address) as client):
        watch = channel.unary_stream(f"/{protos.HEALTH_SERVICE}/Watch", health.HealthCheckRequest.SerializeToString,
                                     health.HealthCheckResponse.FromString)
        seen = watch(health.HealthCheckRequest(), timeout=TIMEOUT_SECS)
        assert next(seen).status == health.HealthCheckResponse.SERVING
        plan = tmp_path / "m" / "1" / "model.plan"
        sound = plan.read_bytes()
        plan.write_bytes(b"\0")
        with pytest.raises(InferenceServerException):
            client.load_model("m")
        assert next(seen).status == health.HealthCheckResponse.NOT_SERVING
        plan.write_bytes(sound)
        client.load_model("m")
        assert next(seen).status == health.HealthCheckResponse.SERVING
        seen.cancel()


def test_several_repositories_are_served_and_a_name_in_two_of_them_is_refused(tmp_path: Path) -> None:
    for folder, models in (("a", ("one", "both")), ("b", ("two", "both"))):
        for model in models:
            write_model(tmp_path / folder, model)
    with (serving(tmp_path, model_repositories=(tmp_path / "a", tmp_path / "b")) as server,
          triton.InferenceServerClient(server.address) as client):
        assert infer(client, "one").all() and infer(client, "two").all()
        with pytest.raises(InferenceServerException, match="model appears in two or more repositories"):
            infer(client, "both")
        assert states(client) == {"one/1": "READY", "two/1": "READY", "both/": "UNAVAILABLE"}
    with (serving(tmp_path, model_repositories=(tmp_path / "a", tmp_path / "b"), explicit_control=True) as server,
          triton.InferenceServerClient(server.address) as client):
        index = {model.name: model for model in client.get_model_repository_index().models}
        assert {name: model.state for name, model in index.items()} == {"one": "", "two": "", "both": "UNAVAILABLE"}
        assert index["both"].reason == "model appears in two or more repositories"


def test_names_that_nobody_has_leave_nothing_behind(
        server: RunningServer, client: triton.InferenceServerClient) -> None:
    for i in range(10):
        with pytest.raises(InferenceServerException):
            client.load_model(f"nobody{i}")
    assert not server.server.repository._locks and not server.server.repository._users


def test_probes_of_models_over_http_are_answered(server: RunningServer, tmp_path: Path) -> None:
    write_model(tmp_path, "a model")
    server.run(server.server.repository.load("a model"))
    statuses = {path: page(server, f"/v2/models/{path}/ready") for path in (
        "good", "good/versions/1", "a%20model", "good/versions/2", "good/versions/x", "nobody")}
    assert list(statuses.values()) == [200, 200, 200, 404, 400, 404]
    server.run(server.server.repository.unload("good"))
    assert page(server, "/v2/models/good/ready") == 404 and page(server, "/v2/models/good/versions/1/ready") == 503


def test_a_load_reads_the_model_once_and_does_not_look_at_all_others(tmp_path: Path) -> None:
    class ShapeEnv(LocalFolder):
        listings, read = 0, Counter[str]()

        def names(self) -> list[str]:
            self.listings += 1
            return super().names()

        def fetch(self, name: str) -> None:
            self.read[name] += 1

    async def load_all() -> None:
        await repository.load_all()
        assert len(repository.failures()) == len(place.read), "it loads nothing here"

    def load(source: Source) -> Model:
        raise RepositoryError(f"{source.name} is only read")

    place = ShapeEnv(tmp_path)
    names = {f"m{i}" for i in range(40)}
    for name in names:
        write_model(tmp_path, name)
    repository = Repository([place], load)
    asyncio.run(load_all())
    assert place.listings == 1 and place.read == dict.fromkeys(names, 1)


def test_a_place_that_is_gone_is_not_one_without_the_model(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    assert LocalFolder(tmp_path).has("here") and not LocalFolder(tmp_path).has("there")
    with pytest.raises(RepositoryError, match="No such file"):
        LocalFolder(tmp_path / "gone").has("here")
