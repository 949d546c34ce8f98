"""Tests of models loaded at their first request, within a memory limit."""
from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from infer_server.repository.building import Compiler
from infer_server.repository.on_demand import OnDemand
from infer_server.repository.repository import Repository
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.repository.test_ensembles import write_chain
from tests.infer_server.serving import FRONTS, RunningServer, serving

MIB = 1 << 20
CHAIN = """platform: "ensemble" max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_FP32 dims: 4 }
    ensemble_scheduling { step { model_name: "step" input_map { key: "x" value: "x" }
                                 output_map { key: "y" value: "y" } } }"""


def large(repository: Path, name: str, **plan: Any) -> None:
    """Write a model that takes about 1 MiB of memory."""
    file = write_model(repository, name, **plan) / "1" / "model.plan"
    file.write_text(file.read_text() + " " * MIB)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    for name in ("a", "b", "c", "step"):
        large(tmp_path, name)
    large(tmp_path, "slow", gate="demanded")
    write_model(tmp_path, "bad", crash=True)
    (tmp_path / "chain").mkdir()
    (tmp_path / "chain" / "config.pbtxt").write_text(CHAIN)
    with serving(tmp_path, model_memory_bytes=5 * MIB // 2) as running:
        yield running


def answer(library: Any, server: RunningServer, model: str) -> Any:
    port = server.ports.grpc if library is tritonclient.grpc else server.ports.http
    with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer(model, [tensor(library)]).as_numpy("y").tolist()[0]


def tensor(library: Any) -> Any:
    created = library.InferInput("x", [1, 4], "FP32")
    created.set_data_from_numpy(np.float32([[1, 2, 3, 4]]))
    return created


def loaded(server: RunningServer) -> list[str]:
    async def names() -> list[str]:         # on the loop, which may be about to add one
        return sorted(model.name for model in server.server.repository.models())
    return server.run(names())


def test_the_least_used_makes_room_for_what_is_asked_for(server: RunningServer) -> None:
    assert loaded(server) == []
    for library, model, then in ((tritonclient.grpc, "a", ["a"]), (tritonclient.http, "b", ["a", "b"]),
                                 (tritonclient.http, "a", ["a", "b"]), (tritonclient.grpc, "c", ["a", "c"]),
                                 (tritonclient.grpc, "chain", ["c", "chain", "step"]),
                                 (tritonclient.http, "a", ["a", "chain", "step"]),
                                 (tritonclient.http, "b", ["a", "b"])):
        assert answer(library, server, model) == [3, 5, 7, 9]
        assert eventually(lambda then=then: loaded(server) == then), model


def test_what_was_loaded_for_a_request_makes_no_room_before_the_request_has_gone_on(server: RunningServer) -> None:
    """With grpcio, the request continues one turn of the event loop later; other loads may need memory before."""
    on_demand, victims = server.server._services.on_demand, list[str | None]()
    assert on_demand
    go_on, least_used = on_demand._go_on, on_demand._least_used

    def seen(name: str) -> None:
        go_on(name)
        victims.append(least_used("b"))

    async def asked() -> str | None:
        on_demand._go_on = seen                         # type: ignore[method-assign]
        await on_demand.load("a")
        on_demand._go_on = go_on                        # type: ignore[method-assign]
        return least_used("b")

    assert server.run(asked()) == "a" and {*victims} == {None}


def test_ensembles_around_ensembles_go_with_what_they_call(server: RunningServer) -> None:
    inner = write_chain(server.folder, "a", max_batch=8, dims="4")
    middle = write_chain(server.folder, inner, "b", max_batch=8, dims="4")
    outer = write_chain(server.folder, middle, max_batch=8, dims="4")
    for _ in range(2):
        assert answer(tritonclient.grpc, server, outer) == [7, 11, 15, 19]
        assert eventually(lambda: loaded(server) == sorted(["a", "b", inner, middle, outer]))
        assert answer(tritonclient.grpc, server, "c") == [3, 5, 7, 9]
        assert eventually(lambda: len(loaded(server)) == 2 and not {inner, middle, outer} & {*loaded(server)})


def test_an_ensemble_that_is_asked_for_while_others_go_keeps_what_it_calls(
        server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = server.server.repository
    unload, gone = repository.unload, list[str]()
    ensembles = [write_chain(server.folder, "a", max_batch=most, dims="4") for most in (8, 4)]

    async def meanwhile(name: str) -> None:
        await unload(name)
        gone.append(name)
        if gone == ensembles[:1]:
            await repository.load(name)             # as for a request that came while the second one was unloaded

    for name in (*ensembles, "b"):
        assert answer(tritonclient.grpc, server, name) == [3, 5, 7, 9]
    monkeypatch.setattr(repository, "unload", meanwhile)
    assert answer(tritonclient.grpc, server, "c") == [3, 5, 7, 9]
    assert eventually(lambda: loaded(server) == ["b", "c"])


@pytest.mark.parametrize("is_ensemble", [False, True])
def test_what_was_loaded_for_a_load_that_failed_takes_room_as_well(server: RunningServer, is_ensemble: bool) -> None:
    large(server.folder, "half")
    if is_ensemble:
        name = write_chain(server.folder, "half", max_batch=8, dims="5")    # which the step has not
    else:
        name = "half"
        write_model(server.folder, name, 2, config="version_policy { all {} }", crash=True)
    for model in ("a", "b"):
        assert answer(tritonclient.grpc, server, model) == [3, 5, 7, 9]
    if is_ensemble:
        with pytest.raises(InferenceServerException, match="but FP32"):
            answer(tritonclient.grpc, server, name)
    else:
        assert answer(tritonclient.grpc, server, name) == [3, 5, 7, 9]
    assert eventually(lambda: len(loaded(server)) == 2)


def test_what_an_ensemble_needs_that_is_being_loaded_makes_no_room(server: RunningServer) -> None:
    write_chain(server.folder, "step", "slow", max_batch=8, dims="4")
    with ThreadPoolExecutor() as clients, GATES["demanded"].closed():
        requested = clients.submit(answer, tritonclient.grpc, server, "step_slow_8")
        assert GATES["demanded"].holds(1), "step is there, and the other one's warming up"
        for model in ("a", "b"):
            assert answer(tritonclient.grpc, server, model) == [3, 5, 7, 9]
        assert eventually(lambda: loaded(server) == ["b", "step"])
    assert requested.result() == [7, 11, 15, 19]


def test_what_an_ensemble_needs_that_somebody_waits_for_makes_no_room_either(server: RunningServer) -> None:
    async def victims() -> tuple[str | None, str | None]:
        demand = server.server._services.on_demand
        assert demand is not None
        usually = demand._least_used("a")
        demand._loading["chain"] = asyncio.ensure_future(asyncio.sleep(0))      # as until who waits has gone on
        awaited = demand._least_used("a")
        del demand._loading["chain"]
        return usually, awaited

    assert answer(tritonclient.grpc, server, "chain") == [3, 5, 7, 9]
    assert server.run(victims()) == ("step", None)


def test_what_clients_load_and_what_is_loaded_at_the_start_makes_room_as_well(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        large(tmp_path, name)
    with serving(tmp_path, model_memory_bytes=5 * MIB // 2, explicit_control=True,
                 load_models=("a", "b", "c")) as running, tritonclient.grpc.InferenceServerClient(
                     running.address) as client:
        demand = running.server._services.on_demand
        assert demand is not None and eventually(lambda: len(loaded(running)) == 2)
        for name in ("a", "b", "d"):
            assert eventually(lambda: not demand._evicting.locked())
            client.load_model(name)
        assert eventually(lambda: loaded(running) == ["b", "d"])


def test_a_model_that_was_unloaded_and_cannot_be_read_says_why(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_model(repository, "m")
    with serving(repository, model_memory_bytes=MIB) as running:
        demand = running.server._services.on_demand
        assert demand is not None
        for is_gone, output in ((False, "nonsense"), (True, "No such file")):
            assert answer(tritonclient.grpc, running, "m") == [3, 5, 7, 9]
            running.run(running.server.repository.unload("m"))          # as to make room
            if is_gone:
                repository.rename(tmp_path / "away")
            else:
                (repository / "m" / "config.pbtxt").write_text("nonsense: 1")
            demand._listed_until = 0.0                                  # its names are looked up again
            with pytest.raises(InferenceServerException, match=output):
                answer(tritonclient.grpc, running, "m")
            (repository / "m" / "config.pbtxt").unlink(missing_ok=True)
            demand._retry_at.clear()


def test_a_model_that_a_client_loads_is_loaded_again_though_it_could_not_be_before(
        server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_server.repository.on_demand._RETRY_SECS", 1e6)
    with pytest.raises(InferenceServerException, match="a loader's bug"):
        answer(tritonclient.grpc, server, "bad")
    write_model(server.folder, "bad")
    repository = server.server.repository
    server.run(repository.load("bad"))
    server.run(repository.unload("bad"))                # as to make room
    assert answer(tritonclient.grpc, server, "bad") == [3, 5, 7, 9]


def test_whatever_asks_first_loads_a_model(server: RunningServer) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.address) as client:
        assert client.get_model_metadata("a").name == "a" and not client.is_model_ready("b")
        client.start_stream(lambda result, error: answers.put(error or result.as_numpy("y").tolist()[0]))
        for name in ("b", "nobody", "a"):
            client.async_stream_infer(name, [tensor(tritonclient.grpc)])
        actual = [answers.get(timeout=TIMEOUT_SECS) for _ in range(3)]
        client.stop_stream()
    assert actual[0] == actual[2] == [3, 5, 7, 9] and "unknown model" in str(actual[1])
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.ports.http}") as client:
        assert client.get_model_config("c")["name"] == "c"


def test_many_requests_wait_for_one_load(server: RunningServer) -> None:
    with ThreadPoolExecutor(6) as clients:
        with GATES["demanded"].closed():
            requested = [clients.submit(answer, library, server, "slow")
                         for library in (tritonclient.grpc, tritonclient.http) * 3]
            assert GATES["demanded"].holds(1), "warming up executes it"
            assert answer(tritonclient.grpc, server, "a") == [3, 5, 7, 9], "others go on meanwhile"
        assert [each.result() for each in requested] == [[3, 5, 7, 9]] * 6


def test_what_cannot_be_loaded_is_not_tried_for_each_request(
        server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_server.repository.on_demand._RETRY_SECS", 1e6)      # however slow this machine is
    for name, output in (("bad", "a loader's bug"), ("nobody", "unknown model")):
        for library in (tritonclient.grpc, tritonclient.http) * 2:
            with pytest.raises(InferenceServerException, match=output):
                answer(library, server, name)
    assert caplog.text.count("'bad' version 1 cannot be loaded") == 1


def test_a_model_that_was_built_holds_its_plan_and_not_its_onnx_file(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large(tmp_path, "m")
    plan = (tmp_path / "m" / "1" / "model.plan").rename(tmp_path / "built.plan")
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(b"")           # its weights are beside it
    monkeypatch.setattr(Compiler, "build", lambda self, source, threads: nullcontext(plan))
    with serving(tmp_path) as running:
        assert MIB < running.server.repository.find("m").memory_bytes < 2 * MIB


@pytest.mark.parametrize("front", FRONTS)
def test_requests_go_on_with_the_first_version_that_is_ready(tmp_path: Path, front: str) -> None:
    write_model(tmp_path, "m", 2, config="version_policy { all {} }")
    write_model(tmp_path, "m", 1, gate="older")
    with serving(tmp_path, model_memory_bytes=16 * MIB, grpc_front=front) as running, GATES["older"].closed():
        assert answer(tritonclient.grpc, running, "m") == answer(tritonclient.http, running, "m") == [3, 5, 7, 9]
        assert running.server.repository.versions("m") == [2]


def test_nobody_overtakes_who_waits_for_a_model() -> None:
    class Loading(Repository):
        ready = False

        async def load(self, name: str, *_: Any) -> None:
            await asyncio.sleep(0.01)
            raise ValueError("a bug")

        def versions(self, name: str) -> list[int]:
            return [1] if self.ready else []

    async def ask() -> list[str]:
        went: list[str] = []
        repository = Loading([], lambda source: None)               # type: ignore[arg-type, return-value]
        on_demand = OnDemand(repository, MIB)
        on_demand.when_loaded("m", lambda: went.append("first"), lambda error: None)
        repository.ready = True
        on_demand.when_loaded("m", lambda: went.append("second"), lambda error: None)
        assert not went
        await on_demand.load("m")
        on_demand.when_loaded("m", lambda: went.append("third"), lambda error: None)
        return went

    assert asyncio.run(ask()) == ["first", "second", "third"]


def test_a_model_that_comes_into_the_repository_is_found_when_its_names_are_looked_up_again(
        tmp_path: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_server.repository.on_demand._RETRY_SECS", 1e6)
    monkeypatch.setattr("infer_server.repository.on_demand._LISTING_SECS", 0.05)
    with pytest.raises(InferenceServerException, match="unknown model"):
        answer(tritonclient.grpc, server, "new")
    write_model(tmp_path, "new")

    def is_found() -> bool:
        try:
            return bool(answer(tritonclient.grpc, server, "new") == [3, 5, 7, 9])
        except InferenceServerException:
            return False

    assert eventually(is_found)


def test_names_that_are_none_cost_no_look_at_the_repository_each(
        server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, looks = server.server.repository, list[int]()
    names = repository.names
    monkeypatch.setattr(repository, "names", lambda: (looks.append(1), names())[1])
    monkeypatch.setattr("infer_server.repository.on_demand._LISTING_SECS", 1000.0)
    for number in range(20):
        with pytest.raises(InferenceServerException, match="unknown model"):
            answer(tritonclient.grpc, server, f"nobody{number}")
    assert len(looks) == 1
    assert answer(tritonclient.grpc, server, "a") == [3, 5, 7, 9]
