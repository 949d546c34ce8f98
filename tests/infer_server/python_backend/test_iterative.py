"""Tests of iterative sequences: the model executes a request repeatedly until it sends the final response."""
from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import RunningServer, serving

# Counts down from a request's number, a step an execution; from 0 when another request shares its batch.
COUNTDOWN = HEAD + """
class TritonPythonModel:
    def initialize(self, args):
        self.left = {}
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    def execute(self, requests):
        return [self.step(request, len(requests) == 1) for request in requests]

    def step(self, request, alone):
        value = lambda name: pb_utils.get_input_tensor_by_name(request, name).as_numpy().item()
        if value("start"):
            self.left[value("id")] = value("n")
        if value("n") == 0 and alone:
            return request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        left = self.left[value("id")] = self.left[value("id")] - 1
        response = pb_utils.InferenceResponse([pb_utils.Tensor("left", np.array([[left]], np.int32))])
        if left > 0:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            if self.decoupled:
                request.get_response_sender().send(response)
            return None
        if not self.decoupled:
            return response
        request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
backend: "python"  max_batch_size: 4
input { name: "n" data_type: TYPE_INT32 dims: 1 }
output { name: "left" data_type: TYPE_INT32 dims: 1 }
sequence_batching { %s
  control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
  control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } } oldest {} }
"""
ITERATIVE = "iterative_sequence: true"
DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("repository")
    python_model(folder, "stream", COUNTDOWN, CONFIG % ITERATIVE + DECOUPLED)
    python_model(folder, "unloaded", COUNTDOWN, CONFIG % ITERATIVE + DECOUPLED)
    python_model(folder, "single", COUNTDOWN, CONFIG % ITERATIVE)
    python_model(folder, "plain", COUNTDOWN, CONFIG % "")
    with serving(folder, explicit_control=True, load_models=None) as running:
        yield running


def number(n: int) -> list[triton.InferInput]:
    tensor = triton.InferInput("n", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[n]], np.int32))
    return [tensor]


Answers = queue.Queue[tuple[str, int]]


@contextmanager
def streamed(server: RunningServer) -> Iterator[tuple[triton.InferenceServerClient, Answers]]:
    """Yield a client with an open stream and its answers: the ids of requests, and the items left to do."""
    answers: Answers = queue.Queue()

    def take(result: triton.InferResult | None, error: InferenceServerException | None) -> None:
        answers.put((result.get_response().id, result.as_numpy("left").item()) if result else (str(error), -1))

    with triton.InferenceServerClient(server.address) as client:
        client.start_stream(take)
        yield client, answers
        client.stop_stream()


def test_a_request_is_executed_until_its_model_has_done_with_it_and_others_join_its_batch(
        server: RunningServer) -> None:
    with streamed(server) as (client, answers):
        client.async_stream_infer("stream", number(0), request_id="waits for company")
        client.async_stream_infer("stream", number(3), request_id="counts")
        actual = sorted(answers.get(timeout=TIMEOUT_SECS) for _ in range(4))
    assert actual == [("counts", 0), ("counts", 1), ("counts", 2), ("waits for company", -1)]


def test_a_model_that_is_unloaded_executes_what_it_has_begun_to_its_end(server: RunningServer) -> None:
    with streamed(server) as (client, answers):
        client.async_stream_infer("unloaded", number(100), request_id="a")
        assert answers.get(timeout=TIMEOUT_SECS) == ("a", 99)
        client.unload_model("unloaded")
        assert [answers.get(timeout=TIMEOUT_SECS)[1] for _ in range(99)] == [*range(98, -1, -1)]


def test_a_model_with_one_response_gives_it_when_it_has_done(server: RunningServer) -> None:
    with triton.InferenceServerClient(server.address) as client:
        for sequence in ({}, {"sequence_id": 7, "sequence_start": True}):
            assert client.infer("single", number(5), **sequence).as_numpy("left").item() == 0
        assert client.get_inference_statistics("single").model_stats[0].execution_count == 10


def test_a_model_without_iterative_sequences_cannot_have_a_request_executed_again(server: RunningServer) -> None:
    with triton.InferenceServerClient(server.address) as client, pytest.raises(
            InferenceServerException, match="iterative_sequence: true"):
        client.infer("plain", number(2), sequence_id=1, sequence_start=True, sequence_end=True)
