"""What a front is told when it starts."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from infer_server.endpoints.tls import Tls


@dataclass(frozen=True)
class Door:
    """A port, which all fronts share."""
    host: str
    port: int
    tls: Tls | None = None


@dataclass(frozen=True)
class FrontSettings:
    grpc: Door | None                   # None: there is no such port
    http: Door | None
    others: str                         # the path of the socket where all calls over gRPC but ModelInfer are served
    max_message_bytes: int              # over gRPC
    max_body_bytes: int                 # over HTTP
    max_inflight_bytes: int
    send_timeout_secs: float
    max_json_bytes: int = 64 << 20
    min_body_rate: int = 500            # see Limits
    body_grace_secs: float = 10.0
    grpc_front: str = "nghttp2"         # the library that serves gRPC
    tells_metadata: bool = False        # the engines' process asks for what comes beside messages over gRPC
    reflection: bool = False            # which is served where all but ModelInfer is
    channel: Mapping[str, int] = field(default_factory=dict)        # of gRPC, by the names of its C core
    log_level: int = 0
