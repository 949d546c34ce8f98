"""Requests are parsed alike, however the received bytes are divided."""
from __future__ import annotations

from typing import Any

import pytest

from infer_server.endpoints.http import reading
from infer_server.endpoints.http.messages import HttpRequest
from infer_server.endpoints.http.reading import PortLimits, RefusedError, RequestReader
from infer_server.endpoints.inflight import OpenCall
from infer_server.errors import MemoryLimitError

POST = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
WHOLE = POST + b"one!", POST + b"two!", POST + b"\r\n\r\n"
OTHERS = (
    b"POST /other HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nfour", b"GET /v2 HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nfive\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\nfive",
    b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n", b"\r\n\r\nGET /v2 HTTP/1.1\r\n\r\n")


class Counted:
    """Stand-in for an Inflight."""
    most = max_partial_bytes = 1 << 20

    def check_capacity(self, count: int) -> None:
        if count > self.most:
            raise MemoryLimitError("no room")

    def begin(self, client: Any, count: int) -> OpenCall:
        if count > self.most:
            raise MemoryLimitError("no room")
        return OpenCall(client, count)

    def hold(self, call: OpenCall, count: int) -> None:
        call.held_bytes += count

    receive = hold

    def complete(self, call: OpenCall) -> None: ...

    def end(self, call: OpenCall) -> None: ...


class Received:
    """Receiver of parsed requests, with the bytes counted for each and whether the connection stays open."""

    def __init__(self) -> None:
        self.requests: list[tuple[HttpRequest, int, bool]] = []
        self.inflight, self.asked_for = Counted(), 0
        limits = PortLimits(1 << 20, self.inflight)     # type: ignore[arg-type]
        self.reader = RequestReader(limits, self)       # type: ignore[arg-type]

    def received(self, request: HttpRequest, open_call: OpenCall, keep_alive: bool) -> None:
        assert request.received_ns > 0
        self.requests.append((request._replace(received_ns=0), open_call.held_bytes, keep_alive))

    def go_on(self) -> None:
        self.asked_for += 1

    @property
    def is_full(self) -> bool:
        return False

    def watch(self, secs: float | None) -> None:
        self.watched = secs


def parsed(*pieces: bytes) -> tuple[list[tuple[HttpRequest, int, bool]], int]:
    """Return the parsed requests, and the number of "100 Continue" responses."""
    actual = Received()
    for piece in pieces:
        actual.reader.feed(piece)
    return actual.requests, actual.asked_for


def each_parsed_alone(*requests: bytes) -> tuple[list[tuple[HttpRequest, int, bool]], int]:
    actual = [parsed(request) for request in requests]
    return [request for requests, _ in actual for request in requests], sum(requested for _, requested in actual)


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list to which every piece of data that reaches the parser is appended."""
    feed, seen = RequestReader._feed, list[bytes]()

    def recorded(reader: RequestReader, data: bytes) -> None:
        seen.append(data)
        feed(reader, data)

    monkeypatch.setattr(RequestReader, "_feed", recorded)
    return seen


def test_what_comes_again_with_another_body_is_not_parsed_again(parsers: list[bytes]) -> None:
    expected = each_parsed_alone(*WHOLE)
    parsers.clear()
    assert parsed(*WHOLE) == expected
    assert parsers == [WHOLE[0]]


@pytest.mark.parametrize("other", OTHERS)
def test_one_that_differs_is(parsers: list[bytes], other: bytes) -> None:
    if b"close" in other or b"1.0" in other:            # is the last
        assert parsed(WHOLE[0], other) == each_parsed_alone(WHOLE[0], other)
        return
    sent = WHOLE[0], other, WHOLE[1], other, other, WHOLE[2]
    assert parsed(*sent) == each_parsed_alone(*sent)


@pytest.mark.parametrize("size", [1, 2, 7, 60, len(POST), len(WHOLE[0]), len(WHOLE[0]) + 1, 1000])
def test_so_is_what_comes_in_other_pieces(size: int) -> None:
    stream = b"".join((*WHOLE, OTHERS[0], WHOLE[0], OTHERS[2], WHOLE[1]))
    pieces = [stream[at:at + size] for at in range(0, len(stream), size)]
    expected, _ = each_parsed_alone(*WHOLE, OTHERS[0], WHOLE[0], OTHERS[2], WHOLE[1])
    assert parsed(*pieces)[0] == parsed(WHOLE[0], *pieces)[0][1:] == expected


def test_what_looks_like_a_request_may_be_a_body() -> None:
    holder = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(WHOLE[1])
    (_, (request, *_), _), _ = parsed(WHOLE[0], holder, WHOLE[1], WHOLE[2])
    assert request.path == "/" and request.body == WHOLE[1]


def test_one_that_comes_again_is_counted_too() -> None:
    actual = Received()
    actual.reader.feed(WHOLE[0])
    actual.inflight.most = 3
    with pytest.raises(RefusedError):
        actual.reader.feed(WHOLE[1])


def test_long_heads_are_not_kept(parsers: list[bytes]) -> None:
    long = POST[:-2] + b"X: " + b"y" * reading._MAX_CACHED_HEAD_BYTES + b"\r\n\r\nbody"
    assert len(parsed(long, long)[0]) == 2 and parsers == [long, long]
