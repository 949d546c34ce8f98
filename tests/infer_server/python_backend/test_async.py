"""Tests of Python models with an asynchronous execute."""
from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import RunningServer, serving

# Asks as many models as its input has numbers, all at once; their name comes as Triton's own examples send one.
ASKS = HEAD + """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        return [await self.one(request) for request in requests]

    async def one(self, request):
        name = np.array([b"affine"], np.object_)[0]
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        if x[0] < 0:
            raise ValueError("a negative number")
        asked = [pb_utils.InferenceRequest(model_name=name, requested_output_names=["y"], inputs=[
            pb_utils.Tensor("x", np.full((1, 4), value, np.float32))]).async_exec() for value in x]
        answers = await asyncio.gather(*asked)
        found = [pb_utils.get_output_tensor_by_name(answer, "y").as_numpy()[0, 0] for answer in answers]
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(found, np.float32))])
"""
# Of two requests the first is answered when the second has come.
MEETS = HEAD + """
import asyncio

class TritonPythonModel:
    def initialize(self, args):
        self.met = None

    async def execute(self, requests):
        self.met = self.met or asyncio.Event()
        for request in requests:
            (x,) = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if x < 0:
                raise ValueError("a negative number") if x > -2 else asyncio.CancelledError()
            if x > 1:
                self.met.set()
            await self.met.wait()
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([x], np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
LEAVES = HEAD + """
import asyncio, sys

class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.sleep(0)
        for request in requests:
            (x,) = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if x < 0:
                sys.exit(3)
            request.get_response_sender().send(
                pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([x], np.float32))]),
                pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Calls a model that responds to its first request only when its second has arrived.
ASKS_BOTH = HEAD + """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        answers = await asyncio.gather(self.answers(1), self.answers(2))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(sum(answers, []), np.float32))])]

    async def answers(self, x):
        request = pb_utils.InferenceRequest(model_name="meets", requested_output_names=["y"], inputs=[
            pb_utils.Tensor("x", np.array([x], np.float32))])
        *found, last = await request.async_exec(decoupled=True)
        if last.output_tensors() or last.has_error():
            raise ValueError("that there are no more is a response of its own, without tensors")
        return [response.output_tensors()[0].as_numpy()[0] for response in found]
"""
# Returns the number of responses of a model that marks its last response as final.
COUNTS = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        found = list(pb_utils.InferenceRequest(model_name="leaves_decoupled", requested_output_names=["y"], inputs=[
            pb_utils.get_input_tensor_by_name(requests[0], "x")]).exec(decoupled=True))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([len(found)], np.float32))])]
"""
# Executed three times, each time adding one.
AGAIN = HEAD + """
import asyncio

class TritonPythonModel:
    def initialize(self, args):
        self.counts = {}

    async def execute(self, requests):
        await asyncio.sleep(0)
        for request in requests:
            key = request.get_response_sender()
            self.counts[key] = self.counts.get(key, 0) + 1
            if self.counts[key] < 3:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                key.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[3]], np.float32))]),
                         pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """backend: "python" input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }"""
DECOUPLED = CONFIG + " model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "affine")
    python_model(folder, "asks", ASKS, CONFIG)
    python_model(folder, "meets", MEETS, DECOUPLED)
    python_model(folder, "leaves", LEAVES, CONFIG)
    python_model(folder, "leaves_decoupled", LEAVES, DECOUPLED)
    python_model(folder, "asks both", ASKS_BOTH, CONFIG)
    python_model(folder, "counts", COUNTS, CONFIG)
    python_model(folder, "again", AGAIN, DECOUPLED + """ max_batch_size: 4
        sequence_batching { iterative_sequence: true }""")
    with serving(folder) as running:
        yield running


def tensor(*values: float, rank: int = 1) -> triton.InferInput:
    array = np.array(values, np.float32).reshape((1,) * (rank - 1) + (-1,))
    created = triton.InferInput("x", list(array.shape), "FP32")
    created.set_data_from_numpy(array)
    return created


def streamed(client: triton.InferenceServerClient, model: str, *inputs: triton.InferInput) -> list[Any]:
    """Send requests on one stream; return their responses."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error or result.as_numpy("y").item()))
    for one in inputs:
        client.async_stream_infer(model, [one])
    actual = [answers.get(timeout=TIMEOUT_SECS) for _ in inputs]
    client.stop_stream()
    return actual


def test_an_asynchronous_execute_is_awaited_and_may_ask_several_models_at_a_time(
        client: triton.InferenceServerClient) -> None:
    assert client.infer("asks", [tensor(1, 2, 3)]).as_numpy("y").tolist() == [3, 5, 7]
    with pytest.raises(InferenceServerException, match="ValueError: a negative number"):
        client.infer("asks", [tensor(-1)])
    assert client.infer("asks", [tensor(4)]).as_numpy("y").tolist() == [9]


def test_a_decoupled_model_takes_the_next_request_while_it_awaits_something(
        client: triton.InferenceServerClient) -> None:
    assert sorted(streamed(client, "meets", tensor(1), tensor(2))) == [1, 2]


def test_what_an_asynchronous_execute_of_a_decoupled_model_raises_ends_its_request(
        client: triton.InferenceServerClient) -> None:
    for x, error in ((-1, "ValueError: a negative number"), (-2, "CancelledError")):
        assert error in str(streamed(client, "meets", tensor(x))[0])
    assert streamed(client, "meets", tensor(3)) == [3]


def test_an_asynchronous_execute_may_have_its_requests_executed_again(client: triton.InferenceServerClient) -> None:
    assert streamed(client, "again", tensor(0, rank=2)) == [3]


@pytest.mark.parametrize("model", ["leaves", "leaves_decoupled"])
def test_an_asynchronous_execute_that_exits_ends_its_process_and_the_next_one_serves(
        client: triton.InferenceServerClient, model: str) -> None:
    said = str(streamed(client, model, tensor(-1))[0])
    assert "its process ended" in said and "exit status 3" in said      # in execute, or before all responses were there
    assert streamed(client, model, tensor(5)) == [5]


def test_a_response_may_be_the_last_and_else_one_without_tensors_is(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error or result.get_response()))
    for model, finals in (("leaves_decoupled", [(True, 1)]), ("meets", [(False, 1), (True, 0)])):
        client.async_stream_infer(model, [tensor(5)], enable_empty_final_response=True)
        actual = [answers.get(timeout=TIMEOUT_SECS) for _ in finals]
        assert [(each.parameters["triton_final_response"].bool_param, len(each.outputs)) for each in actual] == finals
    client.stop_stream()
    assert answers.empty()
    assert client.infer("counts", [tensor(5)], client_timeout=TIMEOUT_SECS).as_numpy("y").tolist() == [1]


def test_an_asynchronous_model_asks_decoupled_models_side_by_side(client: triton.InferenceServerClient) -> None:
    assert client.infer("asks both", [tensor(0)], client_timeout=TIMEOUT_SECS).as_numpy("y").tolist() == [1, 2]
