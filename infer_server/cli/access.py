"""Options of infer-server for access and observation: TLS, restricted calls, gRPC channel, metrics.

Most are Triton's.
"""
from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from infer_server.cli.common import boolean
from infer_server.cli.tracing import add_tracing, tracing_of
from infer_server.endpoints.grpc.service import reflection
from infer_server.endpoints.metrics import MetricsSettings
from infer_server.endpoints.restrictions import CATEGORIES, Secret, parsed
from infer_server.endpoints.tls import ServerTls
from infer_server.observing.access_log import FORMS

# Option: (name of the gRPC channel argument, help text).
_CHANNEL = {
    "grpc-keepalive-time": ("grpc.keepalive_time_ms", "milliseconds without traffic after which the server sends a "
                                                      "ping"),
    "grpc-keepalive-timeout": ("grpc.keepalive_timeout_ms", "milliseconds for a client to answer a ping before it is "
                                                            "disconnected"),
    "grpc-http2-max-pings-without-data": (
        "grpc.http2.max_pings_without_data", "maximum number of pings in a row without data; 0 for no limit"),
    "grpc-http2-min-recv-ping-interval-without-data": (
        "grpc.http2.min_ping_interval_without_data_ms", "minimum milliseconds between a client's pings without data"),
    "grpc-http2-max-ping-strikes": (
        "grpc.http2.max_ping_strikes", "number of premature pings before a client is disconnected"),
    "grpc-max-connection-age": ("grpc.max_connection_age_ms", "milliseconds after which a connection is closed"),
    "grpc-max-connection-age-grace": (
        "grpc.max_connection_age_grace_ms", "milliseconds for open calls to end after --grpc-max-connection-age"),
}
_COMPRESSION = "grpc-infer-response-compression-level"      # all levels are equal: gRPC has one level of gzip
_COMPRESSED = {"grpc.default_compression_algorithm": grpc.Compression.Gzip.value}


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    _flag(parser, "allow-client-shm", "allow clients on this machine to register system shared memory", False)
    for protocol, name in (("grpc", "gRPC"), ("http", "HTTP")):
        _flag(parser, f"{protocol}-use-ssl", f"serve {name} over TLS", False)
        _flag(parser, f"{protocol}-use-ssl-mutual", f"serve {name} over TLS and require client certificates", False)
        parser.add_argument(f"--{protocol}-server-cert", type=Path, metavar="FILE",
                            help="server certificate, PEM")
        parser.add_argument(f"--{protocol}-server-key", type=Path, metavar="FILE",
                            help="private key of the server certificate, PEM")
        parser.add_argument(f"--{protocol}-root-cert", type=Path, metavar="FILE",
                            help="certificate authorities of client certificates, PEM")
    for option, header in (("--grpc-restricted-protocol", "triton-grpc-protocol-KEY"),
                           ("--http-restricted-api", "KEY")):
        parser.add_argument(option, action="append", default=[], metavar="WHAT,...:KEY=VALUE",
                            help=f"restrict calls to clients that send the header {header} with this value; WHAT is "
                                 f"one of {', '.join(CATEGORIES)}; can be repeated")
    for option, (_, text) in _CHANNEL.items():
        parser.add_argument(f"--{option}", type=_setting, metavar="N", help=f"{text} (default: gRPC's own)")
    parser.add_argument(f"--{_COMPRESSION}", choices=("none", "low", "medium", "high"),
                        default="none", metavar="LEVEL",
                        help="compress gRPC responses with gzip if they become smaller, at any level but none (default "
                             "%(default)s)")
    _flag(parser, "grpc-keepalive-permit-without-calls", "send keepalive pings also without open calls", False)
    _flag(parser, "grpc-reflection", "serve gRPC reflection, for tools such as grpcurl", False)
    parser.add_argument("--allowed-hosts", action="append", default=[], metavar="NAME,...",
                        help="host names accepted in HTTP requests that change the server, in addition to localhost, "
                             "addresses, names without a dot and this machine's own names; *.example.org accepts every "
                             "name below it, * any; can be repeated")
    parser.add_argument("--access-log", choices=FORMS, default="", metavar="FORM",
                        help="log a line for each inference, as text or json (default: none)")
    add_tracing(parser)
    _flag(parser, "allow-cpu-metrics", "report metrics of the machine's CPUs and memory", True)
    _flag(parser, "allow-gpu-metrics", "report metrics of GPUs (needs pip install 'infer-server[nvml]')", True)
    parser.add_argument("--metrics-config", action="append", default=[], metavar="NAME=VALUE",
                        help="counter_latencies, summary_latencies or histogram_latencies=false omits these metrics; "
                             "summary_quantiles=0.5,0.99 sets the quantiles; can be repeated")


def access_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ServerOptions that these options set.

    Raises ValueError if the options contradict each other.
    """
    if options.grpc_reflection and not reflection.is_installed():
        raise ValueError("--grpc-reflection needs grpcio-reflection: install infer-server[reflection]")
    return {
        "allow_client_shm": options.allow_client_shm,
        "grpc_tls": _tls(options, "grpc"), "http_tls": _tls(options, "http"),
        "grpc_secrets": _secrets("--grpc-restricted-protocol", options.grpc_restricted_protocol),
        "http_secrets": _secrets("--http-restricted-api", options.http_restricted_api),
        "grpc_reflection": options.grpc_reflection, "access_log": options.access_log,
        "tracing": tracing_of(options),
        "allowed_hosts": tuple(name for names in options.allowed_hosts for name in names.split(",") if name.strip()),
        "metrics": _metrics(options.metrics_config, options.allow_cpu_metrics, options.allow_gpu_metrics),
        "grpc_channel": {
            **{name: _value(options, option) for option, (name, _) in _CHANNEL.items()
               if _value(options, option) is not None},
            **({} if _value(options, _COMPRESSION) == "none" else _COMPRESSED),
            "grpc.keepalive_permit_without_calls": int(options.grpc_keepalive_permit_without_calls)},
    }


def _setting(text: str) -> int:
    """Parse a 32-bit integer, as gRPC's channel arguments need."""
    try:
        number = int(text)
    except ValueError:
        number = 1 << 31
    if not -1 << 31 <= number < 1 << 31:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 32 bits")
    return number


def _flag(parser: argparse.ArgumentParser, name: str, text: str, default: bool) -> None:
    parser.add_argument(f"--{name}", type=boolean, nargs="?", const=True, default=default, metavar="BOOL",
                        help=f"{text} (default {str(default).lower()})")


def _value(options: argparse.Namespace, option: str) -> Any:
    return getattr(options, option.replace("-", "_"))


def _tls(options: argparse.Namespace, protocol: str) -> ServerTls | None:
    use, mutual, certificate, key, clients = (
        _value(options, f"{protocol}-{name}") for name in
        ("use-ssl", "use-ssl-mutual", "server-cert", "server-key", "root-cert"))
    if not (use or mutual):
        return None
    if not (certificate and key):
        raise ValueError(f"--{protocol}-use-ssl needs --{protocol}-server-cert and --{protocol}-server-key")
    if mutual and not clients:
        raise ValueError(f"--{protocol}-use-ssl-mutual needs --{protocol}-root-cert")
    return ServerTls(certificate, key, clients if mutual else None)


def _metrics(texts: list[str], cpu: bool, gpu: bool) -> MetricsSettings:
    settings = MetricsSettings(cpu=cpu, gpu=gpu)
    for text in texts:
        name, _, value = text.partition("=")
        try:
            if name == "summary_quantiles":     # Triton's format has an error bound after a colon, which is ignored
                quantiles = tuple(sorted(float(part.split(":")[0]) for part in value.split(",")))
                if not all(0 < level < 1 for level in quantiles):
                    raise ValueError("quantiles must be between 0 and 1")
                settings = replace(settings, quantiles=quantiles)
            elif name in ("counter_latencies", "summary_latencies", "histogram_latencies"):
                field: dict[str, Any] = {name: boolean(value)}
                settings = replace(settings, **field)
            else:
                raise ValueError("unknown setting; expected counter_latencies, summary_latencies, histogram_latencies "
                                 "or summary_quantiles")
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"--metrics-config {text}: {error}") from error
    return settings


def _secrets(option: str, texts: list[str]) -> Mapping[str, Secret]:
    try:
        return parsed(texts)
    except ValueError as error:
        raise ValueError(f"{option} {error}") from error
