"""Tests of the restrictions on methods, and of encrypted connections."""
from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import uvloop
from tritonclient.utils import InferenceServerException

from infer_server import protos
from infer_server.endpoints.http import connection
from infer_server.endpoints.restrictions import CATEGORIES, parsed
from infer_server.endpoints.tls import ServerTls
from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import FRONTS, WORKERS, RunLoop, RunningServer, serving

SECRET = parsed([f"{','.join(CATEGORIES)}:key=sesame"])


@pytest.fixture(scope="module", params=FRONTS + WORKERS)
def restricted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "m")
    with serving(repository, explicit_control=True, load_models=None, allow_client_shm=True, grpc_secrets=SECRET,
                 http_secrets=SECRET, grpc_front=request.param) as running:
        yield running


def status(channel: grpc.Channel, service: str, method: protos.Method, metadata: Any) -> grpc.StatusCode:
    streams = method.server_streaming
    kind = "stream_stream" if method.client_streaming else "unary_stream" if streams else "unary_unary"
    multi = getattr(channel, kind)(f"/{service}/{method.name}")
    request = iter([b""]) if method.client_streaming else b""
    try:
        answer = multi(request, timeout=TIMEOUT_SECS, metadata=metadata)
        if streams:
            next(iter(answer))
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("metadata", [(), (("triton-grpc-protocol-key", "sesam"),), (("key", "sesame"),)],
                         ids=["no header", "a wrong value", "another header"])
def test_without_the_secret_no_call_over_grpc_succeeds(restricted: RunningServer, metadata: Any) -> None:
    with grpc.insecure_channel(restricted.address) as channel:
        for service in (protos.INFERENCE_SERVICE, protos.HEALTH_SERVICE):
            for method in protos.methods(service):
                actual = status(channel, service, method, metadata)
                assert actual is grpc.StatusCode.PERMISSION_DENIED, method.name
        assert restricted.server.repository.models(), "nothing was unloaded"


def test_without_the_secret_no_call_over_http_succeeds(restricted: RunningServer) -> None:
    def ask(method: str, path: str, **headers: str) -> tuple[int, bytes]:
        with closing(HTTPConnection("127.0.0.1", restricted.ports.http, timeout=TIMEOUT_SECS)) as connection:
            connection.request(method, path, headers=headers)
            with connection.getresponse() as response:
                return response.status, response.read()

    for method, path in (
            ("GET", "/"), ("GET", "/v2"), ("GET", "/v2/health/live"), ("GET", "/v2/health/ready"),
            ("GET", "/v2/models/stats"),
            ("GET", "/v2/models/m"), ("GET", "/v2/models/m/ready"), ("GET", "/v2/models/m/config"),
            ("GET", "/v2/models/m/versions/1/stats"), ("POST", "/v2/models/m/infer"),
            ("POST", "/v2/models/m/generate"), ("POST", "/v2/models/m/generate_stream"),
            ("POST", "/v2/repository/index"),
            ("POST", "/v2/repository/models/m/load"), ("POST", "/v2/repository/models/m/unload"),
            ("GET", "/v2/trace/setting"), ("POST", "/v2/models/m/trace/setting"), ("POST", "/v2/logging"),
            ("GET", "/v2/systemsharedmemory/status"), ("POST", "/v2/systemsharedmemory/region/r/register"),
            ("POST", "/v2/systemsharedmemory/unregister"), ("POST", "/v2/cudasharedmemory/unregister"),
            # and spelled otherwise
            ("HEAD", "/v2/models/m"), ("GET", "/?x"), ("GET", "/v2/"), ("POST", "/v2/models/m/%69nfer"),
            ("POST", "/v2/models/m/infer?x=1"), ("POST", "/%76%32/repository/models/m/unload"),
            ("POST", "/v2/repository/x/models/m/unload"), ("POST", "/v2/repository/models/m/unload?key=sesame"),
            ("POST", "http://x/v2/repository/models/m/unload")):
        for headers in ({}, {"key": "Sesame"}):
            actual, body = ask(method, path, **headers)
            assert actual == 403 and (method == "HEAD" or "'key'" in json.loads(body)["error"]), path
    for path in ("//v2/repository/models/m/unload", "/V2/repository/models/m/unload",
                 "/v2/./repository/models/m/unload", "/v2/repository/models/m/unload/"):
        assert ask("POST", path)[0] == 404, path
    assert ask("GET", "/v2/models/m", Key="sesame")[0] == 200


def test_a_secret_over_http_may_have_any_letters(tmp_path: Path) -> None:
    with serving(tmp_path, http_secrets=parsed(["metadata:key=s\u00e9same"])) as running:
        for given, expected in (("s\u00e9same", 200), ("sesame", 403), ("s\u00e9s\u00e0me", 403)):
            with closing(HTTPConnection("127.0.0.1", running.ports.http, timeout=TIMEOUT_SECS)) as connection:
                connection.request("GET", "/v2", headers={"key": given.encode()})
                assert connection.getresponse().status == expected, given


def test_with_the_secret_every_call_is_as_ever(restricted: RunningServer) -> None:
    with triton.InferenceServerClient(restricted.address) as client:
        headers = {"triton-grpc-protocol-key": "sesame"}
        assert client.is_server_ready(headers=headers)
        client.unload_model("m", headers=headers)
        client.load_model("m", headers=headers)
        assert client.is_model_ready("m", headers=headers)


@pytest.mark.parametrize("text", ["inference", "inference:key", "inference:=x", "all:key=x", ":key=x"])
def test_a_restriction_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parsed([text])
    with pytest.raises(ValueError, match="twice"):
        parsed(["trace:a=b", "trace,health:c=d"])
    assert parsed(["trace:A=b=c"])["trace"].value == "b=c" and "b=c" not in str(parsed(["trace:A=b=c"]))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with self-signed certificates for server and client: NAME.pem and NAME.key."""
    folder = tmp_path_factory.mktemp("certificates")
    if not shutil.which("openssl"):
        pytest.skip("there is no openssl to make certificates with")
    for name in ("server", "client"):
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                        "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2",
                        "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"],
                       check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("front", FRONTS + WORKERS)
@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mutual tls"])
def test_ports_are_encrypted_and_may_ask_for_certificates(
        tmp_path: Path, certificates: Path, mutual: bool, front: str) -> None:
    write_model(tmp_path, "m")
    write_model(tmp_path, "large", shape=[1 << 16])
    server, client = certificates / "server", certificates / "client"
    tls = ServerTls(server.with_suffix(".pem"), server.with_suffix(".key"),
                    client.with_suffix(".pem") if mutual else None)
    with serving(tmp_path, grpc_tls=tls, http_tls=tls, grpc_front=front) as running:
        def live_over_grpc(**given: str) -> bool:
            with triton.InferenceServerClient(running.address, ssl=True, root_certificates=f"{server}.pem",
                                              **given) as connected:
                return bool(connected.is_server_live(client_timeout=TIMEOUT_SECS))

        def live_over_http(own: bool) -> bool:
            context = ssl.create_default_context(cafile=f"{server}.pem")
            if own:
                context.load_cert_chain(f"{client}.pem", f"{client}.key")
            with urlopen(f"https://127.0.0.1:{running.ports.http}/v2/health/live", context=context) as answer:
                return bool(answer.status == 200)

        def infers_over_http() -> bool:
            values = np.arange(1 << 16, dtype=np.float32)
            head = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, values.size],
                                           "parameters": {"binary_data_size": values.nbytes}}],
                               "parameters": {"binary_data_output": True}}).encode()
            calls = Request(f"https://127.0.0.1:{running.ports.http}/v2/models/large/infer", head + values.tobytes(),
                            {"Inference-Header-Content-Length": str(len(head))})
            with urlopen(calls, context=ssl.create_default_context(cafile=f"{server}.pem")) as answer:
                return np.array_equal(np.frombuffer(answer.read()[-values.nbytes:], np.float32), values * 2 + 1)

        assert live_over_grpc(private_key=f"{client}.key", certificate_chain=f"{client}.pem") and live_over_http(True)
        if mutual:
            with pytest.raises(InferenceServerException):
                live_over_grpc()
            with pytest.raises(OSError):
                live_over_http(False)
        else:
            assert live_over_grpc() and live_over_http(False) and infers_over_http()
        with closing(HTTPConnection("127.0.0.1", running.ports.http, timeout=TIMEOUT_SECS)) as connection, \
                pytest.raises((OSError, HTTPException)):
            connection.request("GET", "/v2/health/live")
            connection.getresponse()


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_what_comes_behind_the_last_request_over_tls_does_not_reset_its_answer(
        tmp_path: Path, certificates: Path, run: RunLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_SILENCE_SECS", 2.0)       # the client may be kept from running meanwhile,
    monkeypatch.setattr(connection, "_LINGER_SECS", TIMEOUT_SECS)       # and takes its time to send
    tls = ServerTls(certificates / "server.pem", certificates / "server.key")
    context = ssl.create_default_context(cafile=certificates / "server.pem")
    last = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    begun = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n"
    clients: list[tuple[ssl.SSLSocket, int]] = []
    with serving(tmp_path, run=run, http_tls=tls) as running, ExitStack() as stack:
        for data, status in ((last, 200), (last + bytes(8 << 20), 200), (last + begun + bytes(8 << 20), 200),
                             (b"no request\r\n\r\n" + bytes(8 << 20), 400)):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", running.ports.http), TIMEOUT_SECS))
            client = stack.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))
            client.sendall(data)                    # ConnectionResetError, BrokenPipeError: it was
            clients.append((client, status))
        for client, status in clients:              # which are silent at the same time
            answer = b"".join(iter(partial(client.recv, 1 << 16), b""))
            assert answer.startswith(b"HTTP/1.1 %d" % status) and answer.count(b"HTTP/1.1 ") == 1


@contextmanager
def asked_for_much(folder: Path, certificates: Path, run: RunLoop, header: str,
                   **given: Any) -> Iterator[tuple[RunningServer, ssl.SSLSocket]]:
    """Yield a server and a TLS client that has requested 16 MiB, more than socket buffers hold."""
    values = np.zeros(4 << 20, np.float32)
    write_model(folder, "large", shape=[values.size], max_batch=1)
    head = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, values.size],
                                   "parameters": {"binary_data_size": values.nbytes}}],
                       "parameters": {"binary_data_output": True}}).encode()
    requested = (f"POST /v2/models/large/infer HTTP/1.1\r\n{header}\r\nContent-Length: {len(head) + values.nbytes}\r\n"
                 f"Inference-Header-Content-Length: {len(head)}\r\n\r\n").encode() + head + values.tobytes()
    tls = ServerTls(certificates / "server.pem", certificates / "server.key")
    context = ssl.create_default_context(cafile=certificates / "server.pem")
    with serving(folder, run=run, http_tls=tls, **given) as running, socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.settimeout(TIMEOUT_SECS)
        plain.connect(("127.0.0.1", running.ports.http))
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            connection.sendall(requested)
            yield running, connection


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_an_answer_over_tls_is_held_until_its_client_reads_it(
        tmp_path: Path, certificates: Path, run: RunLoop, caplog: pytest.LogCaptureFixture) -> None:
    with asked_for_much(tmp_path, certificates, run, "Host: x", send_timeout_secs=0.2) as (running, _):
        assert eventually(lambda: "has not read its answer" in caplog.text)
        assert eventually(lambda: running.server._inflight.held_bytes == 0)


def test_the_end_of_a_connection_over_tls_leaves_its_client_the_time_to_read_the_answer(
        tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.constants.SSL_SHUTDOWN_TIMEOUT", 0.01)
    with asked_for_much(tmp_path, certificates, asyncio.run, "Connection: close",
                        send_timeout_secs=TIMEOUT_SECS) as (_, connection):
        begun = connection.recv(1 << 10)
        time.sleep(0.1)                 # after which the answer would be cut off
        assert len(begun) + sum(map(len, iter(lambda: connection.recv(1 << 16), b""))) > 16 << 20


def test_certificates_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("no certificate")
    tls = ServerTls(tmp_path / "x.pem", tmp_path / "x.pem")
    for created in (tls.grpc_credentials, tls.context):
        with pytest.raises(OSError, match=r"certificates cannot be used .*x\.pem"):
            created()
