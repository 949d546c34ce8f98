"""infer-server's options about who may connect, how, what they may call, and what is measured; most are Triton's."""
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
from infer_server.endpoints.tls import Tls
from infer_server.observing.access_log import FORMS

# Option -> (what the C core of gRPC calls it, what it means).
_CHANNEL = {
    "grpc-keepalive-time": ("grpc.keepalive_time_ms", "ms of silence after which the server pings a client"),
    "grpc-keepalive-timeout": ("grpc.keepalive_timeout_ms", "ms for the client to answer that, or be disconnected"),
    "grpc-http2-max-pings-without-data": ("grpc.http2.max_pings_without_data", "pings in a row; 0: any number"),
    "grpc-http2-min-recv-ping-interval-without-data": (
        "grpc.http2.min_ping_interval_without_data_ms", "ms between a client's pings"),
    "grpc-http2-max-ping-strikes": ("grpc.http2.max_ping_strikes", "pings too early before a client is disconnected"),
    "grpc-max-connection-age": ("grpc.max_connection_age_ms", "ms after which a connection is renewed"),
    "grpc-max-connection-age-grace": ("grpc.max_connection_age_grace_ms", "ms for its calls to end after that"),
}
_COMPRESSION = "grpc-infer-response-compression-level"      # whatever level, for gRPC has one of gzip
_COMPRESSED = {"grpc.default_compression_algorithm": grpc.Compression.Gzip.value}


def add_access(parser: argparse.ArgumentParser) -> None:
    _flag(parser, "allow-client-shm", "clients on this machine may pass tensors in system shared memory", False)
    for protocol in ("grpc", "http"):
        _flag(parser, f"{protocol}-use-ssl", f"{protocol} is encrypted", False)
        _flag(parser, f"{protocol}-use-ssl-mutual", "... and clients must show a certificate, too", False)
        parser.add_argument(f"--{protocol}-server-cert", type=Path, metavar="FILE",
                            help="the server's certificate, PEM")
        parser.add_argument(f"--{protocol}-server-key", type=Path, metavar="FILE", help="its private key, PEM")
        parser.add_argument(f"--{protocol}-root-cert", type=Path, metavar="FILE",
                            help="the authorities that clients' certificates are from, PEM")
    for option, header in (("--grpc-restricted-protocol", "triton-grpc-protocol-KEY"),
                           ("--http-restricted-api", "KEY")):
        parser.add_argument(option, action="append", default=[], metavar="WHAT,...:KEY=VALUE",
                            help=f"calls that only clients who send the header {header} with that value may make: of "
                                 f"{', '.join(CATEGORIES)}; can be repeated")
    for option, (_, text) in _CHANNEL.items():
        parser.add_argument(f"--{option}", type=_setting, metavar="N", help=f"{text} (default: gRPC's)")
    parser.add_argument(f"--{_COMPRESSION}", choices=("none", "low", "medium", "high"),
                        default="none", metavar="LEVEL",
                        help="other than none: answers over gRPC that become smaller are sent as gzip (default "
                             "%(default)s)")
    _flag(parser, "grpc-keepalive-permit-without-calls", "pings also where no call is open", False)
    _flag(parser, "grpc-reflection", "tools such as grpcurl may ask for the protocol's definitions", False)
    parser.add_argument("--allowed-hosts", action="append", default=[], metavar="NAME,...",
                        help="host names under which clients and proxies may change the server over HTTP, beside "
                             "localhost, addresses, names of one label and this machine's own; *.example.org is every "
                             "name below it, * any; can be repeated")
    parser.add_argument("--access-log", choices=FORMS, default="", metavar="FORM",
                        help="writes a line for each inference to the log, as text or json (default: none)")
    add_tracing(parser)
    _flag(parser, "allow-cpu-metrics", "metrics of the machine's CPUs and memory", True)
    _flag(parser, "allow-gpu-metrics", "metrics of GPUs, where there are some (pip install 'infer-server[nvml]')", True)
    parser.add_argument("--metrics-config", action="append", default=[], metavar="NAME=VALUE",
                        help="counter_latencies, summary_latencies or histogram_latencies=false leaves these out; "
                             "summary_quantiles=0.5,0.99; can be repeated")


def access_of(given: argparse.Namespace) -> dict[str, Any]:
    """The fields of ServerOptions that these options say. Raises ValueError: they make no sense."""
    if given.grpc_reflection and not reflection.is_installed():
        raise ValueError("--grpc-reflection needs grpcio-reflection: install infer-server[reflection]")
    return {
        "allow_client_shm": given.allow_client_shm,
        "grpc_tls": _tls(given, "grpc"), "http_tls": _tls(given, "http"),
        "grpc_secrets": _secrets("--grpc-restricted-protocol", given.grpc_restricted_protocol),
        "http_secrets": _secrets("--http-restricted-api", given.http_restricted_api),
        "grpc_reflection": given.grpc_reflection, "access_log": given.access_log,
        "tracing": tracing_of(given),
        "allowed_hosts": tuple(name for names in given.allowed_hosts for name in names.split(",") if name.strip()),
        "metrics": _metrics(given.metrics_config, given.allow_cpu_metrics, given.allow_gpu_metrics),
        "grpc_channel": {
            **{name: _value(given, option) for option, (name, _) in _CHANNEL.items()
               if _value(given, option) is not None},
            **({} if _value(given, _COMPRESSION) == "none" else _COMPRESSED),
            "grpc.keepalive_permit_without_calls": int(given.grpc_keepalive_permit_without_calls)},
    }


def _setting(text: str) -> int:
    """A number as the C core of gRPC has it."""
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


def _value(given: argparse.Namespace, option: str) -> Any:
    return getattr(given, option.replace("-", "_"))


def _tls(given: argparse.Namespace, protocol: str) -> Tls | None:
    use, mutual, certificate, key, clients = (
        _value(given, f"{protocol}-{name}") for name in
        ("use-ssl", "use-ssl-mutual", "server-cert", "server-key", "root-cert"))
    if not (use or mutual):
        return None
    if not (certificate and key):
        raise ValueError(f"--{protocol}-use-ssl needs --{protocol}-server-cert and --{protocol}-server-key")
    if mutual and not clients:
        raise ValueError(f"--{protocol}-use-ssl-mutual needs --{protocol}-root-cert")
    return Tls(certificate, key, clients if mutual else None)


def _metrics(texts: list[str], cpu: bool, gpu: bool) -> MetricsSettings:
    settings = MetricsSettings(cpu=cpu, gpu=gpu)
    for text in texts:
        name, _, value = text.partition("=")
        try:
            if name == "summary_quantiles":     # Triton's have an error behind a colon
                quantiles = tuple(sorted(float(part.split(":")[0]) for part in value.split(",")))
                if not all(0 < share < 1 for share in quantiles):
                    raise ValueError("quantiles are within 0 and 1")
                settings = replace(settings, quantiles=quantiles)
            elif name in ("counter_latencies", "summary_latencies", "histogram_latencies"):
                wanted: dict[str, Any] = {name: boolean(value)}
                settings = replace(settings, **wanted)
            else:
                raise ValueError("there is no such setting")
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"--metrics-config {text}: {error}") from error
    return settings


def _secrets(option: str, texts: list[str]) -> Mapping[str, Secret]:
    try:
        return parsed(texts)
    except ValueError as error:
        raise ValueError(f"{option} {error}") from error
