"""Tensors between the steps of an ensemble are counted, bounded, and freed when their request ends."""
from __future__ import annotations

import gc
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from infer_server.batching.request import Request
from infer_server.endpoints.grpc.service.stream import _Answer, _InferStream
from infer_server.python_backend.window import OpenRequests, SendWindow
from infer_server.repository.kinds.ensemble_run import EnsembleRun, _Flow
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.python_backend.test_python_models import python_model
from tests.infer_server.serving import FRONTS, WORKERS, RunningServer, serving

FOUR_BYTES, MANY = 4, 40
PRODUCER = f"""
import pathlib
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sent = pathlib.Path(args["model_repository"]).parent / "sent"

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            rows = int(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0])
            for number in range({MANY}):
                if sender.is_cancelled():
                    break
                values = np.full((1, rows), number, np.float32)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", values)]))
                self.sent.write_text(str(number + 1))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self.sent.write_text("all")
"""
TENSORS = """input {{ name: "x" data_type: TYPE_FP32 dims: 1 }}
    output {{ name: "y" data_type: TYPE_FP32 dims: [1, {}] }}"""


def write_ensemble(repository: Path, values: int, most: int = 0, outer: bool = False) -> str:
    """Write a decoupled producer of responses of so many values, a consumer behind a gate, and an ensemble of both."""
    python_model(repository, "producer", PRODUCER, f"""
        {TENSORS.format(values)} model_transaction_policy {{ decoupled: true }}""")
    write_model(repository, "consumer", shape=[values], max_batch=1, gate="consumer", kind="echo",
                config=f"""max_batch_size: 0
                input {{ name: "x" data_type: TYPE_FP32 dims: [1, {values}] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [1, {values}] }} instance_group {{ count: 1 }}""")
    step = """step {{ model_name: "{}" model_version: -1 input_map {{ key: "x" value: "{}" }}
        output_map {{ key: "y" value: "{}" }} }}"""
    chains = {"inner": [("producer", "x", "y")], "e": [("inner" if outer else "producer", "x", "m"),
                                                       ("consumer", "m", "y")]}
    for name, steps in chains.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(f"""{TENSORS.format(values)} ensemble_scheduling {{
            {' '.join(step.format(*each) for each in steps)}
            {f'max_inflight_requests: {most}' if name == 'e' else ''} }}""")
    return "e"


@contextmanager
def stream(server: RunningServer, values: int) -> Iterator[tuple[Any, queue.Queue[Any]]]:
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server.address) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        tensor = triton.InferInput("x", [1], "FP32")
        tensor.set_data_from_numpy(np.array([values], np.float32))
        client.async_stream_infer("e", [tensor], enable_empty_final_response=True)
        yield client, answers


def sent(repository: Path) -> str:
    file = repository / "sent"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize(("most", "values", "outer", "ahead"), [
    (3, 4, False, 3), (3, 4, True, 3), (0, 1 << 16, False, 7)],
    ids=["max_inflight_requests", "of an ensemble that an ensemble calls", "bytes"])
def test_a_decoupled_step_is_held_back_until_the_steps_behind_it_have_done(
        tmp_path: Path, most: int, values: int, outer: bool, ahead: int) -> None:
    write_ensemble(tmp_path, values, most, outer)
    with serving(tmp_path, max_inflight_bytes=64 << 20) as server:
        with GATES["consumer"].closed(), stream(server, values) as (_, answers):
            assert eventually(lambda: sent(tmp_path) == str(ahead))
            time.sleep(0.1)                             # in which all would be sent, if nothing held it back
            assert sent(tmp_path) == str(ahead)
            GATES["consumer"]._set(False)
            actual = [answers.get(timeout=TIMEOUT_SECS).as_numpy("y") for _ in range(MANY)]
            assert [array[0, 0] for array in actual] == [*range(MANY)], "none is lost, and they keep their order"
            assert answers.get(timeout=TIMEOUT_SECS).get_response().parameters["triton_final_response"].bool_param
        assert eventually(lambda: server.server._inflight.held_bytes == 0)


@pytest.mark.parametrize("front", FRONTS + WORKERS)
def test_a_cancelled_stream_frees_its_tensors_at_once(tmp_path: Path, front: str) -> None:
    kinds = (Request, EnsembleRun, _Flow, _Answer, _InferStream)
    write_ensemble(tmp_path, 1 << 16)

    def alive() -> list[str]:
        return [type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds)]

    with serving(tmp_path, grpc_front=front) as server:
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                with GATES["consumer"].closed(), stream(server, 1 << 16) as (client, _):
                    assert eventually(lambda: server.server._inflight.held_bytes > 1 << 20)
                    client.stop_stream(cancel_requests=True)
                    assert eventually(lambda: server.server._inflight.held_bytes == 0)
                assert eventually(lambda: sent(tmp_path) == "all"), "its producer is told, and goes on"
            assert eventually(lambda: not alive()), alive()
        finally:
            gc.enable()


def test_a_stream_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    write_ensemble(tmp_path, 4)
    kinds = (Request, EnsembleRun, _Flow)
    with serving(tmp_path) as server:
        gc.collect()
        gc.disable()
        try:
            with stream(server, 4) as (_, answers):
                for _ in range(MANY + 1):
                    assert not isinstance(answers.get(timeout=TIMEOUT_SECS), Exception)
            assert eventually(lambda: not [each for each in gc.get_objects() if isinstance(each, kinds)])
        finally:
            gc.enable()


def test_tensors_between_steps_that_exceed_the_limit_end_their_request(tmp_path: Path) -> None:
    values = 1 << 20
    write_model(tmp_path, "large", shape=[values], max_batch=1)
    (tmp_path / "e" / "1").mkdir(parents=True)
    tensors = " ".join(f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: {values} }}'
                       for kind, name in (("input", "x"), ("output", "y")))
    (tmp_path / "e" / "config.pbtxt").write_text(f"""max_batch_size: 1 {tensors} ensemble_scheduling {{
        step {{ model_name: "large" model_version: -1 input_map {{ key: "x" value: "x" }}
                output_map {{ key: "y" value: "m" }} }}
        step {{ model_name: "large" model_version: -1 input_map {{ key: "x" value: "m" }}
                output_map {{ key: "y" value: "y" }} }} }}""")
    tensor = triton.InferInput("x", [1, values], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, values), np.float32))
    for steps, refusal in ((1, "step 1 .*--max-inflight-mib"), (2, "")):
        bound = (3 + steps) * FOUR_BYTES * values + 4096        # the request, its answer twice, and the steps'
        with (serving(tmp_path, max_inflight_bytes=bound) as server,
              triton.InferenceServerClient(server.address) as client):
            if refusal:
                with pytest.raises(triton.InferenceServerException, match=refusal) as caught:
                    client.infer("e", [tensor])
                assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
            else:
                assert (client.infer("e", [tensor]).as_numpy("y") == 3).all()
            assert eventually(lambda: server.server._inflight.held_bytes == 0)


def test_a_window_takes_one_response_at_least_and_no_more_than_it_says() -> None:
    window = SendWindow(2, 100)
    assert window.can_send(1000)
    window.sent(1000)
    assert not window.can_send(1)
    window.consumed()
    window.sent(60)
    assert window.can_send(40) and not window.can_send(41)
    window.sent(40)
    assert not window.can_send(0), "two responses"
    requests = OpenRequests()
    requests.open(1, (1, 10))
    requests.wait_to_send(1, 5)
    requests.cancel(1)
    requests.wait_to_send(1, 5)                        # which would wait for ever
    assert requests.is_cancelled(1) and len(requests) == 1
    requests.end(1)
    requests.wait_to_send(1, 5)
