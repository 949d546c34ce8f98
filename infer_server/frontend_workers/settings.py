"""Settings that the engine process sends to a frontend worker."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from infer_server.endpoints.tls import ServerTls


@dataclass(frozen=True)
class ListenAddress:
    """Address of a port that all workers share."""
    host: str
    port: int
    tls: ServerTls | None = None


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a frontend worker."""
    grpc: ListenAddress | None                   # None: no gRPC port
    http: ListenAddress | None                   # None: no HTTP port
    max_message_bytes: int              # maximum size of a gRPC message
    max_body_bytes: int                 # maximum size of an HTTP body
    max_inflight_bytes: int
    send_timeout_secs: float
    max_json_bytes: int = 64 << 20
    min_body_rate: int = 500            # see PortLimits
    body_grace_secs: float = 10.0
    grpc_front: str = "nghttp2"         # library that serves gRPC
    forwards_metadata: bool = False     # forward the metadata of gRPC calls
    reflection: bool = False            # forward calls of server reflection
    channel: Mapping[str, int] = field(default_factory=dict)        # gRPC channel arguments by name
    log_level: int = 0
