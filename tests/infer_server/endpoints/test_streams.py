"""Tests of ModelStreamInfer, through Triton's own client and stub."""
from __future__ import annotations

import asyncio
import gc
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc

from infer_server.frontend_workers import streams
from infer_server.frontend_workers.link import Frame
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_grpc import request_of
from tests.infer_server.endpoints.test_serving import eventually, statistics
from tests.infer_server.serving import FRONTS, WORKERS, RunningServer, serving

COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "count").as_numpy()[0])
            if count < 0:
                raise ValueError("cannot count down")
            for i in range(count):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("i", np.array([i], np.int32))]))
            if request.request_id() == "fails":
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no more")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNT_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "count" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "i" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""


@pytest.fixture(scope="module", params=FRONTS + WORKERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "affine")
    write_model(repository, "gated", gate="stream", max_batch=1)
    write_model(repository, "large", kind="echo", shape=[1 << 18], max_batch=1)
    (repository / "counts" / "1").mkdir(parents=True)
    (repository / "counts" / "config.pbtxt").write_text(COUNT_CONFIG)
    (repository / "counts" / "1" / "model.py").write_text(COUNT)
    with serving(repository, access_log="json", grpc_front=request.param) as running:
        yield running


@pytest.fixture
def stub(server: RunningServer) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def numbered(i: int, model: str = "affine", raw: bytes = b"") -> service_pb2.ModelInferRequest:
    request = request_of(model, raw=raw or np.full(4, i, np.float32).tobytes())
    request.id = str(i)
    return request


def first_value(response: Any) -> float:
    return float(np.frombuffer(response.infer_response.raw_output_contents[0], np.float32)[0])


def test_a_stream_through_tritons_client(server: RunningServer) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(server.address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for i in range(20):
            tensor = triton.InferInput("x", [1, 4], "FP32")
            tensor.set_data_from_numpy(np.full((1, 4), i, np.float32))
            client.async_stream_infer("affine" if i != 7 else "nobody", [tensor], request_id=str(i))
        actual = [answers.get(timeout=TIMEOUT_SECS) for _ in range(20)]
        client.stop_stream()
    assert "unknown model" in str(actual[7][1])
    for i, (result, _) in enumerate(actual):
        if i != 7:
            response = result.get_response()
            assert response.id == str(i) and result.as_numpy("y")[0, 0] == 2 * i + 1
            assert response.parameters["triton_final_response"].bool_param


def test_answers_come_in_order_whatever_is_done_first(
        server: RunningServer, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    sent = [numbered(0, "gated"), *(numbered(i) for i in range(1, 600)), numbered(600, raw=b"short")]
    with GATES["stream"].closed():
        answers = stub.ModelStreamInfer(iter(sent), timeout=TIMEOUT_SECS)
        assert eventually(lambda: server.server.repository.find("affine").statistics.snapshot().success.count > 500)
    actual = list(answers)
    assert [each.infer_response.id for each in actual] == [str(i) for i in range(601)]
    assert [first_value(each) for each in actual[:-1]] == [2.0 * i + 1 for i in range(600)]
    assert "Expected 16, got 5" in actual[-1].error_message
    assert actual[-1].infer_response.parameters["triton_final_response"].bool_param


def test_every_inference_has_a_line_in_the_access_log(
        stub: service_pb2_grpc.GRPCInferenceServiceStub, caplog: pytest.LogCaptureFixture) -> None:
    stub.ModelInfer(numbered(1), timeout=TIMEOUT_SECS)
    list(stub.ModelStreamInfer(iter([numbered(2, "no\nbody")]), timeout=TIMEOUT_SECS))
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "infer_server.access"]
    assert [(line["id"], line["model"], line["batch"], line["status"]) for line in lines] == [
        ("1", "affine", 1, "OK"), ("2", "no\nbody", 0, "UnknownModelError")]
    assert all(line["protocol"] == "gRPC" and line["us"] > 0 for line in lines)
    assert "127.0.0.1" in lines[0]["client"]        # a stream's is unknown behind the fast front
    assert not any("\n" in record.getMessage() for record in caplog.records)


def test_a_client_may_have_its_stream_end_with_the_first_error(
        stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.ModelStreamInfer(iter([numbered(1, "nobody"), numbered(2)]), timeout=TIMEOUT_SECS,
                                   metadata=[("triton_grpc_error", "true")]))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_stream_that_ends_with_an_error_has_the_responses_before_it(
        stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    request = service_pb2.ModelInferRequest(model_name="counts", id="fails")
    request.inputs.add(name="count", datatype="INT32", shape=[1])
    request.raw_input_contents.append(np.array([100], np.int32).tobytes())
    seen = []
    with pytest.raises(grpc.RpcError, match="no more"):
        for response in stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_SECS,
                                              metadata=[("triton_grpc_error", "true")]):
            seen.append(int(np.frombuffer(response.infer_response.raw_output_contents[0], np.int32)[0]))
    assert seen == [*range(100)]


def test_what_a_stream_asked_for_is_withdrawn_when_its_client_leaves(
        server: RunningServer, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    def waiting() -> int:
        return server.server.repository.find("gated").pending
    with GATES["stream"].closed():
        answers = stub.ModelStreamInfer(iter([numbered(i, "gated") for i in range(5)]))
        assert GATES["stream"].holds(1) and eventually(lambda: waiting() == 4)
        answers.cancel()
        assert eventually(lambda: waiting() == 0)
    assert eventually(lambda: server.server._inflight.held_bytes == 0)


def test_what_comes_when_a_stream_has_ended_with_an_error_is_not_read(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a request would get no response, and its bytes would stay counted towards --max-inflight-mib."""
    left = threading.Event()
    both: list[bool] = []                               # are here

    class Late(streams._ForwardedContext):
        async def read(self) -> object:
            while not both and self._requests.qsize() < 2:
                await asyncio.sleep(0)
            both.append(True)
            data = await super().read()
            if numbered(2).SerializeToString() == data:
                try:
                    await asyncio.sleep(TIMEOUT_SECS)   # the first one's error ends the stream meanwhile
                finally:
                    left.set()
            return data

    async def held_bytes() -> int:                      # on the loop, behind what it does with what was read
        return server.server._inflight.held_bytes

    monkeypatch.setattr(streams, "_ForwardedContext", Late)
    write_model(tmp_path, "affine")
    with serving(tmp_path, grpc_front=WORKERS[0]) as server, grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError, match="nobody"):
            list(service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
                iter([numbered(1, "nobody"), numbered(2)]), timeout=TIMEOUT_SECS,
                metadata=[("triton_grpc_error", "true")]))
        assert left.wait(TIMEOUT_SECS) and server.run(held_bytes()) == 0


def test_requests_that_a_front_hands_on_wait_at_their_client_as_those_of_one_process_do(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests count towards --max-inflight-mib only once the executing process has read them."""
    request = request_of("large", shape=(1, 1 << 17), raw=bytes(4 << 17))
    waiting: list[int] = []

    class Watched(streams._ForwardedContext):
        def received(self, frame: Frame) -> None:
            super().received(frame)
            waiting.append(sum(map(len, filter(None, self._requests._queue))))    # type: ignore[attr-defined]

    monkeypatch.setattr(streams, "_ForwardedContext", Watched)
    monkeypatch.setattr("infer_server.endpoints.grpc.service.stream._MAX_CONCURRENT", 2)
    write_model(tmp_path, "large", gate="wait", shape=[1 << 17], max_batch=1)
    with serving(tmp_path, grpc_front=WORKERS[0]) as server, grpc.insecure_channel(server.address) as channel:
        with GATES["wait"].closed():
            answers = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
                iter([request] * 32), timeout=TIMEOUT_SECS)
            assert eventually(lambda: bool(waiting and waiting[-1]))
        assert len(list(answers)) == 32
    assert max(waiting) == request.ByteSize()


def test_answers_without_a_response_make_room_for_requests(
        stub: service_pb2_grpc.GRPCInferenceServiceStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_server.endpoints.grpc.service.stream._MAX_CONCURRENT", 2)
    nothing, one = (request_of("counts", "count", "INT32", (1,), np.array([count], np.int32).tobytes())
                    for count in (0, 1))
    assert len(list(stub.ModelStreamInfer(iter([*[nothing] * 5, one]), timeout=TIMEOUT_SECS))) == 1


def test_a_client_is_given_its_time_to_read_an_answer_when_those_before_it_are_sent(
        server: RunningServer, stub: service_pb2_grpc.GRPCInferenceServiceStub,
        monkeypatch: pytest.MonkeyPatch) -> None:
    large = request_of("large", shape=(1, 1 << 18), raw=bytes(4 << 18))
    before = statistics(server, "large").success.count
    with GATES["stream"].closed(), monkeypatch.context() as patch:
        patch.setattr(server.server._inflight, "send_timeout_secs", 0.0)
        answers = stub.ModelStreamInfer(iter([numbered(1, "gated"), large]), timeout=TIMEOUT_SECS)
        assert eventually(lambda: statistics(server, "large").success.count > before)
        server.run(asyncio.sleep(0.01))
    assert len(list(answers)) == 2


@pytest.mark.parametrize("front", FRONTS + WORKERS)
def test_a_client_that_does_not_read_its_stream_is_disconnected(
        front: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    requested = 8
    write_model(tmp_path, "large", shape=[1 << 20], max_batch=1)
    with (serving(tmp_path, grpc_front=front, send_timeout_secs=0.4) as server,
          grpc.insecure_channel(server.address, [("grpc.max_receive_message_length", -1)]) as channel):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = request_of("large", shape=(1, 1 << 20), raw=bytes(4 << 20))
        answers = stub.ModelStreamInfer(iter([request] * requested))
        assert eventually(lambda: "not read" in caplog.text)
        assert eventually(lambda: server.server._inflight.held_bytes == 0)
        with pytest.raises(grpc.RpcError):
            list(answers)
        assert answers.code() is grpc.StatusCode.UNAVAILABLE
    gc.collect()                # asyncio tells then of what nobody took note of
    assert caplog.text.count("not read") <= requested + 1 and "Traceback" not in caplog.text


def test_a_decoupled_model_has_any_number_of_responses(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    def counting(count: int, final: bool) -> service_pb2.ModelInferRequest:
        request = request_of("counts", "count", "INT32", (1,), np.array([count], np.int32).tobytes())
        request.id = str(count)
        request.parameters["triton_enable_empty_final_response"].bool_param = final
        return request
    actual = list(stub.ModelStreamInfer(iter([counting(3, True), counting(0, False), counting(0, True), numbered(7)]),
                                        timeout=TIMEOUT_SECS))
    assert not any(each.error_message for each in actual), actual
    of_three = [each.infer_response for each in actual if each.infer_response.id == "3"]
    assert [np.frombuffer(each.raw_output_contents[0], np.int32)[0] for each in of_three[:3]] == [0, 1, 2]
    finals = [each.parameters["triton_final_response"].bool_param for each in of_three]
    assert finals == [False, False, False, True] and not of_three[3].outputs
    (of_none,) = [each.infer_response for each in actual if each.infer_response.id == "0"]
    assert of_none.parameters["triton_final_response"].bool_param and not of_none.outputs
    assert [first_value(each) for each in actual if each.infer_response.id == "7"] == [15.0]
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(counting(1, True), timeout=TIMEOUT_SECS)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
