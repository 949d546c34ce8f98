"""Tests of request bodies: JSON, JSON and binary data, raw binary, compressed and chunked."""
from __future__ import annotations

import gzip
import json
import math
import re
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer_server.errors import InvalidRequestError, TooLargeError
from infer_server.protocol.codec import DATATYPES, InputTensor
from infer_server.protocol.compression import inflated
from infer_server.protocol.json_tensors import from_json
from infer_server.workers import run_steps
from tests.infer_server.endpoints.http.plain import CLOSE, ask, body_of, post
from tests.infer_server.endpoints.http.test_inference import X
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import RunningServer, serving

ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(
            "y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())])
                for request in requests]
"""


@pytest.mark.parametrize(("body", "headers", "status", "said"), [
    (b"{", (), 400, "failed to parse"), (b"[]", (), 400, "not a JSON object"),
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
    (gzip.compress(bytes(3 << 20)), ("Content-Encoding: gzip",), 413, "when it is decompressed"),
    (body_of(), ("Content-Encoding: gzip",), 400, "is not valid gzip"),
    (body_of(), ("Content-Encoding: br",), 501, "'br'"),
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
def test_every_body_is_answered_with_a_status(server: RunningServer, version: str, body: bytes,
                                              headers: tuple[str, ...], status: int, said: str) -> None:
    if version == "HTTP/2" and "Upgrade: h2c" in headers:
        pytest.skip("HTTP/2 has no Upgrade")
    answer = ask(server, post("/v2/models/affine/infer", body, CLOSE, *headers))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and said.encode() in answer


def described(server: RunningServer, model: str, sent: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the description of the response's only output, and that output's bytes."""
    answer = ask(server, post(f"/v2/models/{model}/infer", sent, CLOSE, "Inference-Header-Content-Length: 0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"Inference-Header-Content-Length: (\d+)", head)
    assert head.startswith(b"HTTP/1.1 200 ") and length is not None, answer
    (output,) = json.loads(body[:int(length[1])])["outputs"]
    return output, body[int(length[1]):]


@pytest.mark.usefixtures("version")
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


@pytest.mark.usefixtures("version")
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


def test_a_compressed_body_is_counted_by_what_it_becomes(server: RunningServer) -> None:
    counted: list[int] = []
    sent = gzip.compress(bytes(9 << 20))
    assert run_steps(inflated(sent, "gzip", 9 << 20, counted.append)) == bytes(9 << 20)
    assert len(counted) == 18 and sum(counted) == 9 << 20
    for body, says in ((sent[:-1], "ends within its gzip stream"), (sent + b"x", "1 bytes after the end"),
                       (sent + sent, f"{len(sent)} bytes after the end")):
        with pytest.raises(InvalidRequestError, match=says):
            run_steps(inflated(body, "gzip", 9 << 20, counted.append))
    with pytest.raises(TooLargeError):
        run_steps(inflated(sent, "gzip", (9 << 20) - 1, counted.append))
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
    requested = ask(server, head + f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode(), body)
    assert requested.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
