"""Tests of rescheduled requests of iterative sequences between their executions."""
from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from infer_server.batching.statistics import Failure
from infer_server.python_backend.executor import PythonExecutor
from infer_server.repository import model as model_module
from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.python_backend.test_iterative import DECOUPLED, streamed
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import RunningServer, serving

# Uses the response sender of a request's first execution in all of them. Batches are of one request: while one
# executes, the others are between two executions.
STEPS = HEAD + """
RESCHEDULE = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def initialize(self, args):
        self.steps, self.senders = {}, {}

    def execute(self, requests):
        value = lambda name: pb_utils.get_input_tensor_by_name(requests[0], name).as_numpy().item()
        what, identity = value("what").decode(), value("id")
        response = lambda value: pb_utils.InferenceResponse(
            [pb_utils.Tensor("left", np.array([[value]], np.int32))], parameters={"id": str(identity)})
        if value("start"):
            self.steps[identity], self.senders[identity] = 0, requests[0].get_response_sender()
        self.steps[identity] += 1
        step, sender = self.steps[identity], self.senders[identity]
        if what == "die":
            os.kill(os.getpid(), 9)
        if what == "for ever":
            if step == 1:
                sender.send(response(step))
            requests[0].set_release_flags(RESCHEDULE)
        elif what == "when told":
            while not sender.is_cancelled():
                time.sleep(0.001)
            requests[0].set_release_flags(RESCHEDULE)
        elif what == "how many are open":
            sender.send(response(len(pb_utils.server._open)), flags=FINAL)
        elif what == "answer first" and step < 3:
            if step == 1:
                sender.send(response(7))
            requests[0].set_release_flags(RESCHEDULE)
        elif what == "answer first":
            sender.send(flags=FINAL)
        elif what == "three" and step < 3:
            sender.send(response(step))
            requests[0].set_release_flags(RESCHEDULE)
        elif what == "end the others":
            del self.senders[identity]
            for other in self.senders.values():
                other.send(flags=FINAL)
            self.senders = {}
            sender.send(response(step), flags=FINAL)
        elif what == "those that are there":
            del self.senders[identity]
            self.senders = {key: kept for key, kept in self.senders.items() if not kept.is_cancelled()}
            sender.send(response(len(self.senders)), flags=FINAL)
        else:
            sender.send(response(step), flags=FINAL)
        if requests[0].release_flags != RESCHEDULE:
            self.senders.pop(identity, None)
"""
CONFIG = """
backend: "python"  max_batch_size: 1
input { name: "what" data_type: TYPE_STRING dims: 1 }
output { name: "left" data_type: TYPE_INT32 dims: 1 }
sequence_batching { iterative_sequence: true
  control_input { name: "start" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
  control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
  oldest { max_candidate_sequences: 4 } }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("repository")
    python_model(folder, "stream", STEPS, CONFIG + DECOUPLED)
    python_model(folder, "single", STEPS, CONFIG)
    python_model(folder, "unloaded", STEPS, CONFIG + DECOUPLED)
    with serving(folder, explicit_control=True, load_models=None) as running:
        yield running


def asked(what: str) -> list[triton.InferInput]:
    tensor = triton.InferInput("what", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[what.encode()]], np.object_))
    return [tensor]


def left(server: RunningServer, what: str, model: str = "single") -> int:
    with triton.InferenceServerClient(server.address) as client:
        actual: int = client.infer(model, asked(what)).as_numpy("left").item()
        return actual


def test_a_response_sender_serves_for_all_executions_of_its_request(server: RunningServer) -> None:
    assert left(server, "answer first") == 7
    with streamed(server) as (client, answers):
        client.async_stream_infer("stream", asked("three"), request_id="a")
        assert [answers.get(timeout=TIMEOUT_SECS) for _ in range(3)] == [("a", 1), ("a", 2), ("a", 3)]


def test_a_request_may_be_ended_while_it_waits_for_its_next_execution(server: RunningServer) -> None:
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(left, server, "for ever")
        assert eventually(lambda: left(server, "those that are there") == 1)
        left(server, "end the others")
        assert answer.result() == 1


def test_requests_without_a_name_are_nobodys_and_those_of_one_name_follow_each_other(server: RunningServer) -> None:
    with streamed(server) as (client, answers):
        client.async_stream_infer("stream", asked("three"), request_id="nameless")
        for name in ("a", "b"):
            client.async_stream_infer("stream", asked("three"), request_id=name, sequence_id=1, sequence_start=True)
        actual = [answers.get(timeout=TIMEOUT_SECS) for _ in range(9)]
    assert [each for each in actual if each[0] == "nameless"] == [("nameless", 1), ("nameless", 2), ("nameless", 3)]
    assert [each for each in actual if each[0] != "nameless"] == [
        ("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2), ("b", 3)]
    with triton.InferenceServerClient(server.address) as client:
        answer = client.infer("single", asked("one")).get_response()
        assert int(answer.parameters["id"].string_param) > 1 << 63


def test_a_model_learns_by_its_senders_of_requests_that_ended_between_two_executions(server: RunningServer) -> None:
    with streamed(server) as (client, answers):
        client.async_stream_infer("stream", asked("for ever"), request_id="a")
        assert answers.get(timeout=TIMEOUT_SECS) == ("a", 1)
        client.stop_stream(cancel_requests=True)
    assert eventually(lambda: left_streamed(server, "those that are there") == 0)
    assert eventually(lambda: left_streamed(server, "how many are open") == 1)      # the one that asks
    with triton.InferenceServerClient(server.address) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("single", asked("for ever"), client_timeout=0.2)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    assert eventually(lambda: left(server, "those that are there") == 0)
    assert all(server.server.repository.find(name).pending == 0 for name in ("single", "stream"))


def test_nothing_is_kept_of_a_request_that_its_model_wants_again_when_nobody_waits_for_it(
        server: RunningServer) -> None:
    model = server.server.repository.find("single")
    executor: PythonExecutor = model._executors[0]
    failed = sum(model.statistics.snapshot().failures.values())
    with triton.InferenceServerClient(server.address) as client:
        call = client.async_infer("single", asked("when told"), lambda result, error: None)
        assert eventually(lambda: executor._process._open)
        call.cancel()
        assert eventually(lambda: sum(model.statistics.snapshot().failures.values()) == failed + 1)
    assert left(server, "one") == 1             # behind all that was done for it
    assert not executor._process._open and not executor._process._between


def left_streamed(server: RunningServer, what: str) -> int:
    with streamed(server) as (client, answers):
        client.async_stream_infer("stream", asked(what))
        return answers.get(timeout=TIMEOUT_SECS)[1]


def test_a_request_ends_with_the_process_that_it_waits_for(server: RunningServer) -> None:
    with streamed(server) as (client, answers):
        client.async_stream_infer("stream", asked("for ever"), request_id="a")
        assert answers.get(timeout=TIMEOUT_SECS) == ("a", 1)
        client.async_stream_infer("stream", asked("die"), request_id="b")
        reasons = sorted(answers.get(timeout=TIMEOUT_SECS)[0] for _ in range(2))
    assert "its process ended between two executions" in reasons[0]
    assert "killed by SIGKILL" in reasons[1]
    assert left_streamed(server, "one") == 1


def test_a_model_that_is_unloaded_ends_what_it_is_never_done_with(
        server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_RESCHEDULED_SECS", 0.0)
    model = server.server.repository.find("unloaded")
    with streamed(server) as (client, answers):
        client.async_stream_infer("unloaded", asked("for ever"), request_id="a")
        assert answers.get(timeout=TIMEOUT_SECS) == ("a", 1)
        client.unload_model("unloaded")
        assert "takes no more requests" in answers.get(timeout=TIMEOUT_SECS)[0]
    assert model.statistics.snapshot().failures[Failure.REJECTED] == 1
