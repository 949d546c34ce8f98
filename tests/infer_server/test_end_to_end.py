"""Tests from an ONNX file to responses over a socket: compiled plans, the real command, Triton's client."""
from __future__ import annotations

import dataclasses
import signal
import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper, numpy_helper
from tritonclient.utils import InferenceServerException

from infer_server.cli import build_engine
from infer_server.engines.plan.file import read_plan, write_plan
from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.infer_server.cli.test_serve import process
from tests.infer_server.endpoints.test_serving import eventually

BUILD_SECS = 120


def write_cnn(path: Path) -> None:
    """Write a model of Conv, ReLU, pooling and a classifier: [batch, 3, 16, 16] -> [batch, 10]."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) * 0.2, name)

    graph = helper.make_graph(
        [helper.make_node("Conv", ["image", "w", "b"], ["conv"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
         helper.make_node("Relu", ["conv"], ["relu"]),
         helper.make_node("GlobalAveragePool", ["relu"], ["pooled"]),
         helper.make_node("Flatten", ["pooled"], ["flat"]),
         helper.make_node("Gemm", ["flat", "v", "c"], ["logits"])],
        "cnn",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 16, 16])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [weight("w", 8, 3, 3, 3), weight("b", 8), weight("v", 8, 10), weight("c", 10)])
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, 16, 16)).astype(np.float32)


def infer(client: triton.InferenceServerClient, model: str, x: np.ndarray) -> np.ndarray:
    tensor = triton.InferInput("image", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    logits: np.ndarray = client.infer(model, [tensor]).as_numpy("logits")
    return logits


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with one model for each way of loading.

    plan: compiled before; onnx: built on loading; foreign: made for a CPU with features that none has; truncated, text:
    files that are not plans.
    """
    root = tmp_path_factory.mktemp("repository")
    write_cnn(root / "onnx" / "1" / "model.onnx")
    (root / "onnx" / "config.pbtxt").write_text("max_batch_size: 4")
    plan = root / "plan" / "1" / "model.plan"
    plan.parent.mkdir(parents=True)
    assert build_engine.main([str(root / "onnx" / "1" / "model.onnx"), "-o", str(plan), "--max-batch", "8",
                              "--no-timing", "--quiet"]) == 0
    foreign = read_plan(plan)
    (root / "foreign" / "1").mkdir(parents=True)
    foreign = foreign.with_machine(cpu={**foreign.machine.cpu, "features": ["teleportation"]}, code=(b"none",))
    write_plan(dataclasses.replace(foreign, fingerprint=""),
               root / "foreign" / "1" / "model.plan")
    for name, content in (("truncated", plan.read_bytes()[:-100]), ("text", b"not a plan")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.plan").write_bytes(content)
    return root


@pytest.fixture(scope="module")
def reference(repository: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(repository / "onnx" / "1" / "model.onnx", providers=["CPUExecutionProvider"])


def test_compiled_models_answer_as_onnx_runtime_does_beside_corrupt_ones(
        repository: Path, tmp_path: Path, reference: onnxruntime.InferenceSession) -> None:
    with (process(repository, "--cache-dir", str(tmp_path), "--strict-readiness=false") as (_, address),
          triton.InferenceServerClient(address) as client):
        assert eventually(client.is_server_ready, BUILD_SECS)
        for model, batches in (("plan", (1, 3, 8)), ("foreign", (1, 8)), ("onnx", (1, 4))):
            for batch in batches:
                x = images(batch, seed=batch)
                expected = reference.run(None, {"image": x})[0]
                np.testing.assert_allclose(infer(client, model, x), expected, rtol=1e-4, atol=1e-5)
        index = {model.name: model for model in client.get_model_repository_index().models}
        assert {name: model.state for name, model in index.items()} == {
            "foreign": "READY", "onnx": "READY", "plan": "READY", "text": "UNAVAILABLE", "truncated": "UNAVAILABLE"}
        assert index["text"].reason and index["truncated"].reason
        assert client.get_model_config("onnx").config.max_batch_size == 4


PHOTO = """
platform: "ensemble" max_batch_size: 8
input { name: "file" data_type: TYPE_STRING dims: 1 } output { name: "class" data_type: TYPE_STRING dims: 1 }
ensemble_scheduling {
  step { model_name: "decode" input_map { key: "file" value: "file" } output_map { key: "image" value: "image" } }
  step { model_name: "plan" input_map { key: "image" value: "image" } output_map { key: "logits" value: "logits" } }
  step { model_name: "name" input_map { key: "logits" value: "logits" } output_map { key: "class" value: "class" } }
}"""
DECODE = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [self.decode(pb_utils.get_input_tensor_by_name(request, "file").as_numpy()) for request in requests]
    def decode(self, files):
        images = [np.frombuffer(file, np.uint8).reshape(3, 16, 16) for file in files[:, 0]]
        image = pb_utils.Tensor("image", np.array(images, np.float32) / 127.5 - 1)
        return pb_utils.InferenceResponse([image])
"""
NAME = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [self.name(pb_utils.get_input_tensor_by_name(request, "logits").as_numpy()) for request in requests]
    def name(self, logits):
        names = np.array([[f"class {row.argmax()}".encode()] for row in logits], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("class", names)])
"""


def test_an_ensemble_takes_files_and_gives_names_through_an_engine(
        repository: Path, tmp_path: Path, reference: onnxruntime.InferenceSession) -> None:
    for name, source, given, created in (
            ("decode", DECODE, '"file" data_type: TYPE_STRING dims: 1',
             '"image" data_type: TYPE_FP32 dims: [3, 16, 16]'),
            ("name", NAME, '"logits" data_type: TYPE_FP32 dims: 10', '"class" data_type: TYPE_STRING dims: 1')):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text(source)
        (tmp_path / name / "config.pbtxt").write_text(
            f'backend: "python" max_batch_size: 8 input {{ name: {given} }} output {{ name: {created} }}')
    (tmp_path / "photo").mkdir()
    (tmp_path / "photo" / "config.pbtxt").write_text(PHOTO)
    (tmp_path / "plan").symlink_to(repository / "plan")
    pixels = np.random.default_rng(5).integers(0, 256, (5, 3, 16, 16), np.uint8)
    files = np.array([[one.tobytes()] for one in pixels], np.object_)
    expected = reference.run(None, {"image": pixels.astype(np.float32) / 127.5 - 1})[0].argmax(1)
    with process(tmp_path) as (_, address), triton.InferenceServerClient(address) as client:
        assert eventually(client.is_server_ready, BUILD_SECS)
        tensor = triton.InferInput("file", [5, 1], "BYTES")
        tensor.set_data_from_numpy(files)
        names = client.infer("photo", [tensor]).as_numpy("class")
    assert names.tolist() == [[f"class {number}".encode()] for number in expected]


def test_a_signal_under_load_loses_no_accepted_request(repository: Path, tmp_path: Path) -> None:
    answered: list[int] = []
    errors: list[InferenceServerException] = []
    options = ("--model-control-mode", "explicit", "--load-model", "plan", "--cache-dir", str(tmp_path))
    with process(repository, *options) as (server, address):
        def ask_until_refused(i: int) -> None:
            with triton.InferenceServerClient(address) as client:
                try:
                    while True:
                        answered.append(len(infer(client, "plan", images(1, seed=i))))
                except InferenceServerException as error:
                    errors.append(error)

        with triton.InferenceServerClient(address) as client:
            assert eventually(lambda: client.is_model_ready("plan"))
        clients = [threading.Thread(target=ask_until_refused, args=(i,)) for i in range(8)]
        for asking in clients:
            asking.start()
        assert eventually(lambda: len(answered) > 50)
        server.send_signal(signal.SIGTERM)
        assert server.wait(TIMEOUT_SECS) == 0
        for asking in clients:
            asking.join(TIMEOUT_SECS)
    assert [error.status() for error in errors] == ["StatusCode.UNAVAILABLE"] * 8
