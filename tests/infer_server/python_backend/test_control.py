"""Tests of Python models that load and unload other models."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from scripts.testing.numpy_engine import write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import RunningServer, serving

LOADS = HEAD + """
class TritonPythonModel:
    def initialize(self, args):
        if args["model_name"] == "first":
            pb_utils.load_model(model_name="second")

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("ready", self.one(*json.loads(
            pb_utils.get_input_tensor_by_name(request, "what").as_numpy()[0])))]) for request in requests]

    def one(self, call, name, arguments):
        if "files" in arguments:
            arguments["files"] = {path: text.encode() for path, text in arguments["files"].items()}
        getattr(pb_utils, call)(name, **arguments)
        return np.array([pb_utils.is_model_ready(name)])
"""
TENSORS = """ backend: "python" input { name: "what" data_type: TYPE_STRING dims: 1 }
output { name: "ready" data_type: TYPE_BOOL dims: 1 }"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("repository")
    for name in ("first", "second"):
        python_model(folder, name, LOADS, TENSORS)
    write_model(folder, "affine")
    with serving(folder, explicit_control=True, load_models=("first",)) as running:
        yield running


def changed(client: triton.InferenceServerClient, call: str, name: str, asked: str = "first",
            **arguments: object) -> bool:
    """Call a model-control function in a model; return True if the model is ready afterwards."""
    what = triton.InferInput("what", [1], "BYTES")
    what.set_data_from_numpy(np.array([json.dumps([call, name, arguments]).encode()], np.object_))
    return bool(client.infer(asked, [what]).as_numpy("ready")[0])


def test_a_model_loads_and_unloads_another_as_a_client_does(server: RunningServer) -> None:
    with triton.InferenceServerClient(server.address) as client:
        assert client.is_model_ready("second")              # by initialize, which waits for it
        assert changed(client, "load_model", "affine")
        assert changed(client, "load_model", "affine", config=json.dumps({"max_batch_size": 3}))
        assert client.get_model_config("affine").config.max_batch_size == 3
        assert not changed(client, "unload_model", "affine", unload_dependents=True)
        for arguments, why in (({"name": "first"}, "cannot load itself"), ({"name": "none"}, "not in the repository"),
                               ({"name": "x", "config": "{}", "files": {"file:1/model.py": "1"}}, "code is not taken"),
                               ({"name": "x", "files": {"file:1/model.onnx": "1"}}, "give the parameter 'config'")):
            with pytest.raises(InferenceServerException, match=why):
                changed(client, "load_model", **arguments)


def test_models_load_nothing_where_clients_may_not(server: RunningServer) -> None:
    with serving(server.folder) as other:
        assert "explicit model load / unload is not allowed" in other.server.failures()["first version 1"]


def test_models_that_load_one_at_the_start_that_waits_for_its_turn_do_not_wait_for_ever(tmp_path: Path) -> None:
    waits = LOADS.replace('if args["model_name"] == "first":', """if args["model_name"] != "second":
            while not all(os.path.exists(f"{args['model_repository']}/../{name}/is there") for name in self.both(args)):
                time.sleep(0.01)""") + """
    def both(self, args):
        open(f"{args['model_repository']}/is there", "w").close()
        return "first", "another"
"""
    for name in ("another", "first", "second"):     # the former are loaded while it waits for its turn
        python_model(tmp_path, name, waits, TENSORS)
    with (serving(tmp_path, explicit_control=True, load_models=("another", "first", "second")) as running,
          triton.InferenceServerClient(running.address) as client):
        assert not running.server.failures() and client.is_model_ready("second")
        turns = running.server.repository._loads
        assert eventually(lambda: turns._value == 2)


def test_two_models_that_load_each_other_are_refused(tmp_path: Path) -> None:
    each_other = LOADS.replace("""if args["model_name"] == "first":
            pb_utils.load_model(model_name="second")""", """pb_utils.load_model(
            model_name={"first": "second", "second": "first"}[args["model_name"]])""")
    for name in ("first", "second"):
        python_model(tmp_path, name, each_other, TENSORS)
    with (serving(tmp_path, explicit_control=True) as running,
          triton.InferenceServerClient(running.address) as client,
          pytest.raises(InferenceServerException, match="cannot load '(first|second)', which is loading it")):
        client.load_model("first")


def test_a_model_may_unload_an_ensemble_that_waits_for_it(tmp_path: Path) -> None:
    for name in ("first", "second"):
        python_model(tmp_path, name, LOADS, TENSORS)
    (tmp_path / "both" / "1").mkdir(parents=True)
    (tmp_path / "both" / "config.pbtxt").write_text("""platform: "ensemble"
input { name: "what" data_type: TYPE_STRING dims: 1 } output { name: "ready" data_type: TYPE_BOOL dims: 1 }
ensemble_scheduling { step { model_name: "first" model_version: -1 input_map { key: "what" value: "what" }
                             output_map { key: "ready" value: "ready" } } }""")
    with (serving(tmp_path, explicit_control=True, load_models=("first", "both")) as running,
          triton.InferenceServerClient(running.address) as client):
        assert not changed(client, "unload_model", "both", asked="both")


@pytest.mark.parametrize("begun_with", ["first", "around"])
def test_a_model_that_loads_an_ensemble_of_itself_is_refused(tmp_path: Path, begun_with: str) -> None:
    python_model(tmp_path, "first", LOADS.replace('"second"', '"around"'), TENSORS)
    (tmp_path / "around" / "1").mkdir(parents=True)
    (tmp_path / "around" / "config.pbtxt").write_text("""platform: "ensemble"
input { name: "what" data_type: TYPE_STRING dims: 1 } output { name: "ready" data_type: TYPE_BOOL dims: 1 }
ensemble_scheduling { step { model_name: "first" model_version: -1 input_map { key: "what" value: "what" }
                             output_map { key: "ready" value: "ready" } } }""")
    with (serving(tmp_path, explicit_control=True) as running,
          triton.InferenceServerClient(running.address) as client):
        with pytest.raises(InferenceServerException, match="which is loading it|is not ready: "):
            client.load_model(begun_with)
        assert "'first' cannot load 'around'" in str(running.server.failures()) or (
            "'around' cannot load 'first'" in str(running.server.failures()))
