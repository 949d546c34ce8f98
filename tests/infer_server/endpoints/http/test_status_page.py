"""The page that shows models, their states and their batches."""
from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import tritonclient.http as triton

from tests.infer_server.endpoints.http.plain import CLOSE, ask
from tests.infer_server.endpoints.http.test_inference import X, tensor
from tests.infer_server.numpy_engine import write_model
from tests.infer_server.serving import RunningServer, serving


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
