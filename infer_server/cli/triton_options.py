"""Triton's options that have another name here, have no effect, or are refused with advice what to do instead."""
from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infer_server.cli.common import boolean, positive
from infer_server.config.paths import is_name
from infer_server.engines.capacity import memory_limit
from infer_server.protos.version import NAME

# Options that are accepted without effect, with a warning.
_WITHOUT_EFFECT = (
    "backend-config", "backend-directory", "buffer-manager-thread-count", "cache-directory",
    "cuda-memory-pool-byte-size", "cuda-virtual-address-size", "disable-auto-complete-config", "enable-peer-access",
    "grpc-infer-allocation-pool-size", "grpc-infer-thread-count", "grpc-max-response-pool-size", "host-policy",
    "http-thread-count", "log-format", "metrics-interval-ms", "min-supported-compute-capability",
    "model-load-gpu-limit", "model-load-retry-count", "pinned-memory-pool-byte-size",
    "repoagent-directory", "reuse-grpc-port", "reuse-http-port", "sagemaker-port", "sagemaker-safe-port-range",
    "sagemaker-thread-count", "strict-model-config", "vertex-ai-default-model", "vertex-ai-port",
    "vertex-ai-thread-count")
# Option: (the only accepted value, advice for other values).
_REFUSED = {
    "allow-sagemaker": ("false", "SageMaker's own routes are not served; let it call /v2"),
    "allow-vertex-ai": ("false", "Vertex AI's own routes are not served; let it call /v2"),
    "model-namespacing": ("false", "names of models must be unique over all repositories; rename models"),
}
_DIGITS = 20
PORTS = ("grpc", "http", "metrics")
_PROTOCOLS = ("gRPC", "HTTP")           # see serving.InferenceCall


def add_triton_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; those that have an equivalent here, or no effect, are not shown in --help."""
    for name in _WITHOUT_EFFECT:
        parser.add_argument(f"--{name}", action="append", nargs="?", const="", help=argparse.SUPPRESS)
    for name, (accepted, instead) in _REFUSED.items():
        parser.add_argument(f"--{name}", action="append", nargs="?", const="true", type=_only(accepted, instead),
                            help=argparse.SUPPRESS)
    for port in PORTS:
        parser.add_argument(f"--{port}-address", default="", metavar="ADDRESS",
                            help=f"address of the {port} port, instead of --host")
        parser.add_argument(f"--allow-{port}", type=boolean, nargs="?", const=True, default=True, metavar="BOOL",
                            help=f"open the {port} port (default true)")
    parser.add_argument("--id", default=NAME, metavar="NAME",
                        help="name of the server in its metadata (default %(default)s)")
    parser.add_argument("--model-config-name", type=_config_name, default="", metavar="NAME",
                        help="use configs/NAME.pbtxt instead of config.pbtxt for models that have it")
    parser.add_argument("--log-verbose", type=int, default=0, help=argparse.SUPPRESS)
    for name in ("log-info", "log-warning", "log-error"):
        parser.add_argument(f"--{name}", type=boolean, nargs="?", const=True, default=True, help=argparse.SUPPRESS)
    parser.add_argument("--log-file", type=Path, metavar="FILE", help="file to append the log to (default: stderr)")
    parser.add_argument("--response-cache-byte-size", type=cache_bytes, help=argparse.SUPPRESS)
    parser.add_argument("--http-max-input-size", type=positive, metavar="BYTES",
                        help="maximum size of the body of an HTTP request (default: --max-message-mib)")
    for protocol in _PROTOCOLS:
        parser.add_argument(f"--{protocol.lower()}-header-forward-pattern", type=_pattern, metavar="REGEX",
                            help=f"forward {protocol} headers whose names match as parameters of the request; the "
                                 "match ignores case, unless the expression begins with (?-i)")


def cache_bytes(text: str) -> int:
    """Parse the size of the response cache, up to the memory limit of this process, as an argparse type."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of bytes")
    if len(text) > _DIGITS or int(text) > memory_limit():
        raise argparse.ArgumentTypeError(f"{text[:_DIGITS]} bytes are more than the limit of {memory_limit()}, the "
                                         "memory that this process may have")
    return int(text)


def without_effect(options: argparse.Namespace) -> list[str]:
    """Return the given options that have no effect here."""
    return [f"--{name}" for name in _WITHOUT_EFFECT if _value(options, name) is not None]


def log_level(options: argparse.Namespace) -> str:
    """Return the level for the logging module, from --log-level and Triton's options."""
    level: str = options.log_level.upper()
    if options.log_verbose > 0:
        return "DEBUG"
    silent = [name for name in ("info", "warning", "error") if not _value(options, f"log-{name}")]
    return {"info": "WARNING", "warning": "ERROR", "error": "CRITICAL"}[silent[-1]] if silent else level


def ports_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ServerOptions for the ports and their addresses."""
    return {"hosts": {port: host.strip("[]") for port in PORTS if (host := _value(options, f"{port}-address"))},
            "closed": frozenset(port for port in PORTS if not _value(options, f"allow-{port}"))}


def forwarded_of(options: argparse.Namespace) -> dict[str, re.Pattern[str]]:
    """Return the patterns of headers that become parameters, by protocol."""
    return {protocol: pattern for protocol in _PROTOCOLS
            if (pattern := _value(options, f"{protocol.lower()}-header-forward-pattern"))}


def _pattern(text: str) -> re.Pattern[str]:
    """Parse a regular expression in RE2's form, with (?-i) at the beginning, which Python does not support."""
    own = text.removeprefix("(?-i)")
    try:
        return re.compile(own, 0 if own != text else re.IGNORECASE)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not a regular expression: {error}") from error


def _config_name(text: str) -> str:
    if text and not is_name(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not the name of a file in configs/, without its .pbtxt")
    return text


def _only(accepted: str, instead: str) -> Callable[[str], str]:
    """Return an argparse type that accepts one value."""
    def read(text: str) -> str:
        if text.lower() != accepted:
            raise argparse.ArgumentTypeError(f"'{text}' is not served: {instead}")
        return text
    return read


def _value(options: argparse.Namespace, option: str) -> Any:
    return getattr(options, option.replace("-", "_"))
