"""Errors sent to clients, over gRPC or HTTP, name no directory of the server."""
from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from scripts.testing.numpy_engine import write_model
from tests.infer_server.endpoints.http.plain import CLOSE, ask
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import FRONTS, WORKERS, RunningServer, serving

TENSORS = " ".join(f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: 4 }}'
                   for kind, name in (("input", "x"), ("output", "y")))
READS_A_FILE = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        open(os.path.join(pb_utils.get_model_dir(), "secret folder", "token"))
"""
FAILS = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        error = pb_utils.TritonError(f"{__file__} is wrong", pb_utils.TritonError.NOT_FOUND)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""
CANNOT_START = HEAD + """
class TritonPythonModel:
    def initialize(self, arguments):
        raise ValueError(f"not in {arguments['model_repository']}")
    def execute(self, requests):
        return []
"""


BROKEN = ("corrupt", "empty", "no_file", "no_labels", "bad_config", "reads_a_file", "fails", "cannot_start", "nowhere")


@pytest.fixture(scope="module", params=(*FRONTS, WORKERS[0]))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "fine")
    (write_model(repository, "corrupt") / "1" / "model.plan").write_bytes(b"\0not a plan")
    (repository / "empty").mkdir()
    (repository / "no_file" / "1").mkdir(parents=True)
    write_model(repository, "no_labels", config='output { name: "y" label_filename: "labels.txt" }')
    write_model(repository, "bad_config", config='max_batch_size: "x"')
    python_model(repository, "reads_a_file", READS_A_FILE, TENSORS)
    python_model(repository, "fails", FAILS, TENSORS)
    python_model(repository, "cannot_start", CANNOT_START, TENSORS)
    with serving(repository, explicit_control=True, load_models=None, grpc_front=request.param) as running:
        yield running


def input_of(protocol: Any) -> Any:
    tensor = protocol.InferInput("x", [4], "FP32")
    tensor.set_data_from_numpy(np.zeros(4, np.float32))
    return tensor


def errors(client: Any, x: Any) -> Iterator[str]:
    """Yield the text of every error that a client can cause, and the repository index."""
    index = client.get_model_repository_index()
    yield index if isinstance(index, str) else str(index)
    calls: list[Callable[[], Any]] = [
        partial(client.load_model, "fine", config="{", files={"file:1/model.onnx": b""}),
        partial(client.register_system_shared_memory, "r", "/no_such_key", 4)]
    calls += [partial(client.load_model, name) for name in BROKEN if name not in ("reads_a_file", "fails")]
    for name in BROKEN:
        calls += [partial(client.infer, name, [x]),
                  partial(client.get_model_metadata, name), partial(client.get_model_config, name),
                  partial(client.get_inference_statistics, name, "1"),
                  partial(client.update_trace_settings, name, {"trace_rate": "1"})]
    for call in calls:
        try:
            call()
        except InferenceServerException as error:
            yield str(error)


def test_no_error_names_a_directory_of_the_server(server: RunningServer, client: Any, protocol: Any) -> None:
    texts = list(errors(client, input_of(protocol)))
    assert len(texts) > 5 * len(BROKEN)
    for text in texts:
        for folder in (str(server.folder), str(server.folder.parent), "/tmp/", str(Path(__file__).parents[3])):
            assert folder not in text, text
    together = "\n".join(texts)
    for received in ("empty has no version", "no_file/1/model.plan: no such file", "corrupt/1/model.plan",
                     "cannot_start/1"):
        assert received in together, received


@pytest.mark.parametrize("server", WORKERS[:1], indirect=True)
def test_a_model_that_came_with_its_load_names_no_temporary_folder(server: RunningServer) -> None:
    with (tritonclient.grpc.InferenceServerClient(server.address) as connected,
          pytest.raises(InferenceServerException, match="sent/1/model.onnx failed") as raised):
        connected.load_model("sent", config="{}", files={"file:1/model.onnx": b"not a model"})
    assert "/tmp" not in str(raised.value) and tempfile.gettempdir() not in str(raised.value)


def test_a_traceback_of_a_python_model_names_its_file_in_the_repository(client: Any, protocol: Any) -> None:
    x = input_of(protocol)
    with pytest.raises(InferenceServerException, match='File "reads_a_file/1/model.py"') as raised:
        client.infer("reads_a_file", [x])
    assert "No such file or directory: 'reads_a_file/1/secret folder/token'" in str(raised.value)
    with pytest.raises(InferenceServerException, match="fails/1/model.py is wrong") as raised:
        client.infer("fails", [x])
    assert "/fails" not in str(raised.value)


def test_the_status_page_names_no_directory_either(server: RunningServer) -> None:
    def data() -> bytes:
        return ask(server, f"GET /status/data.json HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode())

    assert eventually(lambda: b'"state":"UNAVAILABLE"' in data())
    assert str(server.folder).encode() not in data()
    assert json.loads(data().partition(b"\r\n\r\n")[2])["models"]
