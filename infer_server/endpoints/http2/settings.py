"""Settings of HTTP/2 connections."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_FOREVER_MS = (1 << 31) - 1         # gRPC's value for no limit


@dataclass(frozen=True)
class ConnectionSettings:
    """Settings of a connection. Times are in seconds; defaults are those of gRPC's C core.

    References
    ----------
    https://github.com/grpc/grpc/blob/master/doc/keepalive.md
    https://github.com/grpc/proposal/blob/master/A9-server-side-conn-mgt.md
    """
    max_message_bytes: int
    max_streams: int = 10_000                   # maximum number of open streams
    idle_secs: float = math.inf                 # time without open streams after which the connection is closed
    keepalive_secs: float = 7200.0              # silence after which the client is pinged
    keepalive_timeout_secs: float = 20.0        # time to answer a ping before the connection is aborted
    keepalive_without_calls: bool = False       # send and permit pings while no call is open
    max_pings_without_data: int = 2             # maximum consecutive pings sent by the server; 0: unlimited
    min_ping_interval_secs: float = 300.0       # minimum interval of a client's pings
    max_ping_strikes: int = 2                   # early pings before a client is disconnected; 0: unlimited
    max_age_secs: float = math.inf              # age after which a connection is drained
    max_age_grace_secs: float = math.inf        # time for its calls to end after that
    min_body_rate: int = 500                    # minimum bytes per second of a message in pieces; 0: none
    body_grace_secs: float = 10.0               # period over which the rate is averaged
    compresses: bool = False                    # send responses as gzip if that is smaller


def settings_of(channel: Mapping[str, int], max_message_bytes: int, min_body_rate: int, body_grace_secs: float
                ) -> ConnectionSettings:
    """Return the settings for channel arguments under the names that gRPC's C core gives them."""
    def secs(name: str, default: float) -> float:
        number = channel.get(f"grpc.{name}")
        return default if number is None else math.inf if number in (_FOREVER_MS, -1) else number / 1e3

    usual = ConnectionSettings(max_message_bytes)
    return ConnectionSettings(
        max_message_bytes, keepalive_secs=secs("keepalive_time_ms", usual.keepalive_secs),
        keepalive_timeout_secs=secs("keepalive_timeout_ms", usual.keepalive_timeout_secs),
        keepalive_without_calls=bool(channel.get("grpc.keepalive_permit_without_calls", 0)),
        max_pings_without_data=channel.get("grpc.http2.max_pings_without_data", usual.max_pings_without_data),
        min_ping_interval_secs=secs("http2.min_ping_interval_without_data_ms", usual.min_ping_interval_secs),
        max_ping_strikes=channel.get("grpc.http2.max_ping_strikes", usual.max_ping_strikes),
        max_age_secs=secs("max_connection_age_ms", math.inf),
        max_age_grace_secs=secs("max_connection_age_grace_ms", math.inf), min_body_rate=min_body_rate,
        body_grace_secs=body_grace_secs, compresses=bool(channel.get("grpc.default_compression_algorithm", 0)))
