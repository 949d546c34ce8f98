"""Command-line clients: curl, nghttp, h2load, perf_analyzer, grpc_health_probe, and Node.js with @grpc/grpc-js."""
from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache, partial
from pathlib import Path

import numpy as np

from infer_server import protos
from infer_server.engines.files import user_cache
from infer_server.protos.grpc_framing import prefix_of
from scripts.interop.clients import small
from scripts.interop.peers import TIMEOUT_SECS, AbsentError, Check, Peer, Target, output, program, version_in
from scripts.interop.servers import ECHO, LARGE

_PACKAGES = ("@grpc/grpc-js", "@grpc/proto-loader")
_NGHTTP2 = "apt install nghttp2-client"
_CALLS = Path(__file__).parent / "calls.js"
_PROTO = Path(protos.__file__).parent / "inference.proto"
_INFER = f"/{protos.INFERENCE_SERVICE}/ModelInfer"
JSON = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}'
_GRPC_HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")


# ---- curl
def _curl(target: Target, *options: str | Path, http2: bool = True) -> str:
    version = "--http1.1" if not http2 else "--http2" if target.root else "--http2-prior-knowledge"
    root: tuple[str | Path, ...] = ("--cacert", target.root) if target.root else ()
    return output([program("curl", "apt install curl"), "-sS", "--max-time", f"{TIMEOUT_SECS:g}", version, *root,
                   *options])


def curl_grpc(target: Target) -> None:
    """Make a gRPC call by curl, which sends the framed message and prints the trailers unchanged."""
    message = small().SerializeToString()
    with tempfile.NamedTemporaryFile() as body:
        body.write(prefix_of(len(message)) + message)
        body.flush()
        scheme = "https" if target.root else "http"
        text = _curl(target, "-v", *_GRPC_HEADERS, "--data-binary", f"@{body.name}", "-o", os.devnull,
                     f"{scheme}://{target.grpc}{_INFER}")
    assert "grpc-status: 0" in text and "HTTP/2 200" in text, text[-400:]


def curl_http(target: Target, http2: bool) -> None:
    text = _curl(target, "-w", " %{http_version} %{http_code}", f"{target.url}/v2/health/ready", http2=http2)
    assert text.endswith(f"{'2' if http2 else '1.1'} 200"), text


def curl_large(target: Target, http2: bool) -> None:
    """Infer with 5 MB of binary tensors in both directions."""
    values = np.arange(LARGE, dtype="<f4")
    head = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, LARGE],
                                   "parameters": {"binary_data_size": values.nbytes}}],
                       "parameters": {"binary_data_output": True}}).encode()
    with tempfile.NamedTemporaryFile() as body, tempfile.NamedTemporaryFile() as answer:
        body.write(head + values.tobytes())
        body.flush()
        _curl(target, "-f", "-H", f"Inference-Header-Content-Length: {len(head)}", "--data-binary", f"@{body.name}",
              "-o", answer.name, f"{target.url}/v2/models/{ECHO}/infer", http2=http2)
        assert Path(answer.name).read_bytes()[-values.nbytes:] == values.tobytes(), "other values"


# ---- nghttp2's programs
def nghttp(target: Target) -> None:
    """Make a gRPC call without a message, which is refused by a status in a HEADERS frame."""
    scheme = "https" if target.root else "http"
    text = output([program("nghttp", _NGHTTP2), "-nvs", *_GRPC_HEADERS, "-H", ":method: POST", "-d", os.devnull,
                   f"{scheme}://{target.grpc}{_INFER}"])
    assert ":status: 200" in text and "grpc-status: 13" in text, text[-400:]


def nghttp_http(target: Target) -> None:
    text = output([program("nghttp", _NGHTTP2), "-nvs", f"{target.url}/v2/health/ready"])
    assert ":status: 200" in text, text[-400:]


def h2load(target: Target, is_grpc: bool) -> None:
    """Make 10,000 inferences on 4 connections with 32 streams each."""
    message = small().SerializeToString()
    scheme = "https" if target.root else "http"
    with tempfile.NamedTemporaryFile() as body:
        body.write(prefix_of(len(message)) + message if is_grpc else JSON)
        body.flush()
        options = (*_GRPC_HEADERS, f"{scheme}://{target.grpc}{_INFER}") if is_grpc else (
            f"{target.url}/v2/models/{ECHO}/infer",)
        text = output([program("h2load", _NGHTTP2), "-n", "10000", "-c", "4", "-m", "32", "-d", body.name, *options])
    assert "10000 succeeded, 0 failed" in text and "10000 2xx" in text, text[-400:]


# ---- perf_analyzer
def perf_analyzer(target: Target, protocol: str, *options: str) -> None:
    address = target.grpc if protocol == "grpc" else target.http
    text = output([program("perf_analyzer", "NVIDIA's"), "-m", ECHO, "-i", protocol, "-u", address, "-b", "1",
                   "--shape", "x:16", "-p", "3000", "-s", "999", "-r", "3", *options])
    assert re.search(r"throughput: [1-9]", text) and "Failed" not in text, text[-400:]


def grpc_health_probe(target: Target) -> None:
    tls = ("-tls", "-tls-ca-cert", target.root) if target.root else ()
    output([program("grpc_health_probe", "grpc-health-probe"), f"-addr={target.grpc}", *tls])


# ---- Node.js
@cache
def node_modules(install: bool) -> Path:
    """Return the folder of grpc-js; `install` installs it with npm if it is missing. Raises AbsentError."""
    program("node", "apt install nodejs")
    folders = [Path(part) for part in os.environ.get("NODE_PATH", "").split(os.pathsep) if part]
    cached = user_cache() / "interop"
    for folder in (*folders, cached / "node_modules"):
        if all((folder / package).is_dir() for package in _PACKAGES):
            return folder
    npm = shutil.which("npm")
    if not install or not npm:
        raise AbsentError(f"{_PACKAGES[0]} is in no folder of NODE_PATH (python -m scripts.interop installs it by npm)")
    cached.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", cached,
                           *_PACKAGES], capture_output=True, text=True)
    if done.returncode:
        raise AbsentError(f"npm cannot install {_PACKAGES[0]}: {done.stderr.strip()[-200:]}")
    return cached / "node_modules"


def grpc_js(target: Target) -> None:
    """Run all checks of calls.js. Raises AssertionError with the failed ones."""
    text = output([program("node", "apt install nodejs"), _CALLS, _PROTO, target.grpc,
                   *([target.root] if target.root else [])],
                  {**os.environ, "NODE_PATH": str(node_modules(False))})
    results = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert len(results) == 7, text
    failed = {each["check"]: each["error"] for each in results if each["error"]}
    assert not failed, failed


def _grpc_js_version() -> str:
    manifest = node_modules(True) / _PACKAGES[0] / "package.json"
    return f"{json.loads(manifest.read_text())['version']}, Node.js {version_in(output(['node', '--version']))}"


def _version_of(name: str, how: str) -> str:
    return version_in(output([program(name, how), "--version"]))


def _perf_analyzer_version() -> str:
    return output([program("perf_analyzer", "NVIDIA's"), "--version"]).partition("(")[2].strip(" )\n")


def _curl_checks(http2: bool) -> dict[str, Check]:
    version = "HTTP/2" if http2 else "HTTP/1.1"
    return {f"{version}: HTTP port": partial(curl_http, http2=http2),
            f"{version}: 5 MB": partial(curl_large, http2=http2)}


PEERS = (
    Peer("curl", partial(_version_of, "curl", "apt install curl"), {
        "HTTP/2: gRPC port": curl_grpc, **_curl_checks(False), **_curl_checks(True)}),
    Peer("nghttp", partial(_version_of, "nghttp", _NGHTTP2), {"gRPC port": nghttp, "HTTP port": nghttp_http}),
    Peer("h2load", partial(_version_of, "h2load", _NGHTTP2), {
        "gRPC port: 10,000 calls": partial(h2load, is_grpc=True),
        "HTTP port: 10,000 inferences": partial(h2load, is_grpc=False)}),
    Peer("@grpc/grpc-js", _grpc_js_version, {
        "unary, 200 at a time, 5 MB, streams, errors, deadlines, cancellation": grpc_js}),
    Peer("grpc_health_probe", partial(_version_of, "grpc_health_probe", "of grpc-ecosystem"),
         {"health": grpc_health_probe}))
# perf_analyzer rejects unknown certificates over HTTP: it is tested without TLS.
PLAIN_PEERS = (
    Peer("perf_analyzer", _perf_analyzer_version, {
        "gRPC": lambda target: perf_analyzer(target, "grpc"),
        "gRPC, streaming": lambda target: perf_analyzer(target, "grpc", "--streaming", "--async"),
        "HTTP": lambda target: perf_analyzer(target, "http")}),)
