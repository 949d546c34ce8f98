"""The HTTP/REST protocol, through Triton's own client and over plain sockets."""
from __future__ import annotations

import asyncio
import gc
import gzip
import json
import math
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from infer_server.endpoints.http import connection as connections
from infer_server.endpoints.http.compression import decompressed
from infer_server.endpoints.http.connection import Exchange
from infer_server.endpoints.http.messages import HttpRequest
from infer_server.endpoints.http.transports import LargeBody, Outlet
from infer_server.endpoints.inflight import Inflight
from infer_server.errors import InvalidRequestError
from infer_server.listeners import Listeners
from infer_server.protocol.codec import DATATYPES, InputTensor
from infer_server.protocol.json_tensors import from_json
from tests.infer_server.endpoints.test_serving import eventually, statistics
from tests.infer_server.numpy_engine import GATES, TIMEOUT_SECS, write_model
from tests.infer_server.serving import WORKERS, RunningServer, serving

X = np.array([[1, 2, 3, 4]], np.float32)


@pytest.fixture(scope="module", params=("grpcio", WORKERS[0]))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "affine")
    write_model(repository, "two", kind="two", shape=[2, 3])
    write_model(repository, "half", dtype="float16")
    write_model(repository, "large", shape=[1 << 18])
    write_model(repository, "small", dtype="int8")
    write_model(repository, "truth", dtype="int64", shape=[2])
    write_model(repository, "fragile", kind="fails_on_negative")
    write_model(repository, "gated", gate="http")
    write_model(repository, "a model")
    (write_model(repository, "corrupt") / "1" / "model.plan").write_bytes(b"\0not a plan")
    with serving(repository, max_body_bytes=1 << 21, explicit_control=True, load_models=None,
                 grpc_front=request.param) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.ports.http}", concurrency=4) as connected:
        yield connected


def tensor(array: np.ndarray[Any, Any], datatype: str = "FP32", name: str = "x",
           binary: bool = True) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


@pytest.mark.parametrize("sent", [True, False], ids=["sent in binary", "sent as JSON"])
@pytest.mark.parametrize("asked", [True, False], ids=["answered in binary", "answered as JSON"])
@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
def test_an_inference_is_answered_in_the_form_that_is_asked_for(
        client: triton.InferenceServerClient, sent: bool, asked: bool, coding: str | None) -> None:
    result = client.infer("affine", [tensor(np.repeat(X, 3, 0), binary=sent)], request_id="7",
                          outputs=[triton.InferRequestedOutput("y", binary_data=asked)],
                          request_compression_algorithm=coding, response_compression_algorithm=coding)
    np.testing.assert_array_equal(result.as_numpy("y"), np.repeat(X, 3, 0) * 2 + 1)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("7", "affine", "1")
    assert ("data" in response["outputs"][0]) != asked


def test_several_tensors_and_other_dtypes_arrive_as_they_are(client: triton.InferenceServerClient) -> None:
    a, b = np.float32(np.random.default_rng(0).standard_normal((2, 2, 2, 3)))
    result = client.infer("two", [tensor(a, name="x"), tensor(b, name="x2", binary=False)])
    np.testing.assert_array_equal(result.as_numpy("sum"), a + b)
    half = client.infer("half", [tensor(np.float16(X), "FP16")]).as_numpy("y")
    assert half.dtype == np.float16 and (half == X * 2 + 1).all()
    whole = client.infer("truth", [tensor(np.array([[2 ** 40, -1]]), "INT64", binary=False)])
    assert whole.as_numpy("y").tolist() == [[2 ** 41 + 1, -1]]


def test_what_the_server_and_its_models_are_is_told(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and not client.is_server_ready(), "a model has failed"
    assert client.is_model_ready("affine") and client.is_model_ready("a model", "1")
    assert not client.is_model_ready("nobody") and not client.is_model_ready("corrupt")
    assert "statistics" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("affine")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    config = client.get_model_config("affine", "1")
    assert config["max_batch_size"] == 8 and config["input"][0]["dims"] == [4]
    client.infer("affine", [tensor(X)])
    (statistics,) = client.get_inference_statistics("affine")["model_stats"]
    assert statistics["inference_stats"]["success"]["count"] > 0
    assert {each["name"] for each in client.get_inference_statistics()["model_stats"]} >= {"affine", "two"}


def test_models_are_listed_unloaded_and_loaded(
        server: RunningServer, client: triton.InferenceServerClient) -> None:
    states = {entry["name"]: entry.get("state") for entry in client.get_model_repository_index()}
    assert states["affine"] == "READY" and states["corrupt"] == "UNAVAILABLE"
    client.unload_model("a model")
    assert not client.is_model_ready("a model")
    client.load_model("a model", config=json.dumps({"max_batch_size": 2}))
    assert client.get_model_config("a model")["max_batch_size"] == 2
    with pytest.raises(InferenceServerException, match="not in the repository"):
        client.load_model("nobody")
    for path in ("index", "models/affine/load", "models/affine/unload"):
        answer = ask(server, post(f"/v2/repository/other/{path}", b"", CLOSE))
        assert answer.startswith(b"HTTP/1.1 501") and b"'repository_name'" in answer, path
    unknown = json.dumps({"parameters": {"zz": True}}).encode()
    assert b"parameter 'zz'" in ask(server, post("/v2/repository/models/affine/unload", unknown, CLOSE))
    assert client.is_model_ready("affine")


def test_an_inference_that_cannot_be_served_says_why(client: triton.InferenceServerClient) -> None:
    for model, inputs, status, said in (
            ("nobody", [tensor(X)], "404", "unknown model"),
            ("corrupt", [tensor(X)], "404", "has no available versions"),
            ("affine", [tensor(X, name="z")], "400", "unexpected inference input 'z'"),
            ("affine", [tensor(X[:, :2])], "400", "unexpected shape"),
            ("affine", [tensor(X.astype(np.float64), "FP64")], "400", "data-type is 'FP64'"),
            ("fragile", [tensor(-X)], "500", "a negative value"),
            ("large", [tensor(np.zeros((3, 1 << 18), np.float32))], "413", "maximum allowed input size of 2097152")):
        with pytest.raises(InferenceServerException, match=said) as caught:
            client.infer(model, inputs)
        assert caught.value.status() == status
    with pytest.raises(InferenceServerException, match="sending FP16 data via JSON is not supported"):
        client.infer("half", [tensor(np.float16(X), "FP16")],
                     outputs=[triton.InferRequestedOutput("y", binary_data=False)])


def test_the_status_page_shows_models_states_and_batches(
        server: RunningServer, client: triton.InferenceServerClient) -> None:
    client.infer("affine", [tensor(np.repeat(X, 3, 0))])
    answer = ask(server, f"GET / HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode())
    head, _, page = answer.partition(b"\r\n\r\n")
    assert b"text/html" in head and b"200" in head.split(b"\r\n")[0]
    for text in (b"<td>affine</td><td>1</td>", b">READY<", b">UNAVAILABLE</span> ", b"instance free"):
        assert text in page, text
    assert re.search(rb"<tr><td>3</td><td>\d+</td><td>[\d.]+ ms</td>", page)
    assert b"<script" not in page and b"not a plan" not in head
    assert re.search(rb"<td colspan=11><span class=\"UNAVAILABLE\">", page), "its reason has the width of what it lacks"


def test_the_status_page_has_no_negative_rate_of_a_model_that_was_loaded_again(tmp_path: Path) -> None:
    write_model(tmp_path, "affine")

    def rates() -> list[float]:
        page = ask(server, f"GET / HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode())
        (row,) = re.findall(rb"<tr><td>affine</td>(.*?)</tr>", page)
        return [float(cell) for cell in re.findall(rb"<td>(-?[\d.]+)</td>", row)]
    with (serving(tmp_path, explicit_control=True, load_models=None) as server,
          triton.InferenceServerClient(f"127.0.0.1:{server.ports.http}") as client):
        client.infer("affine", [tensor(X)])
        assert min(rates()) >= 0
        client.load_model("affine")
        assert min(rates()) >= 0


def test_the_status_page_of_no_model_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        page = ask(server, f"GET / HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode())
    assert b"<td colspan=13>there is no model</td>" in page


# ---- over a plain socket
def ask(server: RunningServer, *requests: bytes) -> bytes:
    """All that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.ports.http), timeout=TIMEOUT_SECS) as connection:
        for request in requests:
            connection.sendall(request)
        received = b""
        while data := connection.recv(1 << 16):
            received += data
    return received


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def body_of(shape: object = (1, 4), data: object = (1, 2, 3, 4), also: object = None, **more: object) -> bytes:
    """also: parameters of the request; more: members of its input."""
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": data, **more}],
                       "parameters": also}).encode()


CLOSE = "Connection: close"


@pytest.mark.parametrize(("body", "headers", "status", "said"), [
    (b"{", (), 400, "failed to parse"), (b"[]", (), 400, "no JSON object"),
    (b'{"inputs": 3}', (), 400, "expected list"),
    (b"", (), 400, "failed to parse"), (body_of(data=[1, 2, 3]), (), 400, "expected 4 values"),
    (body_of(), (), 200, '"data":[3.0,5.0,7.0,9.0]'), (b"{", (), 400, '{"error":"'),      # as scripts look for it
    (body_of(data=["a", 2, 3, 4]), (), 400, "a str in 'data'"), (body_of(data=[[1, 2], [3, 4]]), (), 200, "3.0"),
    (body_of(shape=[1, 4.0]), (), 400, "non-unsigned-integer"), (body_of(shape=[1, -4]), (), 400, "'x' is [1, -4]"),
    (body_of(parameters={"binary_data_size": 16}, data=None), (), 400, "exceeds the 0 bytes"),
    (body_of(), ("Inference-Header-Content-Length: 9999",), 400, "more than the body has"),
    (body_of() + b"1234", (f"Inference-Header-Content-Length: {len(body_of())}",), 400, "belong to no input"),
    (body_of(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 16}), (), 501, "shared memory"),
    (body_of(parameters={"shared_memory_region": "r"}), (), 400, "must be specified along with"),
    (body_of(also={"triton_x": 1}), (), 400, "are reserved"),
    (body_of(also={"triton_enable_empty_final_response": 1}), (), 400, "expected bool, got int"),
    (body_of(also={"timeout": "soon"}), (), 400, "expected int, got str"),
    (body_of(also={"mine": [1]}), (), 200, "3.0"),
    (gzip.compress(body_of()), ("Content-Encoding: gzip",), 200, "9.0"),
    (gzip.compress(bytes(3 << 20)), ("Content-Encoding: gzip",), 503, "when it is decompressed"),
    (body_of(), ("Content-Encoding: gzip",), 400, "is no gzip"), (body_of(), ("Content-Encoding: br",), 501, "'br'"),
    (b"[" * 100_000, (), 400, "failed to parse"),
    (b'{"id": "\\ud800", ' + body_of()[1:], (), 400, "failed to parse"),
    (body_of().decode().encode("utf-16"), (), 400, "failed to parse"),
    (b'{"id": "\\ud83d\\ude00", ' + body_of()[1:], (), 200, "\\ud83d\\ude00"),
    (body_of(data=json.loads("[" * 101 + "1" + "]" * 101)), (), 400, "JSON nesting depth exceeds"),
    (body_of(data=json.loads("[" * 99 + "1, 2, 3, 4" + "]" * 99)), (), 200, "9.0"),
    (body_of()[:-1] + b', "outputs": [{"name": "y"}, {"name": "y"}]}', (), 400, "'y' already exists in request"),
    (body_of(), (f"Inference-Header-Content-Length: {'9' * 5000}",), 400, "Unable to parse Inference-Header"),
    (body_of(), ("Connection: upgrade", "Upgrade: h2c"), 501, "send it without Upgrade"),
], ids=count())
def test_every_body_is_answered_with_a_status(server: RunningServer, body: bytes, headers: tuple[str, ...], status: int,
                                              said: str) -> None:
    answer = ask(server, post("/v2/models/affine/infer", body, CLOSE, *headers))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and said.encode() in answer


ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(
            "y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())])
                for request in requests]
"""


def described(server: RunningServer, model: str, sent: bytes) -> tuple[dict[str, Any], bytes]:
    """What the answer says of its one output, and the bytes of that."""
    answer = ask(server, post(f"/v2/models/{model}/infer", sent, CLOSE, "Inference-Header-Content-Length: 0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"Inference-Header-Content-Length: (\d+)", head)
    assert head.startswith(b"HTTP/1.1 200 ") and length is not None, answer
    (output,) = json.loads(body[:int(length[1])])["outputs"]
    return output, body[int(length[1]):]


@pytest.mark.parametrize(("model", "sent"), [("affine", X), ("half", X.astype(np.float16))])
def test_a_body_that_is_nothing_but_the_one_input_needs_no_json(server: RunningServer, model: str,
                                                               sent: np.ndarray[Any, Any]) -> None:
    output, content = described(server, model, sent.tobytes())
    assert (output["name"], output["shape"]) == ("y", [1, 4])
    np.testing.assert_array_equal(np.frombuffer(content, sent.dtype), 2 * sent[0] + 1)


def test_an_open_extent_is_told_by_the_length_of_a_body_without_json(tmp_path: Path) -> None:
    for name, dims, kind in (("row", "-1", "FP32"), ("rows", "3, -1", "FP32"), ("plane", "-1, -1", "FP32"),
                             ("word", "1", "STRING"), ("words", "-1", "STRING")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text(ECHO)
        (tmp_path / name / "config.pbtxt").write_text(
            f'backend: "python" max_batch_size: {8 * (name != "rows")} instance_group {{ count: 1 }} '
            f'input {{ name: "x" data_type: TYPE_{kind} dims: [ {dims} ] }} '
            f'output {{ name: "y" data_type: TYPE_{kind} dims: [ {dims} ] }}')
    numbers = bytes(range(24))
    with serving(tmp_path) as server:
        for model, shape in (("row", [1, 6]), ("rows", [3, 2])):
            output, content = described(server, model, numbers)
            assert (output["shape"], content) == (shape, numbers)
        output, content = described(server, "word", b"\0a word\xff")
        assert (output["shape"], content) == ([1, 1], b"\x08\0\0\0\0a word\xff")
        for model, sent, says in (("plane", numbers, "one variable-sized dimension"), ("row", bytes(7), "got 7"),
                                  ("words", b"a", "must have input shape [1]")):
            answer = ask(server, post(f"/v2/models/{model}/infer", sent, CLOSE, "Inference-Header-Content-Length: 0"))
            assert answer.startswith(b"HTTP/1.1 400 ") and says.encode() in answer


@pytest.mark.parametrize(("model", "sent", "status", "says"), [
    ("two", bytes(48), 400, "got 2 inputs in 'two'"), ("unknown", b"", 404, "unknown"),
    ("affine", bytes(15), 400, "Expected 16, got 15")])
def test_a_body_without_json_that_is_no_input_is_refused(server: RunningServer, model: str, sent: bytes, status: int,
                                                        says: str) -> None:
    answer = ask(server, post(f"/v2/models/{model}/infer", sent, CLOSE, "Inference-Header-Content-Length: 0"))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and says.encode() in answer


def test_a_handle_of_gpu_memory_that_is_no_base64_is_refused(server: RunningServer) -> None:
    for handle in ("a", "\u00e9"):
        body = json.dumps({"raw_handle": {"b64": handle}, "device_id": 0, "byte_size": 64}).encode()
        answer = ask(server, post("/v2/cudasharedmemory/region/g/register", body, CLOSE))
        assert answer.startswith(b"HTTP/1.1 400") and b"b64 is no Base64" in answer


def test_probes_say_in_their_body_what_clients_of_kserve_read_there(server: RunningServer) -> None:
    def said(path: str) -> tuple[bytes, Any]:
        answer = ask(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode())
        return answer[9:12], json.loads(answer.partition(b"\r\n\r\n")[2])
    assert said("/v2/health/live") == (b"200", {"live": True})
    assert said("/v2/models/affine/ready") == (b"200", {"name": "affine", "ready": True})
    status, body = said("/v2/health/ready")
    assert body == {"ready": status == b"200"}


def test_methods_and_paths_that_are_none_are_told_apart(server: RunningServer) -> None:
    def status(line: str) -> bytes:
        return ask(server, f"{line} HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode())
    assert status("GET /nothing").startswith(b"HTTP/1.1 404")
    wrong = status("DELETE /v2/models/affine")
    assert wrong.startswith(b"HTTP/1.1 405") and b"Allow: GET" in wrong
    assert status("GET /v2/models/affine/infer").startswith(b"HTTP/1.1 405")
    assert status("GET /v2/systemsharedmemory/status").startswith(b"HTTP/1.1 200")
    head = status("HEAD /v2")
    assert head.startswith(b"HTTP/1.1 200") and head.endswith(b"\r\n\r\n")
    assert status("GET /v2/models/%61ffine/ready").startswith(b"HTTP/1.1 200")
    assert status("GET http://here:80/v2/models/affine/ready").startswith(b"HTTP/1.1 200")
    for version in ("9" * 5000, "%D9%A1"):              # the latter a digit, too
        assert status(f"GET /v2/models/affine/versions/{version}/ready").startswith(b"HTTP/1.1 400")


def test_requests_sent_together_are_answered_in_their_order(server: RunningServer) -> None:
    bodies = [body_of(data=[i, 0, 0, 0]) for i in range(20)]
    together = b"".join(post("/v2/models/affine/infer", body) for body in bodies)
    answers = ask(server, together + post("/v2/models/affine/infer", body_of(data=[20, 0, 0, 0]), CLOSE))
    found = [json.loads(part.partition(b"\r\n\r\n")[2])["outputs"][0]["data"][0]
             for part in answers.split(b"HTTP/1.1 ")[1:]]
    assert found == [2.0 * i + 1 for i in range(21)]


def test_what_comes_behind_a_request_is_answered_behind_it_whatever_it_is(server: RunningServer) -> None:
    first, body = post("/v2/models/affine/infer", body_of()), body_of()
    refused = ask(server, first + first + b"no request\r\n\r\n")
    assert re.findall(rb"HTTP/1.1 (\d+)", refused) == [b"200", b"200", b"400"]
    upgrade = b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert re.findall(rb"HTTP/1.1 (\d+)", ask(server, first + upgrade * 2 + b"no request\r\n\r\n")) == [
        b"200", b"200", b"200", b"400"]
    expects = f"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\nExpect: 100-continue\r\n".encode()
    answers = ask(server, first + expects + f"Content-Length: {len(body)}\r\n\r\n".encode(), body)
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) in ([b"200", b"100", b"200"], [b"200", b"200"])


@pytest.mark.parametrize("model", ["affine", "large"])
def test_what_comes_behind_the_last_request_of_a_connection_does_not_reset_its_answer(
        server: RunningServer, model: str) -> None:
    values = np.ones((1, 4 if model == "affine" else 1 << 18), np.float32)
    head = json.dumps({"inputs": [{"name": "x", "shape": values.shape, "datatype": "FP32",
                                   "parameters": {"binary_data_size": values.nbytes}}],
                       "parameters": {"binary_data_output": True}}).encode()
    last = post(f"/v2/models/{model}/infer", head + values.tobytes(), CLOSE,
                f"Inference-Header-Content-Length: {len(head)}")
    for behind in (bytes(1 << 20), last, post("/v2/models/large/infer", bytes(1 << 20))[:1 << 19]):
        before = statistics(server, model).success.count
        with socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS) as connection:
            connection.sendall(last + behind)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))      # ConnectionResetError: it was
        assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1 ") == 1
        assert answer.endswith((values * 2 + 1).tobytes())
        assert statistics(server, model).success.count == before + 1


def test_nothing_is_said_behind_an_answer_at_once_that_was_the_last(
        server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    last = f"GET /nothing HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode()
    for behind in (b"no request\r\n\r\n", last):
        answer = ask(server, last + behind)
        assert answer.startswith(b"HTTP/1.1 404") and answer.count(b"HTTP/1.1 ") == 1
    assert not [record for record in caplog.records if record.name == "asyncio"], "it tells of what it catches"


def test_a_compressed_body_is_counted_by_what_it_becomes(server: RunningServer) -> None:
    request = HttpRequest("POST", "/", body=gzip.compress(bytes(9 << 20)))
    counted: list[int] = []
    assert asyncio.run(decompressed(request, "gzip", 9 << 20, counted.append)).body == bytes(9 << 20)
    assert len(counted) == 3 and sum(counted) == 9 << 20
    with pytest.raises(InvalidRequestError, match="no whole gzip"):
        asyncio.run(decompressed(request._replace(body=request.body[:-1]), "gzip", 9 << 20, counted.append))
    assert eventually(lambda: server.server._inflight.held_bytes == 0)


def test_a_shape_of_more_elements_than_64_bits_count_is_no_list_of_values() -> None:
    for shape in ((2**32, 2**32), (2**70, 1)):
        with pytest.raises(InvalidRequestError, match=f"expected {math.prod(shape)} values"):
            from_json(InputTensor("x", DATATYPES["FP32"], shape), [])


def test_a_body_in_pieces_and_one_that_waits_to_be_asked_for_are_taken(server: RunningServer) -> None:
    head = f"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n".encode()
    body = body_of()
    pieces = b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in (body[:10], body[10:], b""))
    assert b"HTTP/1.1 200" in ask(server, head + b"Transfer-Encoding: chunked\r\n\r\n", pieces)
    for codings in (b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked"):
        gzipped = head + b"Transfer-Encoding: " + codings + b"\r\n\r\n"
        assert b"'gzip, chunked' is not served" in ask(server, gzipped, pieces)
    asked = ask(server, head + f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode(), body)
    assert asked.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")


def post_large(values: np.ndarray[Any, Any], *headers: str) -> bytes:
    """A request of 1 MiB behind its JSON."""
    head = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, values.size],
                                   "parameters": {"binary_data_size": values.nbytes}}],
                       "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    return post("/v2/models/large/infer", head + values.tobytes(), f"Inference-Header-Content-Length: {len(head)}",
                *headers)


@pytest.mark.parametrize("cuts", [(), (70_000,), (40, 200_000, 200_001), (1_000_000,), (400, 1_048_900)])
def test_a_large_body_arrives_whole_however_it_is_cut_and_what_follows_it_is_the_next_request(
        server: RunningServer, cuts: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).random(1 << 18, np.float32)
    data = (post("/v2/models/affine/infer", body_of()) + post_large(values) + post_large(values + 1)
            + post("/v2/models/affine/infer", body_of(), CLOSE))
    with socket.create_connection(("127.0.0.1", server.ports.http), timeout=TIMEOUT_SECS) as connection:
        answers = connection.makefile("rb")
        for begin, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
            connection.sendall(data[begin:end])
            time.sleep(0.01)            # so that pieces come by themselves
        found = [answer_from(answers) for _ in range(4)]
    assert [json.loads(found[i])["outputs"][0]["data"] for i in (0, 3)] == [[3.0, 5.0, 7.0, 9.0]] * 2
    for answer, sent in ((found[1], values), (found[2], values + 1)):
        np.testing.assert_array_equal(np.frombuffer(answer[-sent.nbytes:], np.float32), sent * 2 + 1)


def answer_from(stream: BinaryIO) -> bytes:
    """The body of the next response."""
    lines = list(iter(stream.readline, b"\r\n"))
    assert b" 200 " in lines[0], lines
    return stream.read(next(int(line.split()[1]) for line in lines if line.lower().startswith(b"content-length")))


def test_a_client_that_leaves_within_a_large_body_holds_no_memory(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.ports.http), timeout=TIMEOUT_SECS) as connection:
        connection.sendall(post_large(np.ones(1 << 18, np.float32))[:-1])
        if not server.server._options.workers > 1:      # fronts count for themselves
            assert eventually(lambda: server.server._inflight.held_bytes > 1 << 20)
    assert eventually(lambda: server.server._inflight.held_bytes == 0)


def test_a_connection_keeps_no_body_that_was_received(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop's transports go on referring to what they wrote it by."""
    receivers: list[LargeBody] = []
    monkeypatch.setattr(connections, "LargeBody", lambda *given: receivers.append(LargeBody(*given)) or receivers[-1])
    with socket.create_connection(("127.0.0.1", server.ports.http), timeout=TIMEOUT_SECS) as connection:
        connection.sendall(post_large(np.ones(1 << 18, np.float32)))
        answer_from(connection.makefile("rb"))
        assert [len(one._body) for one in receivers] == [0] * (1 if server.server._options.workers == 1 else 0)


def test_what_is_no_http_and_headers_without_end_are_refused(server: RunningServer) -> None:
    assert ask(server, b"\x16\x03\x01\x02\x00 hello\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert ask(server, b"GET /v2 HTTP/1.1\r\n", b"X: " + b"y" * (1 << 20)).startswith(b"HTTP/1.1 431")
    many = b"".join(f"X{i}: yyyyyyyy\r\n".encode() for i in range(10_000))
    assert ask(server, b"GET /v2 HTTP/1.1\r\n" + many + b"\r\n").startswith(b"HTTP/1.1 431")


def test_a_client_that_sends_no_more_has_its_answers(server: RunningServer) -> None:
    one, interim = post("/v2/models/affine/infer", body_of()), b"HTTP/1.1 102 Processing\r\n\r\n"
    for sent, statuses in ((one, 1), (one * 3, 3), (post("/v2/models/affine/infer", body_of(), CLOSE), 1),
                           (one + b"nonsense\r\n\r\n", 2), (b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n", 1), (one[:-1], 0)):
        with socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))      # until the server closes, too
        assert answer.replace(interim, b"").count(b"HTTP/1.1 ") == statuses, sent
    with socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS) as connection:
        with GATES["http"].closed():
            connection.sendall(post("/v2/models/gated/infer", body_of()))
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(len(interim), socket.MSG_WAITALL) == interim, "whether it has gone is asked"
        assert b"HTTP/1.1 200" in b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_a_client_that_sends_no_more_within_a_body_has_the_answers_to_what_came_before(
        server: RunningServer, size: int) -> None:
    interim = b"HTTP/1.1 102 Processing\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS) as connection:
        with GATES["http"].closed():
            behind = post("/v2/models/large/infer", bytes(size))[:-1]
            connection.sendall(post("/v2/models/gated/infer", body_of()) + behind)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(len(interim), socket.MSG_WAITALL) == interim
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b"")).replace(interim, b"")
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1 ") == 1
    assert eventually(lambda: server.server._inflight.held_bytes == 0)


def test_a_client_of_http_1_0_is_told_that_its_connection_stays(server: RunningServer) -> None:
    """One that asked for it, and is not told, waits for its end."""
    def said(sent: bytes) -> list[bytes]:
        return re.findall(rb"Connection: ([a-z-]+)", ask(server, sent))
    old = post("/v2/models/affine/infer", body_of(), "Connection: Keep-Alive").replace(b"HTTP/1.1", b"HTTP/1.0")
    assert said(old + old + old.replace(b"Keep-Alive", b"close")) == [b"keep-alive", b"keep-alive", b"close"]
    new = post("/v2/models/affine/infer", body_of())
    assert said(new + new.replace(b"Host: x", CLOSE.encode())) == [b"close"]


def test_an_inference_whose_client_left_is_not_executed(server: RunningServer) -> None:
    def waiting() -> int:
        return server.server.repository.find("gated").pending
    with GATES["http"].closed():
        with socket.create_connection(("127.0.0.1", server.ports.http)) as first, \
                socket.create_connection(("127.0.0.1", server.ports.http)) as second:
            first.sendall(post("/v2/models/gated/infer", body_of()))
            assert GATES["http"].holds(1)
            second.sendall(post("/v2/models/gated/infer", body_of()))
            assert eventually(lambda: waiting() == 1)
        assert eventually(lambda: waiting() == 0)
    assert eventually(lambda: server.server._inflight.held_bytes == 0)


def test_a_client_that_reads_none_of_many_small_answers_is_disconnected(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each is less than what a client is given its time for by itself; together they would be all that may be held."""
    write_model(tmp_path, "large", shape=[1 << 16])
    asked = post_large(np.ones(1 << 16, np.float32))
    with serving(tmp_path, send_timeout_secs=0.2, max_inflight_bytes=32 << 20) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.ports.http))
        with suppress(ConnectionError):             # it may be before all of them are sent
            for _ in range(100):
                client.sendall(asked)
        assert eventually(lambda: "has not read its answer" in caplog.text)
        assert eventually(lambda: server.server._inflight.held_bytes == 0)


def test_a_client_that_reads_is_given_its_time_again_though_there_is_always_more_for_it() -> None:
    class Transport:
        unread = 0

        def set_write_buffer_limits(self, high: int) -> None:
            assert high == 0

        def write(self, data: bytes) -> None:
            self.unread += len(data)

        def get_write_buffer_size(self) -> int:
            return self.unread

    class Client:
        disconnected = False

        def peer(self) -> str:
            return "it"

        def disconnect(self) -> None:
            self.disconnected = True

    async def reads() -> None:
        transport, client, inflight = Transport(), Client(), Inflight(1 << 20, TIMEOUT_SECS)
        outlet = Outlet(transport, inflight, client)        # type: ignore[arg-type]
        due = 0
        for size, read, is_gone in ((100, 0, False), (50, 100, False), (10, 49, True)):
            outlet.write(bytes(size))
            outlet.sent(inflight.begin(client, size), size)
            transport.unread -= read
            outlet._look(due)                               # its time is over for what there was the time before
            assert client.disconnected == is_gone
            due += size
        outlet.taken()
        assert inflight.held_bytes == 0

    asyncio.run(reads())


@pytest.mark.parametrize("path", ["infer", "generate", "generate_stream"])
def test_what_was_answered_does_not_wait_for_the_garbage_collector(server: RunningServer, path: str) -> None:
    gc.collect()
    gc.disable()
    try:
        for body in (body_of(), b'{"x": [1, 2, 3, 4]}'):        # one is an error of each of the forms
            assert ask(server, post(f"/v2/models/affine/{path}", body, CLOSE))
        assert eventually(lambda: not any(type(one) is Exchange for one in gc.get_objects()))
    finally:
        gc.enable()


@pytest.mark.parametrize("front", ["grpcio", WORKERS[0]])
def test_who_leaves_while_a_model_is_loaded_for_it_leaves_no_body_behind(tmp_path: Path, front: str) -> None:
    write_model(tmp_path, "slow", gate="on demand", shape=[1 << 18])

    def bodies() -> list[int]:
        """How long they are that exchanges have. One that another thread is about to make has no request yet."""
        requests = [getattr(one, "request", None) for one in gc.get_objects() if type(one) is Exchange]
        return [len(request.body) for request in requests if request and request.body]

    gc.collect()                # those of tests before
    with serving(tmp_path, model_memory_bytes=1 << 30, grpc_front=front) as server, GATES["on demand"].closed():
        with socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS) as connection:
            connection.sendall(post("/v2/models/slow/infer", bytes(1 << 20)))
            assert GATES["on demand"].holds(1) and eventually(lambda: bodies() == [1 << 20])
        assert eventually(lambda: server.server._inflight.held_bytes == 0 and not bodies(), TIMEOUT_SECS / 2)


def test_who_connects_while_the_loop_is_busy_ending_is_refused_and_not_cut_off(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[socket.socket] = []
    refuse = Listeners._refuse

    async def meanwhile(stopping: Listeners) -> None:
        late.append(socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS))
        late[0].sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: here\r\n\r\n")
        await refuse(stopping)
    monkeypatch.setattr(Listeners, "_refuse", meanwhile)
    with serving(tmp_path, closed=frozenset({"grpc"})) as server:
        server.stop()
    with late[0]:
        assert late[0].recv(12) == b"HTTP/1.1 503"
