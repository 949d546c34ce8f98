"""Tests of load requests that contain the model's files, and of paths that lead out of the repository."""
from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from infer_server.errors import InvalidRequestError
from infer_server.repository.building import Compiler
from infer_server.repository.overrides import temporary_repository
from scripts.testing.numpy_engine import write_model
from tests.infer_server.endpoints.http.plain import CLOSE, ask, post
from tests.infer_server.serving import RunningServer, serving

SECRET = "secret.txt"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("outside") / "repository"
    write_model(repository, "affine")
    (repository.parent / SECRET).write_text("for nobody")
    with serving(repository, explicit_control=True, load_models=None) as running:
        yield running


@pytest.fixture(params=[tritonclient.grpc, tritonclient.http], ids=["grpc", "http"])
def client(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[Any]:
    port = server.ports.grpc if request.param is tritonclient.grpc else server.ports.http
    with request.param.InferenceServerClient(f"127.0.0.1:{port}") as connected:
        connected.library = request.param
        yield connected


def answer(client: Any, model: str) -> Any:
    tensor = client.library.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.float32([[1, 2, 3, 4]]))
    return client.infer(model, [tensor]).as_numpy("y").tolist()[0]


def plan(kind: str = "echo") -> bytes:
    return json.dumps({"kind": kind}).encode()


def test_a_load_may_bring_the_models_files(
        client: Any, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiler, "build", lambda self, source, threads: nullcontext(source.file))
    for name in ("affine", "of a client"):
        client.load_model(name, config="{}", files={"file:3/model.onnx": plan(), "file:labels.d/a.txt": b"a"})
        assert answer(client, name) == [1, 2, 3, 4] and client.is_model_ready(name, "3")
        client.unload_model(name)
    client.load_model("affine")
    assert answer(client, "affine") == [3, 5, 7, 9], "what the repository has is served again"
    client.load_model("affine", config="{}", files={"file:1/model.onnx": plan()})
    with pytest.raises(InferenceServerException, match="is no plan"):
        client.load_model("affine", config="{}", files={"file:1/model.onnx": b"\0"})
    assert answer(client, "affine") == [1, 2, 3, 4], "what was loaded goes on"
    client.load_model("affine")
    assert not (server.server.repository.roots[0].path / "of a client").exists()


@pytest.mark.parametrize(("name", "path", "said"), [
    ("m", "../m/1/model.plan", "expected a path in the model's folder"), ("m", "/etc/cron.d/x", "expected a path"),
    ("m", "1/../../x", "expected a path"), ("m", "1//x", "expected a path"), ("m", "x", "expected a path"),
    ("m", "1/\0", "expected a path"),
    ("../m", "1/model.plan", "is not a valid model name"), ("..", "1/model.plan", "is not a valid model name"),
    ("", "1/model.plan", "is not a valid model name"), (".m", "1/model.plan", "is not a valid model name"),
    ("a/b", "1/model.plan", "is not a valid model name"),
])
def test_files_that_would_lie_elsewhere_are_refused(name: str, path: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said), temporary_repository(name, {path: b""}):
        pass


def test_code_is_not_taken_from_requests(client: Any) -> None:
    for file in ("model.plan", "model.py", "model.pyc", "model.so", "model"):
        for config in ({}, {"backend": "python"}, {"platform": "tensorrt_plan"},
                       {"default_model_filename": file}, {"default_model_filename": file, "backend": "python"}):
            with pytest.raises(InferenceServerException, match="code is not taken from requests"):
                client.load_model("m", config=json.dumps(config), files={f"file:1/{file}": plan()})
    assert not client.is_model_ready("m")


def test_a_file_that_is_also_a_folder_is_refused() -> None:
    with (pytest.raises(InvalidRequestError, match="cannot be written"),
          temporary_repository("m", {"1/a": b"", "1/a/b": b""})):
        pass


def test_files_come_with_a_configuration_and_as_base64(client: Any, server: RunningServer) -> None:
    with pytest.raises(InferenceServerException, match="give the parameter 'config'"):
        client.load_model("m", files={"file:1/model.onnx": plan()})
    body = json.dumps({"parameters": {"config": "{}", "file:1/model.onnx": "%%"}}).encode()
    assert b"expected base64" in ask(server, post("/v2/repository/models/m/load", body, CLOSE))


def test_no_name_of_a_model_leads_out_of_the_repository(client: Any) -> None:
    for name in ("../repository/affine", "affine/../affine", "..", ".", "/", "affine/1", "\0"):
        with pytest.raises(InferenceServerException):
            client.load_model(name)
        with pytest.raises(InferenceServerException):
            answer(client, name)
        assert not client.is_model_ready(name)


PARAMETER = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}'
OUTSIDE = {
    "calib": PARAMETER.format("calib", f"../../{SECRET}"),
    "calib_cache": PARAMETER.format("calib_cache", f"/tmp/{SECRET}"),
    "preprocess": PARAMETER.format("preprocess", f"../../{SECRET}"),
    "initial_state": f"""sequence_batching {{ state {{ input_name: "x" output_name: "y" data_type: TYPE_UINT8 dims: 1
        initial_state {{ name: "s" data_type: TYPE_UINT8 dims: 10 data_file: "../../../{SECRET}" }} }} }}""",
    "model_warmup": f"""model_warmup {{ name: "w" inputs {{ key: "x" value {{ data_type: TYPE_UINT8 dims: 10
        input_data_file: "../../../{SECRET}" }} }} }}""",
    "label_filename": f'output {{ name: "y" data_type: TYPE_FP32 dims: 4 label_filename: "../../{SECRET}" }}',
    "default_model_filename": f'default_model_filename: "../../../{SECRET}"',
}


def test_no_path_of_a_configuration_leads_out_of_the_repository(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for name, text in OUTSIDE.items():
        folder = write_model(repository, name, config=text)
        if name in ("calib", "calib_cache", "preprocess"):          # of a build
            (folder / "1" / "model.plan").rename(folder / "1" / "model.onnx")
    (tmp_path / SECRET).write_text("for nobody")
    with serving(repository) as running:
        failures = running.server.failures()
    for name in OUTSIDE:
        reason = failures.get(f"{name} version 1") or failures[name]
        assert "is not in" in reason or "expected a file in the version's folder" in reason, reason
