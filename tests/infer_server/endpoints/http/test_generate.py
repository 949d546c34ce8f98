"""Tests of Triton's generate extension: inputs as plain JSON, responses whole or as server-sent events."""
from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from infer_server.endpoints.http import messages
from infer_server.protocol.json_values import parsed
from infer_server.protos import http2
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.http import plain
from tests.infer_server.endpoints.http.plain import CLOSE, ask, post
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.endpoints.test_streams import COUNT_CONFIG
from tests.infer_server.http2_client import Http2Client
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import RunningServer, serving

COUNT = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "count").as_numpy()[0])
            step = json.loads(request.parameters()).get("step", 1)
            if count == 9:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("i", np.array([9], np.int32))]))
            if count > 8:
                raise ValueError("cannot count so far")
            for i in range(0, count * step, step):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("i", np.array([i], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
BIG = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            while not sender.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("i", np.zeros(100_000, np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "affine")
    write_model(repository, "gated", gate="generate")
    write_model(repository, "half", dtype="float16")
    write_model(repository, "text", kind="echo", dtype="object", shape=[1])
    python_model(repository, "counts", COUNT, COUNT_CONFIG)
    python_model(repository, "big", BIG, COUNT_CONFIG.replace('"i" data_type: TYPE_INT32 dims: [ 1 ]',
                                                              '"i" data_type: TYPE_INT32 dims: [ -1 ]'))
    with serving(repository, max_inflight_bytes=4 << 20, access_log="json") as running:
        yield running


def generate(server: RunningServer, model: str, body: Any, how: str = "generate") -> tuple[int, str, str]:
    """Return the status, content type and body of a response, by a client of chunked HTTP/1.1 or of HTTP/2."""
    if plain.version == "HTTP/2":
        head, _, text = ask(server, post(f"/v2/models/{model}/{how}", json.dumps(body).encode())).partition(
            b"\r\n\r\n")
        actual = re.search(rb"^Content-Type: (.*?)\r?$", head, re.MULTILINE)
        return int(head.split()[1]), actual[1].decode() if actual else "", text.decode()
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=TIMEOUT_SECS)
    connection.request("POST", f"/v2/models/{model}/{how}", json.dumps(body))
    response = connection.getresponse()
    answer = response.status, response.getheader("Content-Type") or "", response.read().decode()
    connection.request("GET", "/v2/health/live")            # the same connection goes on
    assert connection.getresponse().status == 200
    connection.close()
    return answer


def events(text: str) -> list[Any]:
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-1]]


@pytest.mark.usefixtures("version")
def test_inputs_and_outputs_are_plain_members(server: RunningServer) -> None:
    status, _, text = generate(server, "affine", {"id": "7", "x": [1, 2, 3, 4], "stream": False, "temperature": 0.5})
    assert status == 200 and json.loads(text) == {
        "id": "7", "model_name": "affine", "model_version": "1", "y": [3, 5, 7, 9]}
    assert json.loads(generate(server, "text/versions/1", {"x": "caf\u00e9"})[2])["y"] == "caf\u00e9"
    assert json.loads(generate(server, "text", {"parameters": {"x": ["a", "b"]}})[2])["y"] == ["a", "b"]
    assert json.loads(generate(server, "counts", {"count": 1})[2])["i"] == 0


def test_the_body_of_a_generation_is_parsed_once(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []

    def counted(text: bytes) -> Any:
        read.append(text)
        return parsed(text)

    monkeypatch.setattr(messages, "parsed", counted)
    assert generate(server, "affine", {"x": [1, 2, 3, 4]})[0] == 200
    assert len(read) == 1


def test_every_response_is_an_event(server: RunningServer, version: str) -> None:
    status, content_type, text = generate(server, "counts", {"count": 3, "step": 5}, "generate_stream")
    assert (status, content_type) == (200, "text/event-stream; charset=utf-8")
    assert [event["i"] for event in events(text)] == [0, 5, 10]
    assert [event["y"][0] for event in events(generate(server, "affine", {"x": [4] * 4}, "generate_stream")[2])] == [9]
    assert generate(server, "counts", {"count": 0}, "generate_stream")[2] == ""
    (first, last) = events(generate(server, "counts", {"count": 9}, "generate_stream")[2])
    assert first["i"] == 9 and "cannot count so far" in last["error"]
    if version == "HTTP/1.1":
        old = ask(server, post("/v2/models/counts/generate_stream", b'{"count": 2}').replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert old.endswith(b'"i":1}\n\n') and b"chunked" not in old


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize(("model", "body", "how", "status", "said"), [
    ("nobody", {}, "generate", 404, "unknown model"), ("affine", [], "generate", 400, "JSON object"),
    ("affine", {"x": 1}, "generate", 400, "1 values do not fill x FP32 [-1, 4]"),
    ("affine", {}, "generate_stream", 400, "missing required input(s) ['x']"),
    ("affine", {"x": [1, 2, 3, 4], "z": [1]}, "generate", 400, "no input of model 'affine', which has x"),
    ("affine", {"x": ["a", "b", "c", "d"]}, "generate", 400, "a str in 'data'"),
    ("half", {"x": [1, 2, 3, 4]}, "generate", 400, "FP16 data via JSON is not supported"),
    ("counts", {"count": 2}, "generate", 500, "exactly 1 response"),
    ("counts", {"count": 10}, "generate_stream", 500, "cannot count so far"),
])
def test_what_cannot_be_generated_has_a_status(
        server: RunningServer, model: str, body: Any, how: str, status: int, said: str) -> None:
    actual, _, text = generate(server, model, body, how)
    assert actual == status and said in json.loads(text)["error"]


def test_an_answer_that_is_refused_for_the_number_of_its_responses_is_no_success_in_the_access_log(
        server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    for count in (0, 1, 2):
        generate(server, "counts", {"count": count})
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "infer_server.access"]
    assert [line["status"] for line in lines] == ["ExecutionError", "OK", "ExecutionError"]


def begun(server: RunningServer, model: str, body: str) -> http.client.HTTPConnection:
    """Return a connection on which a stream of events was requested."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=TIMEOUT_SECS)
    connection.request("POST", f"/v2/models/{model}/generate_stream", body)
    return connection


def test_a_generation_whose_client_leaves_is_withdrawn(server: RunningServer) -> None:
    model, x = server.server.repository.find("gated"), '{"x": [1, 2, 3, 4]}'
    with GATES["generate"].closed():
        executing = begun(server, "gated", x)
        assert GATES["generate"].holds(1)
        waiting = begun(server, "gated", x)
        assert eventually(lambda: model.pending == 1)
        waiting.close()
        assert eventually(lambda: model.pending == 0)
    assert events(executing.getresponse().read().decode())[0]["y"] == [3, 5, 7, 9]
    executing.close()


@pytest.mark.skipif(not http2.is_installed, reason="ngh2 is not installed")
def test_a_stream_of_http2_whose_events_are_not_read_ends_and_others_go_on(server: RunningServer) -> None:
    inflight = server.server._inflight
    with Http2Client(server.ports.http, window_bytes=1000) as client:
        def request(path: str, body: bytes) -> int:
            return client.request([(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()),
                                   (b":authority", b"x")], body)

        inflight._peak_bytes = 0
        unread = request("/v2/models/big/generate_stream", b'{"count": 1}')
        while not any(isinstance(event, http2.StreamClosed) and event.stream_id == unread for event in client.events):
            client.read(0.1)                                # 1000 bytes at a time: events come faster
        assert inflight._peak_bytes > 1 << 20 and eventually(lambda: inflight.held_bytes == 0)
        assert client.answer(request("/v2/models/affine/generate", b'{"x": [1, 2, 3, 4]}'))[0][b":status"] == b"200"


def test_a_client_that_does_not_read_its_events_is_disconnected(server: RunningServer) -> None:
    """The model sends events without end; the server holds up to 4 MB that do not fit into socket buffers."""
    inflight = server.server._inflight
    inflight._peak_bytes = 0
    connection = begun(server, "big", '{"count": 1}')
    assert eventually(lambda: inflight._peak_bytes > 1 << 20)
    assert eventually(lambda: inflight.held_bytes == 0)
    assert b"200" in ask(server, f"GET /v2 HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode())
    connection.close()
