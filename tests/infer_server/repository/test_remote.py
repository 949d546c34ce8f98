"""Tests of remote repositories copied to a bounded store, with fsspec's memory and an S3 server."""
from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as triton

import infer_server.repository.remote
from infer_server.errors import FetchError, RepositoryError
from infer_server.repository.remote import RemoteFolder
from infer_server.server import repository_roots
from scripts.testing.numpy_engine import TIMEOUT_SECS, check, write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import RunningServer, serving

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
MIB = 1 << 20


@pytest.fixture
def store() -> Iterator[Any]:
    """Yield fsspec's memory file system, which is shared by the whole process, empty."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def put(store: Any, path: str, content: bytes) -> None:
    with store.open(f"/models/{path}", "wb") as file:
        file.write(content)


def remote(tmp_path: Path, max_bytes: int = MIB) -> RemoteFolder:
    return RemoteFolder("memory://models", tmp_path / "store", max_bytes)


def copies(folder: RemoteFolder) -> dict[str, bytes]:
    actual = {path.relative_to(folder.path): path for path in folder.path.rglob("*") if path.is_file()}
    return {str(name): path.read_bytes() for name, path in actual.items() if not name.parts[0].startswith(".")}


def test_what_changed_is_copied_and_what_is_gone_is_removed(store: Any, tmp_path: Path) -> None:
    put(store, "m/1/model.plan", b"one")
    put(store, "m/config.pbtxt", b"")
    put(store, "m/.hidden/x", b"-")
    put(store, "other/1/model.plan", b"other")
    folder = remote(tmp_path)
    assert folder.names() == ["m", "other"] and copies(folder) == {}
    before = folder.fingerprint("m")
    folder.fetch("m")
    assert copies(folder) == {"m/1/model.plan": b"one", "m/config.pbtxt": b""}
    kept = (folder.path / "m" / "config.pbtxt").stat().st_ino
    put(store, "m/1/model.plan", b"two")
    put(store, "m/2/model.plan", b"new")
    assert folder.fingerprint("m") != before
    folder.fetch("m")
    assert copies(folder)["m/1/model.plan"] == b"two" and copies(folder)["m/2/model.plan"] == b"new"
    assert (folder.path / "m" / "config.pbtxt").stat().st_ino == kept, "it is the same version"
    store.rm("/models/m/1", recursive=True)
    folder.fetch("m")
    assert copies(folder) == {"m/2/model.plan": b"new", "m/config.pbtxt": b""}
    assert not (folder.path / "m" / "1").exists(), "an empty folder would be a version"


def test_a_model_that_changes_while_it_is_copied_is_not_put_into_place(
        store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "m/1/model.plan", b"one")
    folder = remote(tmp_path)
    folder.fetch("m")
    put(store, "m/1/model.plan", b"two")
    get_file = folder._files.get_file

    def meanwhile(*arguments: Any) -> None:
        get_file(*arguments)
        put(store, "m/2/model.plan", b"new")

    monkeypatch.setattr(folder._files, "get_file", meanwhile)
    with pytest.raises(RepositoryError, match="was changed while it was copied"):
        folder.fetch("m")
    assert copies(folder) == {"m/1/model.plan": b"one"}


def test_the_store_is_bounded_and_keeps_what_is_loaded(store: Any, tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        put(store, f"{name}/1/model.plan", bytes(400_000))
    folder = remote(tmp_path)
    for name in ("a", "b"):
        folder.fetch(name)
    folder.release("a")
    folder.fetch("c")
    assert sorted(copies(folder)) == ["b/1/model.plan", "c/1/model.plan"]
    with pytest.raises(RepositoryError, match="exceed --repository-cache-mib 1; raise it"):
        folder.fetch("d")
    folder.release("d")
    folder.release("b")
    folder.fetch("d")
    assert sorted(copies(folder)) == ["c/1/model.plan", "d/1/model.plan"]


def test_a_copy_of_which_nothing_is_served_makes_room_for_what_its_model_is_now(store: Any, tmp_path: Path) -> None:
    folder = remote(tmp_path)
    for size, is_served in ((600_000, False), (600_001, True)):
        put(store, "a/1/model.plan", bytes(size))
        folder.fetch("a")
        assert len(copies(folder)["a/1/model.plan"]) == size
        if not is_served:
            folder.release("a")
    put(store, "a/1/model.plan", bytes(600_002))
    with pytest.raises(RepositoryError, match="exceed --repository-cache-mib 1; raise it"):
        folder.fetch("a")
    assert len(copies(folder)["a/1/model.plan"]) == 600_001, "it is served, and stays"


def test_a_file_may_become_a_folder_and_a_folder_a_file(store: Any, tmp_path: Path) -> None:
    folder = remote(tmp_path)
    for path in ("a/1/data", "a/1/data/x", "a/1/data"):
        store.store.clear()
        put(store, path, path.encode())
        folder.fetch("a")
        assert copies(folder) == {path: path.encode()}


def test_what_a_server_that_was_killed_has_left_of_its_copies_is_removed(store: Any, tmp_path: Path) -> None:
    put(store, "a/1/model.plan", b"one")
    folder = remote(tmp_path)
    folder.fetch("a")
    for left in (".incoming-x/1", ".outline-x/m", "half/1"):
        (folder.path / left).mkdir(parents=True)
        (folder.path / left / "model.plan").write_bytes(b"two")
    path, before = folder.path, copies(folder)
    folder.close()
    folder = remote(tmp_path)
    assert sorted(each.name for each in path.iterdir()) == [".lock", ".manifests", "a"]
    assert copies(folder) == {"a/1/model.plan": b"one"} != before


def test_a_server_that_has_stopped_gives_its_copies_back(store: Any, tmp_path: Path) -> None:
    put(store, "m/1/model.plan", b'{"kind": "echo"}')
    with (serving(tmp_path, model_repositories=("memory://models",), repository_cache=tmp_path / "store") as running,
          pytest.raises(RepositoryError, match="another server's")):
        remote(tmp_path)
    assert copies(remote(tmp_path)).keys() == {"m/1/model.plan"}, f"though {running.server} is still there"


def test_what_cannot_be_read_says_why(store: Any, tmp_path: Path) -> None:
    folder = remote(tmp_path)
    with pytest.raises(RepositoryError, match="memory://models: FileNotFoundError"):
        folder.names()
    with pytest.raises(RepositoryError, match="another server's"):
        remote(tmp_path)
    with pytest.raises(RepositoryError, match="nowhere://x: Protocol not known"):
        repository_roots(["nowhere://x"], tmp_path, MIB)
    put(store, "m/1/../../../outside", b"-")
    with pytest.raises(RepositoryError, match="is not a path in the model's folder"):
        folder.fetch("m")
    assert not (tmp_path / "outside").exists()


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_manifest_that_is_no_json_costs_a_copy_and_no_more(store: Any, tmp_path: Path) -> None:
    put(store, "m/1/model.plan", b"one")
    folder = remote(tmp_path)
    for damaged in ("", "[]", "{"):
        folder.fetch("m")
        (folder.path / ".manifests" / "m").write_text(damaged)
        (folder.path / "m" / "1" / "model.plan").write_text("other")
        folder.fetch("m")
        assert copies(folder) == {"m/1/model.plan": b"one"}
        assert list((folder.path / ".manifests").iterdir()) == [folder.path / ".manifests" / "m"]


def test_one_model_that_the_disk_refuses_leaves_the_others_alone_and_is_tried_again(
        store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "local"
    write_model(repository, "good")
    write_model(repository, "bad", config='default_model_filename: "{}"'.format("x" * 300))
    put(store, "m/1/model.plan", b'{"kind": "echo"}')
    with monkeypatch.context() as patch:
        patch.setattr(infer_server.repository.remote.os, "replace", full)
        with serving(tmp_path, model_repositories=(repository, "memory://models"), repository_cache=tmp_path / "store",
                     poll_secs=0.05) as running, triton.InferenceServerClient(running.address) as client:
            failures = running.server.failures()
            assert "name too long" in failures["bad version 1"] and "No space left" in failures["m"]
            assert running.server.repository.versions("good") == [1]
            patch.undo()
            assert eventually(lambda: client.is_model_ready("m")), "at a later look, though nothing has changed"
            files, failing = running.server._poller._roots[1]._files, [True]      # type: ignore[union-attr]
            get_file = files.get_file
            patch.setattr(files, "get_file", lambda *given: full() if failing else get_file(*given))
            put(store, "m/2/model.plan", b'{"kind": "affine"}')
            assert eventually(lambda: "m" in running.server.repository.unfetched)
            failing.clear()
            assert eventually(lambda: client.is_model_ready("m", "2"))


def test_a_check_reads_configurations_and_no_models_and_goes_on_behind_what_it_cannot_read(
        store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "large/1/model.plan", bytes(2 * MIB))
    put(store, "large/config.pbtxt", b"""max_batch_size: 2 output { name: "y" data_type: TYPE_FP32 label_filename: "a" }
model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: 1 input_data_file: "x" } } }""")
    put(store, "large/warmup/x", bytes(4))
    put(store, "odd/config.pbtxt", b"\xff")
    put(store, "odd/1/model.plan", b"one")
    folder, copied = remote(tmp_path), list[str]()
    get_file = folder._files.get_file
    monkeypatch.setattr(folder._files, "get_file", lambda path, to: (
        copied.append(path.partition("models/")[2]), get_file(path, to)))
    nowhere = RemoteFolder("memory://nowhere", tmp_path / "store", MIB)
    actual = {remark.model: remark for remark in check([nowhere, folder], "cpu")}
    assert actual.keys() == {"memory://nowhere", "large", "odd"} and all(each.is_error for each in actual.values())
    assert "FileNotFoundError" in actual["memory://nowhere"].text and "label_filename: a: no" in actual["large"].text
    assert sorted(copied) == ["large/config.pbtxt", "large/warmup/x", "odd/config.pbtxt"]
    assert copies(folder) == {}


def test_only_what_is_served_is_held_in_the_store(store: Any, tmp_path: Path) -> None:
    put(store, "m/1/model.plan", b"no plan")
    put(store, "good/1/model.plan", b'{"kind": "echo"}')
    with serving(tmp_path, model_repositories=("memory://models",), repository_cache=tmp_path / "store") as running:
        repository = running.server.repository
        assert "m version 1" in running.server.failures() and repository.roots[0]._in_use == {"good"}
        running.run(repository.unload("good"))
        assert not repository.roots[0]._in_use


def test_steps_of_an_ensemble_that_is_a_circle_are_not_held_in_the_store(store: Any, tmp_path: Path) -> None:
    for name, step in (("a", "b"), ("b", "a")):
        put(store, f"{name}/config.pbtxt", f"""platform: "ensemble" input {{ name: "x" data_type: TYPE_FP32 dims: 4 }}
            output {{ name: "y" data_type: TYPE_FP32 dims: 4 }} ensemble_scheduling {{ step {{ model_name: "{step}"
input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "y" }} }} }}""".encode())
    with serving(tmp_path, model_repositories=("memory://models",), repository_cache=tmp_path / "store",
                 explicit_control=True) as running:
        with triton.InferenceServerClient(running.address) as client, pytest.raises(Exception, match="is a cycle"):
            client.load_model("a")
        assert not running.server.repository.roots[0]._in_use


def test_what_a_store_keeps_for_an_empty_folder_is_no_file(
        store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "m/1/model.plan", b"one")
    folder = remote(tmp_path)
    find = folder._files.find
    monkeypatch.setattr(folder._files, "find", lambda root, detail: {
        root: {"size": 0}, f"{root}3/": {"size": 0, "type": "file"}, **find(root, detail=detail)})
    folder.fetch("m")
    assert copies(folder) == {"m/1/model.plan": b"one"}


def test_what_is_gone_is_removed_after_a_copy_that_failed(
        store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "m/1/model.plan", b"one")
    put(store, "m/2/model.plan", b"two")
    folder = remote(tmp_path)
    folder.fetch("m")
    put(store, "m/2/model.plan", b"new")
    with monkeypatch.context() as patch, pytest.raises(FetchError, match="No space left"):
        patch.setattr(infer_server.repository.remote.os, "replace", full)
        folder.fetch("m")
    store.rm("/models/m/1", recursive=True)
    folder.fetch("m")
    assert copies(folder) == {"m/2/model.plan": b"new"}


def answer(client: triton.InferenceServerClient) -> Any:
    tensor = triton.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.float32([[1, 2, 3, 4]]))
    return client.infer("m", [tensor]).as_numpy("y").tolist()[0]


def test_eight_models_are_copied_at_a_time(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"m{number}" for number in range(16)]
    for name in names:
        put(store, f"{name}/1/model.plan", b"one")
    folder, together = remote(tmp_path), threading.Barrier(8)
    get_file, running, most = folder._files.get_file, set[int](), list[int]()

    def slow(*arguments: Any) -> None:
        running.add(threading.get_ident())
        most.append(len(running))
        together.wait(TIMEOUT_SECS)             # breaks if fewer are copied at a time
        get_file(*arguments)
        running.discard(threading.get_ident())

    monkeypatch.setattr(folder._files, "get_file", slow)
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(folder.fetch, names))
    assert max(most) == 8 and len(copies(folder)) == len(names) == folder.fetched.count


def test_copies_under_way_count_for_the_limit(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        put(store, f"{name}/1/model.plan", bytes(600_000))
    folder = remote(tmp_path)
    get_file, begun, go_on = folder._files.get_file, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(TIMEOUT_SECS)
        get_file(*arguments)

    monkeypatch.setattr(folder._files, "get_file", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(folder.fetch, "a")
        assert begun.wait(TIMEOUT_SECS)
        with pytest.raises(RepositoryError, match="exceed --repository-cache-mib 1; raise it"):
            folder.fetch("b")
        go_on.set()
        first.result(TIMEOUT_SECS)
    assert copies(folder).keys() == {"a/1/model.plan"}


@pytest.fixture
def away(store: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set; while it is not empty, calls of the store fail."""
    reasons = set[str]()
    def unless_away(call: Any) -> Any:
        def checked(files: Any, *given: Any, **named: Any) -> Any:
            if reasons:
                raise ConnectionRefusedError(*reasons)
            return call(files, *given, **named)
        return checked

    for name in ("ls", "find", "get_file"):
        monkeypatch.setattr(type(store), name, unless_away(getattr(type(store), name)))
    return reasons


def reachable(running: RunningServer) -> float:
    with urlopen(f"http://127.0.0.1:{running.ports.metrics}/metrics", timeout=TIMEOUT_SECS) as page:
        line = next(line for line in page.read().decode().splitlines()
                    if line.startswith('infer_repository_reachable{repository="memory://models"}'))
    return float(line.split()[-1])


@pytest.mark.parametrize("poll_secs", [0.0, 0.05])
def test_copies_are_served_while_the_store_is_away_and_what_changed_when_it_is_back(
        store: Any, away: set[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, poll_secs: float) -> None:
    put(store, "m/1/model.plan", b'{"kind": "echo"}')
    given: dict[str, Any] = {"model_repositories": ("memory://models",), "repository_cache": tmp_path / "store",
                             "retry_secs": 0.05, "poll_secs": poll_secs}
    with serving(tmp_path, **given) as running:
        assert reachable(running) == 1
    put(store, "m/2/model.plan", b'{"kind": "affine"}')
    put(store, "n/1/model.plan", b'{"kind": "echo"}')
    away.add("no route")
    with serving(tmp_path, **given) as running, triton.InferenceServerClient(running.address) as client:
        assert client.is_server_ready() and client.is_server_live()
        assert answer(client) == [1, 2, 3, 4] and reachable(running) == 0
        assert "no route: the models with complete copies are served: m" in caplog.text
        away.clear()
        assert eventually(lambda: client.is_model_ready("m", "2") and client.is_model_ready("n"))
        assert reachable(running) == 1 and answer(client) == [3, 5, 7, 9]


@pytest.mark.parametrize("poll_secs", [0.0, 0.05])
def test_a_store_that_is_away_is_asked_again_where_there_are_no_copies(
        store: Any, away: set[str], tmp_path: Path, poll_secs: float) -> None:
    put(store, "m/1/model.plan", b'{"kind": "echo"}')
    away.add("no route")
    with (serving(tmp_path, model_repositories=("memory://models",), repository_cache=tmp_path / "store",
                  retry_secs=0.05, poll_secs=poll_secs, strict_readiness=False) as running,
          triton.InferenceServerClient(running.address) as client):
        assert client.is_server_live() and not client.is_server_ready(), "a restart would not help"
        assert "no route" in running.server.failures()["model repository"]
        away.clear()
        assert eventually(client.is_server_ready) and answer(client) == [1, 2, 3, 4]
        assert not running.server.failures()


def test_a_load_that_is_asked_for_fails_while_the_store_is_away(store: Any, away: set[str], tmp_path: Path) -> None:
    put(store, "m/1/model.plan", b'{"kind": "echo"}')
    with serving(tmp_path, model_repositories=("memory://models",), repository_cache=tmp_path / "store",
                 explicit_control=True) as running, triton.InferenceServerClient(running.address) as client:
        client.load_model("m")
        away.add("no route")
        with pytest.raises(Exception, match="no route"):
            client.load_model("m")              # it is served, and the store may have another version
        client.unload_model("m")
        client.load_model("m")
        assert answer(client) == [1, 2, 3, 4]
        with pytest.raises(Exception, match="no route"):
            client.load_model("n")


def test_a_store_that_hangs_delays_a_start_with_copies_by_a_bounded_time(
        store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "m/1/model.plan", b"one")
    folder, ends = remote(tmp_path), threading.Event()
    folder.fetch("m")
    folder.release("m")
    monkeypatch.setattr(infer_server.repository.remote, "_LISTING_OR_COPY_SECS", 0.05)
    monkeypatch.setattr(folder._files, "ls", lambda *given, **named: ends.wait())
    monkeypatch.setattr(folder._files, "find", lambda *given, **named: pytest.fail("it did not answer a moment ago"))
    assert folder.known() == ["m"] and not folder.is_reachable
    assert folder.has("m")
    folder.fetch("m")
    ends.set()
    assert copies(folder) == {"m/1/model.plan": b"one"}


def test_a_bucket_without_models_is_no_reason_to_serve_copies(store: Any, tmp_path: Path) -> None:
    put(store, "m/1/model.plan", b"one")
    folder = remote(tmp_path)
    folder.fetch("m")
    folder.release("m")
    store.store.clear()
    store.pseudo_dirs.clear()
    with pytest.raises(FetchError, match="FileNotFoundError"):
        folder.known()
    with pytest.raises(FetchError, match="has no files|FileNotFoundError"):
        folder.fetch("m")


def test_models_of_a_bucket_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    moto = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in (("AWS_ENDPOINT_URL", endpoint), ("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"),
                        ("AWS_DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    try:
        bucket = boto3.resource("s3", endpoint_url=endpoint).create_bucket(Bucket="bucket")
        bucket.put_object(Key="models/m/1/model.plan", Body=json.dumps({"kind": "echo"}).encode())
        bucket.put_object(Key="models/m/config.pbtxt", Body=b"max_batch_size: 2")
        with (serving(tmp_path, model_repositories=("s3://bucket/models",), repository_cache=tmp_path / "store",
                      poll_secs=0.1) as running, triton.InferenceServerClient(running.address) as client):
            assert answer(client) == [1, 2, 3, 4] and client.get_model_config("m").config.max_batch_size == 2
            bucket.put_object(Key="models/m/2/model.plan", Body=json.dumps({"kind": "affine"}).encode())
            assert eventually(lambda: client.is_model_ready("m", "2"))
            assert answer(client) == [3, 5, 7, 9]
    finally:
        server.stop()
