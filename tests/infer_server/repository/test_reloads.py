"""Reloading a model loads only the versions whose files or configuration changed."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from infer_server.repository.building import Compiler
from infer_server.repository.model import Model
from scripts.testing.numpy_engine import write_model
from tests.infer_server.serving import RunningServer, serving

CONFIG = """version_policy {{ specific {{ versions: [{}] }} }} {}
    output {{ name: "y" data_type: TYPE_FP32 dims: 4 label_filename: "labels.txt" }}"""


def write(repository: Path, versions: str = "1, 2", more: str = "") -> Path:
    folder = repository / "m"
    (folder / "config.pbtxt").write_text(CONFIG.format(versions, more))
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for version in (1, 2):
        write_model(tmp_path, "m", version)
    (tmp_path / "m" / "labels.txt").write_text("a\nb\nc\nd\n")
    write(tmp_path)
    return tmp_path


@pytest.fixture
def server(repository: Path) -> Iterator[RunningServer]:
    with serving(repository, explicit_control=True, load_models=("m",)) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


def loaded(server: RunningServer, name: str = "m") -> dict[int, Model]:
    repository = server.server.repository
    return {version: repository.find(name, str(version)) for version in repository.versions(name)}


def compiled_by_python(folder: Path) -> None:
    (folder / "1" / "__pycache__").mkdir()
    (folder / "1" / "__pycache__" / "model.pyc").touch()


@pytest.mark.parametrize(("change", "kept"), [
    (lambda folder: None, {1, 2}),
    (lambda folder: (folder / "config.pbtxt").touch(), {1, 2}),
    (compiled_by_python, {1, 2}),
    (lambda folder: (write_model(folder.parent, "m", 3), write(folder.parent, "2, 3")), {2}),
    (lambda folder: (folder / "1" / "model.plan").touch(), {2}),
    (lambda folder: (folder / "2" / "beside.bin").touch(), {1}),
    (lambda folder: write(folder.parent, more="max_batch_size: 2"), set[int]()),
    (lambda folder: (folder / "labels.txt").write_text("e\nf\ng\nh\n"), set[int]()),
    (lambda folder: (folder / "beside.txt").touch(), set[int]()),
    (lambda folder: ((folder / "configs").mkdir(), (folder / "configs" / "other.pbtxt").touch()), {1, 2}),
], ids=["nothing", "the time of the configuration", "what Python writes", "a new version", "a file of a version",
        "a new file of a version", "the configuration", "the labels", "a file of all versions",
        "another configuration"])
def test_versions_whose_files_and_configuration_are_the_same_stay_loaded(
        repository: Path, server: RunningServer, client: triton.InferenceServerClient,
        change: Callable[[Path], object], kept: set[int]) -> None:
    before = loaded(server)
    change(repository / "m")
    client.load_model("m")
    after = loaded(server)
    assert {version for version, model in before.items() if after.get(version) is model} == kept
    served = client.get_model_config("m", "2").config.version_policy.specific.versions
    assert set(served) == after.keys()


def test_a_configuration_of_a_request_is_loaded_once(
        server: RunningServer, client: triton.InferenceServerClient) -> None:
    first = loaded(server)[2]
    client.load_model("m", config='{"max_batch_size": 3}')
    second = loaded(server)[2]
    client.load_model("m", config='{"max_batch_size": 3}')
    assert loaded(server)[2] is second is not first
    client.load_model("m")
    assert loaded(server)[2] is not second


def test_files_of_a_request_are_loaded_once(
        server: RunningServer, client: triton.InferenceServerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiler, "build", lambda self, source, threads: nullcontext(source.file))
    models = []
    for plan in (b"{}", b"{}", b'{"kind": "echo"}'):
        client.load_model("m", config="{}", files={"file:1/model.onnx": plan})
        models.append(loaded(server)[1])
    assert models[0] is models[1] is not models[2]


def test_a_calibration_cache_that_the_build_writes_is_no_change(
        repository: Path, server: RunningServer, client: triton.InferenceServerClient,
        monkeypatch: pytest.MonkeyPatch) -> None:
    cache = write_model(repository, "onnx", config="""
        parameters { key: "calib_cache" value { string_value: "ranges" } }""") / "ranges"
    (repository / "onnx" / "1" / "model.plan").rename(repository / "onnx" / "1" / "model.onnx")
    monkeypatch.setattr(Compiler, "build", lambda self, source, threads: (
        cache.exists() or cache.write_text("x: 1"), nullcontext(source.file))[1])
    models = []
    for _ in range(2):
        client.load_model("onnx")
        models.append(loaded(server, "onnx")[1])
    cache.write_text("x: 2")
    client.load_model("onnx")
    assert models[0] is models[1] is not loaded(server, "onnx")[1]


def test_an_ensemble_stays_loaded_as_long_as_the_models_of_its_steps_do(
        repository: Path, server: RunningServer, client: triton.InferenceServerClient) -> None:
    ensemble = repository / "e" / "1"
    ensemble.mkdir(parents=True)
    (ensemble.parent / "config.pbtxt").write_text("""
        input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_FP32 dims: 4 }
        max_batch_size: 8 ensemble_scheduling { step { model_name: "m" model_version: -1
            input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }""")
    models = []
    for touched in (False, False, True):
        if touched:
            (repository / "m" / "2" / "model.plan").touch()
            client.load_model("m")
        client.load_model("e")
        models.append(loaded(server, "e")[1])
    assert models[0] is models[1] is not models[2]


PIDS = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([os.getpid()], np.int32))])
                for _ in requests]
"""
OF_PIDS = """input { name: "x" data_type: TYPE_INT32 dims: 1 } output { name: "y" data_type: TYPE_INT32 dims: 1 }
    version_policy { specific { versions: [%s] } }"""


def test_the_process_of_a_python_version_that_did_not_change_lives_on(tmp_path: Path) -> None:
    def pids(client: triton.InferenceServerClient) -> dict[int, int]:
        tensor = triton.InferInput("x", [1], "INT32")
        tensor.set_data_from_numpy(np.zeros(1, np.int32))
        return {version: int(client.infer("p", [tensor], str(version)).as_numpy("y")[0])
                for version in (1, 2, 3) if client.is_model_ready("p", str(version))}

    for version in (1, 2, 3):
        (tmp_path / "p" / str(version)).mkdir(parents=True)
        (tmp_path / "p" / str(version) / "model.py").write_text(PIDS)
    (tmp_path / "p" / "config.pbtxt").write_text(OF_PIDS % "1, 2")
    with (serving(tmp_path, explicit_control=True, load_models=("p",)) as server,
          triton.InferenceServerClient(server.address) as client):
        before = pids(client)
        (tmp_path / "p" / "config.pbtxt").write_text(OF_PIDS % "2, 3")
        client.load_model("p")
        after = pids(client)
        assert (before.keys(), after.keys()) == ({1, 2}, {2, 3}) and before[2] == after[2]
