"""Tests of the parameters and optional tensors of a Python model's response."""
from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from infer_server.python_backend import pb_utils
from scripts.testing.numpy_engine import write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import RunningServer, serving

REPLIES = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        return [self.one(json.loads(pb_utils.get_input_tensor_by_name(request, "what").as_numpy()[0]))
                for request in requests]

    def one(self, what):
        tensors = [pb_utils.Tensor(name, np.array([1], np.float32)) for name in what["outputs"]]
        return pb_utils.InferenceResponse(tensors, parameters=what["parameters"])
"""
CALLS = HEAD + """
import asyncio

class TritonPythonModel:
    def initialize(self, args):
        self.awaits = args["model_name"] == "awaits"

    def execute(self, requests):
        what = pb_utils.get_input_tensor_by_name(requests[0], "what")
        request = pb_utils.InferenceRequest(model_name="replies", requested_output_names=["x", "y"], inputs=[what])
        response = asyncio.run(request.async_exec()) if self.awaits else request.exec()
        return [pb_utils.InferenceResponse(response.output_tensors(), parameters=json.loads(response.parameters()))]
"""
PLACE = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("at", np.array([
            request.correlation_id(), request.flags(), len(request.inputs())], np.int32))], None,
            {**json.loads(request.parameters()), "reason": "last"})
                for request in requests]
"""
TENSORS = """ input { name: "what" data_type: TYPE_STRING dims: 1 }
output { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
ENSEMBLE = TENSORS + """ platform: "ensemble" ensemble_scheduling { step { model_name: "replies"
input_map { key: "what" value: "what" } output_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }"""
CHAIN = TENSORS + """ output { name: "at" data_type: TYPE_INT32 dims: 3 } platform: "ensemble" ensemble_scheduling {
step { model_name: "place" input_map { key: "x" value: "x" } input_map { key: "y" value: "y" }
       output_map { key: "at" value: "at" } }
step { model_name: "replies" input_map { key: "what" value: "what" }
       output_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("repository")
    python_model(folder, "replies", REPLIES, 'backend: "python"' + TENSORS)
    python_model(folder, "cached", REPLIES, 'backend: "python" response_cache { enable: true }' + TENSORS)
    python_model(folder, "calls", CALLS, 'backend: "python"' + TENSORS)
    python_model(folder, "awaits", CALLS, 'backend: "python"' + TENSORS)
    python_model(folder, "place", PLACE, """backend: "python" output { name: "at" data_type: TYPE_INT32 dims: 3 }
        input { name: "x" data_type: TYPE_FP32 dims: 1 }
        input { name: "y" data_type: TYPE_FP32 dims: 1 optional: true }""")
    write_model(folder, "ensemble", config=ENSEMBLE)
    write_model(folder, "chain", config=CHAIN)
    with serving(folder) as running:
        yield running


def asked(outputs: str, **parameters: object) -> str:
    return json.dumps({"outputs": [*outputs], "parameters": parameters})


def inputs(what: str) -> list[triton.InferInput]:
    tensor = triton.InferInput("what", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([what.encode()], np.object_))
    return [tensor]


@pytest.mark.parametrize("model", ["replies", "calls"])
def test_a_response_has_the_parameters_that_its_model_gives_it(server: RunningServer, model: str) -> None:
    given = {"tokens": 7, "reason": "length", "cached": True}
    with triton.InferenceServerClient(server.address) as client:
        response = client.infer(model, inputs(asked("xy", **given))).get_response()
    assert {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in response.parameters.items()
            } == given
    body = {"inputs": [{"name": "what", "datatype": "BYTES", "shape": [1], "data": [asked("xy", **given)]}]}
    with urlopen(f"http://127.0.0.1:{server.ports.http}/v2/models/{model}/infer", json.dumps(body).encode()) as answer:
        assert json.load(answer)["parameters"] == given
    generation = json.dumps({"what": asked("xy", **given, model_name="another")}).encode()
    with urlopen(f"http://127.0.0.1:{server.ports.http}/v2/models/{model}/generate", generation) as answer:
        assert json.load(answer) == {**given, "model_name": model, "model_version": "1", "x": 1.0, "y": 1.0}


def test_parameters_of_a_steps_response_are_the_ensembles_and_say_the_next_steps_place_in_a_sequence(
        server: RunningServer) -> None:
    def ask(outputs: str, **parameters: object) -> tuple[list[int], dict[str, object]]:
        result = client.infer("chain", inputs(asked(outputs, **parameters)), sequence_id=3, sequence_start=True,
                              timeout=10**9)       # neither is a parameter to models
        output = result.get_response().parameters.items()
        return result.as_numpy("at").tolist(), {
            name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in output}

    with triton.InferenceServerClient(server.address) as client:
        assert ask("xy", tokens=7, reason="length") == ([3, 1, 2], {"tokens": 7, "reason": "length"})
        place = {"sequence_id": 5, "sequence_end": True}
        assert ask("xy", **place) == ([5, 2, 2], {**place, "reason": "last"})
        with pytest.raises(InferenceServerException, match="step 0 .*invalid value type for 'sequence_start'"):
            ask("xy", sequence_start="yes")


def test_what_a_step_leaves_out_is_no_input_of_the_next_and_no_output_of_the_ensemble(server: RunningServer) -> None:
    with triton.InferenceServerClient(server.address) as client:
        result = client.infer("chain", inputs(asked("x")))
        assert [output.name for output in result.get_response().outputs] == ["x", "at"]
        assert result.as_numpy("at").tolist() == [0, 0, 1]
        with pytest.raises(InferenceServerException, match=r"step 0 \('place'\): missing required input\(s\) \['x'\]"):
            client.infer("chain", inputs(asked("y")))


def test_a_response_may_have_no_output_at_all(server: RunningServer) -> None:
    with triton.InferenceServerClient(server.address) as client:
        for model in ("replies", "calls", "awaits"):
            response = client.infer(model, inputs(asked("", tokens=7))).get_response()
            assert (len(response.outputs), response.parameters["tokens"].int64_param) == (0, 7), model


@pytest.mark.parametrize(("value", "why"), [(0.5, "bool/int/str, found type <class 'float'>"),
                                            (2**63, f"'value': {2**63} does not fit in 64 bits")])
def test_a_parameter_that_no_message_holds_is_the_models_error(
        server: RunningServer, value: float, why: str) -> None:
    with triton.InferenceServerClient(server.address) as client, pytest.raises(
            InferenceServerException, match=why) as caught:
        client.infer("replies", inputs(asked("xy", value=value)))
    assert caught.value.status() == "StatusCode.INTERNAL"


def test_what_a_cached_model_leaves_out_is_left_out_when_it_is_asked_again(server: RunningServer) -> None:
    with triton.InferenceServerClient(server.address) as client:
        asked_twice = [client.infer("cached", inputs(asked("y"))).get_response() for _ in range(2)]
    assert [[output.name for output in response.outputs] for response in asked_twice] == [["y"], ["y"]]


def test_a_model_may_leave_an_output_out(server: RunningServer) -> None:
    with triton.InferenceServerClient(server.address) as client:
        for model in ("replies", "calls", "ensemble"):
            result = client.infer(model, inputs(asked("y")))
            assert [output.name for output in result.get_response().outputs] == ["y"]
            np.testing.assert_array_equal(result.as_numpy("y"), np.ones(1, np.float32))


def test_what_a_model_asks_of_another_is_counted_there(server: RunningServer) -> None:
    with triton.InferenceServerClient(server.address) as client:
        def successes() -> int:
            return int(client.get_inference_statistics("replies").model_stats[0].inference_stats.success.count)

        before = successes()
        client.infer("calls", inputs(asked("xy")))
        assert eventually(lambda: successes() > before)


def test_a_tensor_that_may_not_be_written_is_given_over_dlpack() -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    rows.flags.writeable = False
    assert np.array_equal(np.from_dlpack(pb_utils.Tensor("x", rows)), rows)
    assert pb_utils.Tensor("x", rows).to_dlpack() is not None
