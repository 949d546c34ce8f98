"""Tests of retries: of streams that no server processed, and by the service config."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infer_server.clients.channels import StatusError
from infer_server.clients.channels.retry import Attempts, Throttle
from infer_server.clients.channels.service_config import MethodConfig, RetryPolicy, ServiceConfig
from infer_server.clients.errors import DeadlineExceededError, InvalidRequestError, ServerError, ServerUnavailableError
from infer_server.protos import http2
from tests.clients.channels.peers import KINDS, Peer, client_of, scripted
from tests.clients.server import TIMEOUT_SECS

pytestmark = pytest.mark.skipif(not http2.is_installed, reason="ngh2 is not installed")
UNAVAILABLE, INTERNAL, INVALID_ARGUMENT = 14, 13, 3


def config(**policy: Any) -> dict[str, Any]:
    return {"methodConfig": [{"name": [{}], "retryPolicy": {"initialBackoff": "0.001s", **policy}}]}


def failing(times: int, fail: Callable[[Peer, int], object]) -> Callable[[Peer, int, dict[bytes, bytes]], None]:
    """Return a handler that fails the first `times` calls of all connections, and answers the others."""
    left = [times]

    def handle(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
        left[0] -= 1
        if left[0] >= 0:
            fail(peer, stream)
        else:
            peer.answer(stream)

    return handle


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fail", [
    lambda peer, stream: peer.http2.reset_stream(stream, http2.ErrorCode.REFUSED_STREAM),
    lambda peer, stream: peer.http2.send_goaway(last_stream_id=max(0, stream - 2))], ids=["reset", "goaway"])
def test_a_call_that_no_server_processed_is_made_again_without_a_policy(kind: str, fail: Any) -> None:
    with scripted(failing(3, fail)) as (url, server), client_of(kind, url) as client:
        assert client.is_server_live(timeout=TIMEOUT_SECS)
        assert len(server.requests) == 4
        assert not any(b"grpc-previous-rpc-attempts" in request for request in server.requests)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_refuses_every_stream_is_unavailable_in_the_end(kind: str) -> None:
    with (scripted(failing(1 << 30, lambda peer, stream: peer.http2.reset_stream(stream, 7))) as (url, _),
          client_of(kind, url) as client, pytest.raises(ServerUnavailableError, match="HTTP/2 error 7")):
        client.is_server_live(timeout=TIMEOUT_SECS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_connection_that_goes_away_serves_its_calls_and_the_next_have_another(kind: str) -> None:
    def handle(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
        if peer.number == 0 and peer.calls == 1:
            peer.http2.send_goaway()                        # after this stream
        peer.answer(stream)

    with scripted(handle) as (url, server), client_of(kind, url) as client:
        assert all(client.is_server_live(timeout=TIMEOUT_SECS) for _ in range(3))
        assert [peer.calls for peer in server.peers] == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fail", [
    lambda peer, stream: peer.fail(stream, UNAVAILABLE), lambda peer, stream: peer.answer(stream, b"", UNAVAILABLE),
    lambda peer, stream: peer.socket.close()], ids=["trailers", "after a message", "cut"])
def test_the_policy_says_how_often_a_failure_is_retried(kind: str, fail: Any) -> None:
    for times, max_attempts in ((2, 3), (3, 3)):
        with (scripted(failing(times, fail)) as (url, server),
              client_of(kind, url, service_config=config(maxAttempts=max_attempts)) as client):
            if times < max_attempts:
                assert client.is_server_live(timeout=TIMEOUT_SECS)
            else:
                with pytest.raises(ServerUnavailableError):
                    client.is_server_live(timeout=TIMEOUT_SECS)
            assert [request.get(b"grpc-previous-rpc-attempts") for request in server.requests] == [None, b"1", b"2"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_policy_does_not_name_is_not_retried(kind: str) -> None:
    with (scripted(failing(1, lambda peer, stream: peer.fail(stream, INVALID_ARGUMENT))) as (url, server),
          client_of(kind, url, service_config=config()) as client):
        with pytest.raises(InvalidRequestError):
            client.is_server_live(timeout=TIMEOUT_SECS)
        assert len(server.requests) == 1
    with scripted(failing(1, lambda peer, stream: peer.fail(stream, UNAVAILABLE))) as (url, server):
        with client_of(kind, url) as client, pytest.raises(ServerUnavailableError):
            client.is_server_live(timeout=TIMEOUT_SECS)
        assert len(server.requests) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_may_say_that_a_call_is_not_to_be_repeated(kind: str) -> None:
    with (scripted(failing(1, lambda peer, stream: peer.fail(
            stream, UNAVAILABLE, (b"grpc-retry-pushback-ms", b"-1")))) as (url, server),
          client_of(kind, url, service_config=config()) as client):
        with pytest.raises(ServerUnavailableError):
            client.is_server_live(timeout=TIMEOUT_SECS)
        assert len(server.requests) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_timeout_of_a_method_ends_its_retries(kind: str) -> None:
    document = config(maxAttempts=5, initialBackoff="600s", maxBackoff="600s")
    with (scripted(failing(9, lambda peer, stream: peer.fail(stream, UNAVAILABLE))) as (url, server),
          client_of(kind, url, service_config=document) as client, pytest.raises(ServerUnavailableError)):
        client.is_server_live(timeout=TIMEOUT_SECS)             # the wait would be over it
    document["methodConfig"][0]["timeout"] = "0.02s"
    with (scripted(lambda *_: None) as (url, server), client_of(kind, url, service_config=document) as client,
          pytest.raises(DeadlineExceededError)):
        client.is_server_live()


@pytest.mark.parametrize("transport", ["nghttp2", "grpcio"])
@pytest.mark.parametrize("kind", KINDS)
def test_grpcio_takes_the_same_config(kind: str, transport: str) -> None:
    for times, succeeds in ((2, True), (4, False)):
        with (scripted(failing(times, lambda peer, stream: peer.fail(stream, INTERNAL))) as (url, server),
              client_of(kind, url, transport=transport,
                        service_config=config(maxAttempts=3, retryableStatusCodes=["INTERNAL"],
                                              initialBackoff="0.05s")) as client):       # grpcio hangs after 1 ms
            if succeeds:
                assert client.is_server_live(timeout=TIMEOUT_SECS)
            else:
                with pytest.raises(ServerError):
                    client.is_server_live(timeout=TIMEOUT_SECS)
            assert len(server.requests) == 3


# ---- without a server
POLICY = RetryPolicy(3, 0.1, 0.25, 2.0, frozenset({"UNAVAILABLE"}))
FAILED = StatusError("UNAVAILABLE", "")


def test_backoff_grows_to_its_most_with_a_fifth_of_jitter() -> None:
    policy = RetryPolicy(5, 0.1, 0.25, 2.0, frozenset({"UNAVAILABLE"}))
    attempts = Attempts(MethodConfig(retry=policy), Throttle(ServiceConfig.read({})), None)
    for expected in (0.1, 0.2, 0.25, 0.25):
        assert 0.8 * expected <= attempts.wait_after(FAILED) <= 1.2 * expected
    with pytest.raises(StatusError):
        attempts.wait_after(FAILED)
    pushed = StatusError("UNAVAILABLE", "", pushback_secs=7.0)
    assert Attempts(MethodConfig(retry=POLICY), Throttle(ServiceConfig.read({})), None).wait_after(pushed) == 7.0


def test_retries_stop_while_half_of_the_tokens_are_gone() -> None:
    throttle = Throttle(ServiceConfig.read({"retryThrottling": {"maxTokens": 4, "tokenRatio": 0.5}}))

    def is_retried() -> bool:
        try:
            Attempts(MethodConfig(retry=POLICY), throttle, None).wait_after(FAILED)
        except StatusError:
            return False
        return True

    assert [is_retried() for _ in range(3)] == [True, False, False]     # 3, 2 and 1 tokens
    for _ in range(5):
        throttle.succeeded()
    assert [is_retried() for _ in range(2)] == [True, False]            # 2.5 and 1.5 tokens


def test_a_method_has_its_own_settings_those_of_its_service_or_those_of_all() -> None:
    read = ServiceConfig.read("""{"methodConfig": [
        {"name": [{"service": "s", "method": "m"}], "timeout": "1.5s"},
        {"name": [{"service": "s"}, {"service": "t"}], "retryPolicy": {"maxAttempts": 9}},
        {"name": [{}], "timeout": "3s"}]}""")
    assert read.method("/s/m") == MethodConfig(1.5, None)
    policy = RetryPolicy(5, 0.1, 1.0, 2.0, frozenset({"UNAVAILABLE"}))          # more than five are five
    assert read.method("/s/n") == read.method("/t/m") == MethodConfig(None, policy)
    assert read.method("/u/m") == MethodConfig(3.0, None)
    assert ServiceConfig.read({}).method("/u/m") == MethodConfig(None, None)


@pytest.mark.parametrize(("document", "message"), [
    ("{", "Expecting property name"), ({"methodConfigs": []}, "no field 'methodConfigs'; there are methodConfig"),
    ({"methodConfig": [{"timeout": "1s"}]}, "name"),
    ({"methodConfig": [{"name": [{}], "timeout": "1"}]}, "timeout '1' is not a duration"),
    ({"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 1}}]}, "maxAttempts 1 is not a whole number"),
    ({"methodConfig": [{"name": [{}], "retryPolicy": {"backoffMultiplier": 0}}]}, "backoffMultiplier 0 is not above"),
    ({"methodConfig": [{"name": [{}], "retryPolicy": {"retryableStatusCodes": ["OOPS"]}}]}, "OOPS"),
    ({"methodConfig": [{"name": [{}], "retryPolicy": {"hedging": 1}}]}, "no field 'hedging'"),
    ({"retryThrottling": {"maxTokens": 0, "tokenRatio": 1}}, "maxTokens 0 is not above 0")])
def test_a_config_that_makes_no_sense_is_refused(document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"service config: .*{message}"):
        ServiceConfig.read(document)
