"""Libraries that serve the gRPC port, by name."""
from __future__ import annotations

import logging
from collections.abc import Mapping

from infer_server.endpoints.grpc.grpcio.server import GrpcioServer
from infer_server.endpoints.grpc.methods import Methods
from infer_server.endpoints.inflight import Inflight
from infer_server.listeners import GrpcServer
from infer_server.protos import http2

log = logging.getLogger(__name__)

NGHTTP2, GRPCIO = "nghttp2", "grpcio"
GRPC_LIBRARIES = (NGHTTP2, GRPCIO)


def grpc_server(library: str, methods: Methods, inflight: Inflight, channel: Mapping[str, int], max_message_bytes: int,
                min_body_rate: int, body_grace_secs: float, shares_port: bool = False) -> GrpcServer:
    """Create a server for the gRPC port, which is not open yet.

    Parameters
    ----------
    library : str
        "nghttp2" or "grpcio"; the latter is also used if ngh2 is not installed.
    methods, inflight, max_message_bytes, shares_port
        See GrpcioServer.
    channel : mapping of str to int
        Keepalive, connection age and compression, by the names of gRPC's channel arguments.
    min_body_rate : int
        Minimum rate of a message that arrives in pieces, in bytes per second; no effect with grpcio.
    body_grace_secs : float
        Period over which the rate is averaged, in seconds; no effect with grpcio.
    """
    if library == NGHTTP2 and http2.is_installed:
        from infer_server.endpoints.grpc.nghttp2.server import Nghttp2Server
        from infer_server.endpoints.http2.settings import settings_of
        return Nghttp2Server(methods, inflight, settings_of(channel, max_message_bytes, min_body_rate,
                                                            body_grace_secs), shares_port)
    if library == NGHTTP2:
        log.warning("ngh2 is not installed (pip install ngh2): grpcio serves gRPC, which costs more for each request")
    return GrpcioServer(methods, inflight, max_message_bytes, channel, shares_port)
