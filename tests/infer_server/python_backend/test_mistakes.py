"""Wrong uses of Triton's Python interface raise at the call, as in Triton."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from infer_server.python_backend import pb_utils
from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import FRONTS, serving

ROW = pb_utils.Tensor("x", np.zeros(1, np.float32))
SENDS = HEAD + """
import argparse, multiprocessing, threading

class TritonPythonModel:
    def initialize(self, args):
        self.options = argparse.ArgumentParser().parse_args()
        self.late = ""

    def execute(self, requests):
        answers = [self.one(request, request.get_response_sender()) for request in requests]
        return None if answers == [None] else answers

    def one(self, request, sender):
        what = pb_utils.get_input_tensor_by_name(request, "what").as_numpy()[0].decode()
        response = pb_utils.InferenceResponse([pb_utils.Tensor("out", np.array([what.encode()], np.object_))])
        if what == "nothing":
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        elif what == "two":
            sender.send(response)
            sender.send(response)
        elif what == "fork":
            with multiprocessing.get_context("fork").Pool(1) as pool:
                pool.apply(pb_utils.is_model_ready, ["sends"])
        elif what == "no text":
            surrogate = pb_utils.Tensor("out", np.array([chr(0xdc80)], np.object_))
            try:
                sender.send(pb_utils.InferenceResponse([surrogate]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except UnicodeEncodeError:
                sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        elif what == "refuse":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no file " + chr(0xdc80)))
        elif what == "say":
            return pb_utils.InferenceResponse(response.output_tensors(), parameters={"file": chr(0xdc80)})
        elif what == "leave":
            raise SystemExit(chr(0xdc80))
        elif what == "return":
            return response
        elif what == "return and send":
            self.later = threading.Thread(target=self.send_late, args=[sender, response])
            self.later.start()
            return response
        elif what == "late":
            self.later.join()
            out = np.array([self.late.encode()], np.object_)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("out", out)]), 1)

    def send_late(self, sender, response):
        while not sender.is_closed:             # by what execute returned
            time.sleep(0.001)
        try:
            sender.send(response)
        except pb_utils.TritonModelException as error:
            self.late = str(error)
"""
CONFIG = """backend: "python" input { name: "what" data_type: TYPE_STRING dims: 1 }
output { name: "out" data_type: TYPE_STRING dims: 1 } model_transaction_policy { decoupled: %s }"""


@pytest.mark.parametrize(("make", "error"), [
    (lambda: pb_utils.Tensor("x", None), TypeError),
    (lambda: pb_utils.Tensor.from_dlpack("x", None), pb_utils.TritonModelException),
    (lambda: pb_utils.Tensor(None, np.zeros(1, np.float32)), TypeError),
    (lambda: pb_utils.InferenceRequest(inputs=[None], model_name="m"), pb_utils.TritonModelException),
    (lambda: pb_utils.InferenceRequest(inputs=[ROW], model_name=None), TypeError),
    (lambda: pb_utils.InferenceRequest(inputs=[ROW], model_name="m", requested_output_names=[None]), TypeError),
    (lambda: pb_utils.InferenceRequest(inputs=[ROW], model_name="m", request_id=None), TypeError),
    (lambda: pb_utils.InferenceRequest(inputs=[ROW], model_name="m", correlation_id=None), TypeError),
    (lambda: pb_utils.InferenceRequest(inputs=[ROW], model_name="m", model_version=None), TypeError),
    (lambda: pb_utils.InferenceRequest(inputs=[ROW], model_name="m", flags=None), TypeError),
    (lambda: pb_utils.InferenceResponse([np.zeros(1)]), pb_utils.TritonModelException)])
def test_an_argument_of_another_type_is_refused_when_it_is_given(make: Callable[[], Any],
                                                                 error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def ask(client: triton.InferenceServerClient, model: str, what: str) -> str:
    tensor = triton.InferInput("what", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([what.encode()], np.object_))
    out: bytes = client.infer(model, [tensor], client_timeout=TIMEOUT_SECS).as_numpy("out")[0]
    return out.decode()


def test_a_model_that_is_not_decoupled_has_one_response_and_the_first_counts(tmp_path: Path) -> None:
    """The model also parses its command line, as libraries do, and finds no options of the server there."""
    python_model(tmp_path, "sends", SENDS, CONFIG % "false")
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        with pytest.raises(InferenceServerException, match=(
                r"model 'sends_0_0', message: .*cannot send complete final before sending a response")):
            ask(client, "sends", "nothing")
        assert ask(client, "sends", "two") == "two"
        assert ask(client, "sends", "no text") == "no text"         # whose first one could not be sent
        assert ask(client, "sends", "return and send") == "return and send"
        assert "Response sender has been closed" in ask(client, "sends", "late")


@pytest.mark.parametrize("front", FRONTS)
def test_an_error_with_half_a_surrogate_pair_is_answered_over_grpc(tmp_path: Path, front: str) -> None:
    """File names may contain lone surrogates; formerly the client waited without end."""
    python_model(tmp_path, "sends", SENDS, CONFIG % "false")
    with serving(tmp_path, grpc_front=front) as server, triton.InferenceServerClient(server.address) as client:
        for what in ("refuse", "say", "leave"):
            with pytest.raises(InferenceServerException, match=r"\\udc80") as caught:
                ask(client, "sends", what)
            assert caught.value.status() == "StatusCode.INTERNAL"


def test_a_process_that_a_model_forks_is_told_that_it_cannot_ask_the_server(tmp_path: Path) -> None:
    python_model(tmp_path, "sends", SENDS, CONFIG % "false")
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client, pytest.raises(
            InferenceServerException, match="a process that a model has forked cannot call"):
        ask(client, "sends", "fork")


def test_a_decoupled_model_returns_no_response(tmp_path: Path) -> None:
    python_model(tmp_path, "sends", SENDS, CONFIG % "true")
    seen: list[Any] = []
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        tensor = triton.InferInput("what", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([b"return"], np.object_))
        client.start_stream(lambda result, error: seen.append((result, error)))
        client.async_stream_infer("sends", [tensor])
        client.stop_stream()
    (result, error), = seen
    assert result is None and "the execute function must return None" in error.message()


def test_a_configuration_may_say_a_part_of_a_tensor_and_its_model_the_rest_which_it_returns(tmp_path: Path) -> None:
    completing = HEAD + """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [1]})
        RETURN

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.ones(1, np.float32))]) for _ in requests]
"""
    partly = 'input { name: "x" data_type: TYPE_FP32 } output { name: "y" dims: 1 }'
    python_model(tmp_path, "whole", completing.replace("RETURN", "return config"), partly)
    python_model(tmp_path, "lost", completing.replace("RETURN", "pass"), partly)
    python_model(tmp_path, "open", HEAD + "class TritonPythonModel:\n    def execute(self, _): ...", partly)
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        tensor = triton.InferInput("x", [1], "FP32")
        tensor.set_data_from_numpy(np.zeros(1, np.float32))
        assert client.infer("whole", [tensor]).as_numpy("y").tolist() == [1]
        output = {model.name: model.reason for model in client.get_model_repository_index().models}
        assert "'lost' must return a valid pb.ModelConfig object" in output["lost"]
        assert "output 'y': data_type is missing" in output["open"]
