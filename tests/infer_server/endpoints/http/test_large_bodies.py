"""Tests of request bodies that are received into buffers of their own."""
from __future__ import annotations

import json
import socket
import time

import numpy as np
import pytest

from infer_server.endpoints.http import connection as connections
from infer_server.endpoints.http.transports import LargeBody
from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.infer_server.endpoints.http.plain import CLOSE, answer_from, body_of, post, post_large
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import RunningServer


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
        actual = [answer_from(answers) for _ in range(4)]
    assert [json.loads(actual[i])["outputs"][0]["data"] for i in (0, 3)] == [[3.0, 5.0, 7.0, 9.0]] * 2
    for answer, sent in ((actual[1], values), (actual[2], values + 1)):
        np.testing.assert_array_equal(np.frombuffer(answer[-sent.nbytes:], np.float32), sent * 2 + 1)


def test_a_client_that_leaves_within_a_large_body_holds_no_memory(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.ports.http), timeout=TIMEOUT_SECS) as connection:
        connection.sendall(post_large(np.ones(1 << 18, np.float32))[:-1])
        if not server.server._options.workers > 1:      # workers count for themselves
            assert eventually(lambda: server.server._inflight.held_bytes > 1 << 20)
    assert eventually(lambda: server.server._inflight.held_bytes == 0)


def test_a_connection_keeps_no_body_that_was_received(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """References remain in uvloop's transports to the buffers that they last received into."""
    receivers: list[LargeBody] = []
    monkeypatch.setattr(connections, "LargeBody", lambda *given: receivers.append(LargeBody(*given)) or receivers[-1])
    with socket.create_connection(("127.0.0.1", server.ports.http), timeout=TIMEOUT_SECS) as connection:
        connection.sendall(post_large(np.ones(1 << 18, np.float32)))
        answer_from(connection.makefile("rb"))
        assert [len(one._body) for one in receivers] == [0] * (1 if server.server._options.workers == 1 else 0)
