"""Every option of Triton's command line is either accepted, or refused with advice on its replacement."""
from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from infer_server.cli.serve import _options, _parser
from infer_server.cli.triton_options import log_level, without_effect
from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.infer_server.cli.test_serve import process

# As src/command_line_parser.cc of its server has them, with a value that its users write; "": refused here.
TRITONS = {
    **dict.fromkeys((
        "allow-client-shm", "allow-cpu-metrics", "allow-gpu-metrics", "allow-grpc", "allow-http", "allow-metrics",
        "exit-on-error", "grpc-use-ssl", "grpc-use-ssl-mutual", "grpc-keepalive-permit-without-calls", "log-error",
        "log-info", "log-warning", "reuse-grpc-port", "reuse-http-port", "strict-model-config",
        "strict-readiness"), "true"),
    **dict.fromkeys((
        "buffer-manager-thread-count", "exit-timeout-secs", "grpc-http2-max-ping-strikes",
        "grpc-http2-max-pings-without-data", "grpc-http2-min-recv-ping-interval-without-data",
        "grpc-infer-allocation-pool-size", "grpc-infer-thread-count", "grpc-keepalive-time", "grpc-keepalive-timeout",
        "grpc-max-connection-age", "grpc-max-connection-age-grace", "grpc-max-response-pool-size", "grpc-port",
        "http-max-input-size", "http-port", "http-thread-count", "log-verbose", "metrics-interval-ms", "metrics-port",
        "model-load-retry-count", "model-load-thread-count", "pinned-memory-pool-byte-size", "repository-poll-secs",
        "response-cache-byte-size", "sagemaker-port", "sagemaker-thread-count", "vertex-ai-port",
        "vertex-ai-thread-count"), "8"),
    **dict.fromkeys((
        "backend-directory", "cache-directory", "grpc-root-cert", "grpc-server-cert", "grpc-server-key", "log-file",
        "model-repository", "model-store", "repoagent-directory"), "/a"),
    **dict.fromkeys(("grpc-address", "http-address", "metrics-address"), "0.0.0.0"),
    "allow-sagemaker": "false", "allow-vertex-ai": "false", "backend-config": "onnxruntime,x=y",
    "cache-config": "local,size=1048576", "cuda-memory-pool-byte-size": "0:64", "cuda-virtual-address-size": "0:64",
    "disable-auto-complete-config": None, "enable-peer-access": "false", "grpc-header-forward-pattern": "x_.*",
    "grpc-infer-response-compression-level": "medium", "grpc-restricted-protocol": "health:key=value",
    "host-policy": "0,numa-node=0", "http-header-forward-pattern": "(?-i)x_.*",
    "http-restricted-api": "health:key=value",
    "id": "mine", "load-model": "m", "log-format": "ISO8601", "metrics-config": "counter_latencies=false",
    "min-supported-compute-capability": "6.0", "model-config-name": "h100", "model-control-mode": "poll",
    "model-load-gpu-limit": "0:0.5", "model-namespacing": "false", "rate-limit": "execution_count",
    "rate-limit-resource": "R1:10:0",
    "sagemaker-safe-port-range": "1-2", "trace-config": "level=OFF", "trace-count": "9", "trace-file": "/a",
    "trace-level": "TIMESTAMPS", "trace-log-frequency": "9", "trace-rate": "9", "vertex-ai-default-model": "m",
}


def test_every_option_of_tritons_is_taken() -> None:
    parser = _parser()
    for name, value in TRITONS.items():
        parser.parse_args([f"--{name}" if value is None else f"--{name}={value}"])


@pytest.mark.parametrize("given", ["allow-sagemaker", "allow-vertex-ai=true", "model-namespacing=1"])
def test_what_is_not_here_is_refused_where_it_is_asked_for(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args([f"--{given}"])
    assert re.search(r"is not served: \w+", capsys.readouterr().err)


def test_options_under_tritons_names_are_those_of_ours() -> None:
    parser = _parser()
    given = parser.parse_args(["--model-store=/a", "--response-cache-byte-size=7", "--http-address=[::1]", "--id=x",
                               "--allow-metrics=false", "--model-control-mode=POLL", "--log-format=x"])
    options = _options(given)
    assert given.model_repository == ["/a"] and options.response_cache_bytes == 7 and options.poll_secs == 15
    assert options.hosts == {"http": "::1"} and options.closed == {"metrics"} and options.name == "x"
    assert without_effect(given) == ["--log-format"]
    assert (options.max_message_bytes, options.max_body_bytes) == (256 << 20, 256 << 20)
    options = _options(parser.parse_args(["--http-max-input-size=100", "--max-message-mib=1"]))
    assert (options.max_message_bytes, options.max_body_bytes) == (1 << 20, 100)
    for text, level in (([], "INFO"), (["--log-verbose=1"], "DEBUG"), (["--log-info=false"], "WARNING"),
                        (["--log-info=false", "--log-warning=false"], "ERROR"), (["--log-level=error"], "ERROR")):
        assert log_level(parser.parse_args(text)) == level and level in logging.getLevelNamesMapping()


def test_ports_may_be_closed_and_lie_elsewhere(tmp_path: Path) -> None:
    with process(tmp_path, "--allow-grpc=false", "--allow-metrics=false", "--host=::1",
                 "--http-address=127.0.0.1") as (running, grpc):
        assert grpc == "none"
        running.terminate()
        assert running.wait(TIMEOUT_SECS) == 0


def test_headers_are_found_in_whatever_case_unless_the_pattern_says_otherwise(
        capsys: pytest.CaptureFixture[str]) -> None:
    forwarded = _options(_parser().parse_args(["--model-store=/a", "--http-header-forward-pattern=X_",
                                               "--grpc-header-forward-pattern=(?-i)X_"])).forwarded
    assert {name: bool(pattern.search("my_x_1")) for name, pattern in forwarded.items()} == {
        "HTTP": True, "gRPC": False}
    with pytest.raises(SystemExit):
        _parser().parse_args(["--http-header-forward-pattern=("])
    assert "'(' is not a regular expression" in capsys.readouterr().err
