"""Error messages contain the phrases that users and tests of Triton search for, over gRPC and HTTP."""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from tritonclient.utils import shared_memory as shm

from scripts.testing.numpy_engine import write_model
from tests.infer_server.endpoints.http.plain import ask, post
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import FRONTS, RunningServer, serving

ROW = np.ones((1, 4), np.float32)
WORDS = np.array([[b"a", b"b"]], np.object_)
KEY = f"/words_{os.getpid()}"
CLOSE = "Connection: close"
CONFIG = """backend: "python" input { name: "what" data_type: TYPE_STRING dims: 1 }
output { name: "y" data_type: TYPE_STRING dims: 1 }"""
RETURNS = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        request, = requests
        what = pb_utils.get_input_tensor_by_name(request, "what").as_numpy()[0].decode()
        response = pb_utils.InferenceResponse([])
        if "again" in what:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        if what == "parameters":
            pb_utils.InferenceResponse([], parameters=["a"])
        return {"a number": 3, "two": [response] * 2, "a text": ["a"], "again": [None]}.get(what, [response])
"""
ASKS = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        model = pb_utils.get_input_tensor_by_name(requests[0], "what").as_numpy()[0].decode()
        answer = pb_utils.InferenceRequest(model_name=model, inputs=[], requested_output_names=[]).exec()
        return [pb_utils.InferenceResponse(error=answer.error())]
"""


class Asked(NamedTuple):
    model: str
    inputs: Mapping[str, np.ndarray[Any, Any]]
    shapes: Mapping[str, Sequence[int]] = {}        # that it declares, where they are not its inputs'
    outputs: Sequence[str] = ()
    more: Mapping[str, Any] = {}                    # arguments of infer()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "affine")
    write_model(folder, "two", kind="two")
    write_model(folder, "half", dtype="float16")
    write_model(folder, "optional", kind="two", metadata={"defaults": {"x2": [[1, 2, 3, 4]]}}, config="""
        max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 4 }
        input { name: "x2" data_type: TYPE_FP32 dims: 4 optional: true }""")
    write_model(folder, "text", kind="echo", dtype="object", shape=[2])
    python_model(folder, "told", RETURNS, CONFIG + """ sequence_batching {
        control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } } }""")
    python_model(folder, "stream", RETURNS, CONFIG + " model_transaction_policy { decoupled: true }")
    python_model(folder, "returns", RETURNS, CONFIG)
    python_model(folder, "asks", ASKS, CONFIG)
    with serving(folder, allow_client_shm=True, explicit_control=True, load_models=None,
                 max_body_bytes=2 << 20) as running:
        yield running


def refusal(protocol: Any, client: Any, asked: Asked) -> str:
    tensors = []
    for name, array in asked.inputs.items():
        tensor = protocol.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor.set_shape(list(asked.shapes.get(name, array.shape))))
    outputs = [protocol.InferRequestedOutput(name) for name in asked.outputs]
    with pytest.raises(InferenceServerException) as caught:
        client.infer(asked.model, tensors, outputs=outputs or None, **asked.more)
    return str(caught.value.message())


def what(text: str) -> dict[str, np.ndarray[Any, Any]]:
    return {"what": np.array([text.encode()], np.object_)}


@pytest.mark.parametrize(("asked", "words"), [
    (Asked("nobody", {"x": ROW}), "Request for unknown model: 'nobody' is not found"),
    (Asked("affine", {"x": ROW}, more={"model_version": "9"}),
     "Request for unknown model: 'affine' version 9 is not found"),
    (Asked("two", {}), "expected 2 inputs but got 0 inputs for model 'two'. Got input(s) [], but missing required "
     "input(s) ['x','x2']. Please provide all required input(s)."),
    (Asked("two", {"x2": ROW}), "expected 2 inputs but got 1 inputs for model 'two'. Got input(s) ['x2'], but missing "
     "required input(s) ['x']. Please provide all required input(s)."),
    (Asked("optional", {}), "expected number of inputs between 1 and 2 but got 0 inputs for model 'optional'. Got "
     "input(s) [], but missing required input(s) ['x']. Please provide all required input(s)."),
    (Asked("affine", {"x": ROW, "z": ROW}), "expected 1 inputs but got 2 inputs for model 'affine'. Got input(s) "
     "['x','z']. unexpected inference input 'z' for model 'affine'"),
    (Asked("affine", {"xx": ROW}), "unexpected inference input 'xx' for model 'affine'"),
    (Asked("affine", {"x": ROW}, outputs=["z"]), "unexpected inference output 'z' for model 'affine'"),
    (Asked("affine", {"x": np.int32(ROW)}),
     "inference input 'x' data-type is 'INT32', but model 'affine' expects 'FP32'"),
    (Asked("affine", {"x": ROW[:, :2]}),
     "unexpected shape for input 'x' for model 'affine'. Expected [-1,4], got [1,2]"),
    (Asked("affine", {"x": ROW[0]}), "unexpected shape for input 'x' for model 'affine'. Expected [-1,4], got [4]"),
    (Asked("affine", {"x": np.zeros((9, 4), np.float32)}), "inference request batch-size must be <= 8 for 'affine'"),
    (Asked("two", {"x": ROW, "x2": np.zeros((2, 4), np.float32)}),
     "input 'x2' batch size does not match other inputs for 'two'"),
    (Asked("affine", {"x": np.zeros((2, 4), np.float32)}, {"x": (1, 4)}),
     "input byte size mismatch for input 'x' for model 'affine'. Expected 16, got 32"),
    (Asked("text", {"x": WORDS[:, :1]}, {"x": (1, 2)}),
     "expected 2 string elements for inference input 'x' for model 'text', got 1"),
    (Asked("text", {"x": np.repeat(WORDS, 2, axis=1)}, {"x": (1, 2)}),
     "unexpected number of string elements 3 for inference input 'x' for model 'text', expecting 2"),
    (Asked("affine", {"x": ROW}, {"x": (1 << 40, 1 << 40)}), "causes total element count to exceed maximum size of"),
    (Asked("affine", {"x": ROW}, {"x": (1 << 62, 1)}), "byte size overflow for input 'x'"),
    (Asked("told", what("")), "must specify a non-zero or non-empty correlation ID"),
    (Asked("told", what(""), more={"sequence_id": 5}),
     "must specify the START flag on the first request of the sequence"),
    (Asked("told", what(""), more={"sequence_id": "five", "sequence_start": True}),
     "sequence batching control 'id' data-type is 'BYTES', but model 'told' expects 'INT32'"),
    (Asked("stream", what("")), "doesn't support models with decoupled transaction policy"),
    (Asked("returns", what("a number")), "Expected a list in the execute return, found type '<class 'int'>'."),
    (Asked("returns", what("two")), "Number of InferenceResponse objects do not match the number of InferenceRequest "
     "objects. InferenceRequest(s) size is:1, and InferenceResponse(s) size is:2"),
    (Asked("returns", what("a text")), "Expected an 'InferenceResponse' object in the execute function return list, "
     "found type '<class 'str'>'."),
    (Asked("returns", what("again, and a response")),
     "Expected a None object in the execute function return list for reschduled request"),
    (Asked("returns", what("again")), "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the "
     "model is not configured to handle such a flag."),
    (Asked("returns", what("parameters")), ", got <class 'list'>"),
    (Asked("asks", what("nobody")), "Error when running inference: Request for unknown model: 'nobody' is not found"),
    (Asked("asks", what("two")), "expected 2 inputs but got 0 inputs for model 'two'"),
    (Asked("asks", what("stream")), "Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls"),
], ids=count())
def test_what_an_inference_is_refused_for_is_said_in_tritons_words(
        protocol: Any, client: Any, asked: Asked, words: str) -> None:
    assert words in refusal(protocol, client, asked)


@pytest.mark.parametrize(("call", "words"), [
    (lambda client: client.load_model(" \t"), "Model name cannot be empty. Please enter a valid name to deploy."),
    (lambda client: client.load_model(" .."), "model name must not contain path traversal characters"),
    (lambda client: client.load_model("..model"), "failed to load '..model', failed to poll from model repository"),
    (lambda client: client.get_inference_statistics("affine", "9"),
     "requested model version is not available for model 'affine'"),
    (lambda client: client.get_model_metadata("affine", "nine"),
     "failed to get model version from specified version string 'nine'"),
    (lambda client: client.register_system_shared_memory("r", KEY + "_none", 0),
     f"Unable to open shared memory region: '{KEY}_none'"),
    (lambda client: client.register_system_shared_memory("r", KEY, 65),
     "failed to register shared memory region 'r': invalid args"),
    (lambda client: client.register_system_shared_memory("r", KEY, 0),
     "failed to register shared memory region 'r': invalid args"),
], ids=count())
def test_what_a_call_is_refused_for_is_said_in_tritons_words(
        client: Any, call: Callable[[Any], None], words: str) -> None:
    region = shm.create_shared_memory_region("r", KEY, 64)
    try:
        with pytest.raises(InferenceServerException) as caught:
            call(client)
    finally:
        shm.destroy_shared_memory_region(region)
    assert words in caught.value.message()


def test_memory_that_cannot_be_opened_is_the_servers_failure_as_in_triton(protocol: Any, client: Any) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.register_system_shared_memory("r", KEY + "_none", 8)
    assert caught.value.status() == ("StatusCode.INTERNAL" if protocol is tritonclient.grpc else "500")


def with_input(**more: Any) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    return json.dumps({"inputs": [{**tensor, **more}]}).encode()


BINARY = {"data": None, "parameters": {"binary_data_size": 16}}
LENGTH = f"Inference-Header-Content-Length: {len(with_input(**BINARY))}"


@pytest.mark.parametrize(("model", "body", "header", "words"), [
    ("affine", with_input(shape=[2, -5]), "",
     "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"),
    ("affine", with_input(data=[1] * 5), "", "Shape does not match true shape of 'data' field"),
    ("affine", with_input(data=None), "", "Unable to parse 'data'"),
    ("half", with_input(datatype="FP16"), "",
     "receiving FP16 data via JSON is not supported. Please use the binary data format for input x"),
    ("affine", with_input(**BINARY) + bytes(12), LENGTH,
     "unexpected size for input 'x', expecting 4 additional bytes for model 'affine'"),
    ("affine", with_input(**BINARY) + bytes(20), LENGTH, "unexpected additional input data for model 'affine'"),
    ("affine", with_input(), "Inference-Header-Content-Length: 999", "inference header size should be in range (0, "),
    ("affine", with_input(), "Inference-Header-Content-Length: x",
     "Unable to parse Inference-Header-Content-Length, got: x"),
    ("affine", bytes(3 << 20), "",
     "request JSON size of 3145728 bytes exceeds the maximum allowed input size of 2097152"),
], ids=count())
def test_what_the_json_of_an_inference_is_refused_for_is_said_in_tritons_words(
        server: RunningServer, model: str, body: bytes, header: str, words: str) -> None:
    answer = ask(server, post(f"/v2/models/{model}/infer", body, CLOSE, *[header][:bool(header)]))
    assert answer.startswith(b"HTTP/1.1 4") and words.encode() in answer


@pytest.mark.parametrize("front", FRONTS)
def test_all_inputs_that_are_missing_are_named_however_many(tmp_path: Path, front: str) -> None:
    names = [f"past_key_values.{layer}.{kind}" for layer in range(24) for kind in ("key", "value")]
    python_model(tmp_path, "many", RETURNS, f"""backend: "python" output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}
        {" ".join(f'input {{ name: "{name}" data_type: TYPE_FP32 dims: 1 }}' for name in names)}""")
    with (serving(tmp_path, grpc_front=front) as running,
          tritonclient.grpc.InferenceServerClient(running.address) as client):
        text = refusal(tritonclient.grpc, client, Asked("many", {name: np.ones(1, np.float32) for name in names[:-1]}))
        assert f"but missing required input(s) ['{names[-1]}']" in text
        for letter, most in (("x", 6000), ("%", 2000), ("\u00e9", 1000)):      # escaped they are of 1, 3 and 6 bytes
            text = refusal(tritonclient.grpc, client, Asked(letter * 7000, {}))
            assert most - 30 < text.count(letter) <= most and text.endswith(" ...")
