"""Web pages of other sites cannot change the server, by DNS rebinding or by cross-site requests."""
from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest
import tritonclient.http as triton

from infer_server.endpoints.restrictions import HostCheck
from infer_server.errors import ContentTypeError, RestrictedError
from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.http.plain import CLOSE, ask, body_of
from tests.infer_server.serving import WORKERS, RunningServer, serving

CHANGES = ("/v2/repository/models/m/load", "/v2/repository/models/m/unload", "/v2/logging", "/v2/trace/setting",
           "/v2/models/m/trace/setting", "/v2/systemsharedmemory/region/r/register",
           "/v2/systemsharedmemory/unregister", "/v2/cudasharedmemory/region/r/register",
           "/v2/cudasharedmemory/unregister")


@pytest.fixture(scope="module", params=("grpcio", WORKERS[0]))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "m")
    with serving(repository, explicit_control=True, load_models=None, grpc_front=request.param,
                 allowed_hosts=("infer.example.org", "*.internal.example")) as running:
        yield running


def status(server: RunningServer, path: str, *headers: str, body: bytes = b"{}", method: str = "POST") -> int:
    lines = [f"{method} {path} HTTP/1.1", *headers, f"Content-Length: {len(body)}", CLOSE]
    return int(ask(server, ("\r\n".join(lines) + "\r\n\r\n").encode() + body).split()[1])


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize(("headers", "refused"), [
    (("Host: evil.example",), 403), (("Host: evil.example:8000", "Origin: http://evil.example:8000"), 403),
    (("Host: localhost:8000", "Origin: http://evil.example"), 403), (("Host: localhost", "Origin: null"), 403),
    (("Host: localhost", "Content-Type: application/x-www-form-urlencoded", "Referer: http://evil.example/x"), 403),
    (("Host: localhost", "Sec-Fetch-Site: cross-site"), 403),
    (("Host: localhost", "Content-Type: text/plain;charset=UTF-8"), 415),
    (("Host: localhost", "Content-Type: Multipart/Form-Data; boundary=x"), 415)])
def test_a_call_for_a_foreign_page_is_refused(
        server: RunningServer, path: str, headers: tuple[str, ...], refused: int) -> None:
    assert status(server, path, *headers) == refused


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize("headers", [
    ("Host: localhost:8000",), ("Host: LOCALHOST.",), ("Host: 127.0.0.1:8000",), ("Host: [::1]:8000",),
    ("Host: 10.1.2.3",), ("Host: infer-server:8000",), ("Host: infer-server.prod.svc.cluster.local:8000",),
    ("Host: infer.example.org",), ("Host: a.b.internal.example:80",),
    ("Host: localhost", "Content-Type: application/x-www-form-urlencoded"),
    ("Host: localhost:8000", "Origin: http://localhost:8000", "Sec-Fetch-Site: same-origin"),
    ("Host: 10.1.2.3", "Origin: https://infer.example.org"),
    ("Host: localhost", "Content-Type: application/json", "Sec-Fetch-Site: none")])
def test_clients_and_proxies_are_served(server: RunningServer, headers: tuple[str, ...]) -> None:
    assert status(server, "/v2/logging", *headers) == 200


@pytest.mark.usefixtures("version")
def test_what_changes_nothing_is_served_under_any_name(server: RunningServer) -> None:
    foreign = ("Host: evil.example", "Origin: http://evil.example")
    for path in ("/", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/m/ready", "/v2/models/m/config"):
        assert status(server, path, *foreign, body=b"", method="GET") == 200
    assert status(server, "/v2/repository/index", *foreign) == 200
    assert status(server, "/v2/models/m/infer", *foreign, body=body_of()) == 200


def test_tritons_client_and_pythons_change_the_server(server: RunningServer) -> None:
    address = f"127.0.0.1:{server.ports.http}"
    with triton.InferenceServerClient(address) as client:
        client.load_model("m")
        client.update_log_settings({"log_verbose_level": 0})
        client.update_trace_settings("m", {"trace_rate": "1000"})
    for data in (b"{}", b""):       # as a form, by default, like `curl -d`
        request = urllib.request.Request(f"http://{address}/v2/repository/models/m/load", data=data, method="POST")
        assert urllib.request.urlopen(request, timeout=TIMEOUT_SECS).status == 200


def test_a_star_allows_any_host_but_no_form() -> None:
    check = HostCheck(["*"]).check
    check({"host": "evil.example", "origin": "http://other.example"})
    with pytest.raises(ContentTypeError):
        check({"host": "evil.example", "content-type": "text/plain"})
    for foreign in ("example.org.evil.example", "notinfer.example.org"):
        with pytest.raises(RestrictedError):
            HostCheck(["infer.example.org"]).check({"host": foreign})
