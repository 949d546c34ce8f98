"""The libraries that serve the gRPC port, by name."""
from __future__ import annotations

import logging
from collections.abc import Mapping

from infer_server.endpoints.grpc.grpcio.server import GrpcioServer
from infer_server.endpoints.grpc.methods import Methods
from infer_server.endpoints.inflight import Inflight
from infer_server.listeners import GrpcServer
from protos import http2

log = logging.getLogger(__name__)

NGHTTP2, GRPCIO = "nghttp2", "grpcio"
FRONTS = (NGHTTP2, GRPCIO)


def grpc_server(front: str, methods: Methods, inflight: Inflight, channel: Mapping[str, int], max_message_bytes: int,
                min_body_rate: int, body_grace_secs: float, shares_port: bool = False) -> GrpcServer:
    """Return a server for the gRPC port, which is not open yet.

    Parameters
    ----------
    front : "nghttp2", or "grpcio", which also serves where ngh2 cannot be imported.
    methods, inflight, max_message_bytes, shares_port : see GrpcioServer.
    channel : keepalive, connection age and compression, by the names of gRPC's C core.
    min_body_rate, body_grace_secs : bytes per second of a message that arrives in pieces, and the seconds that they are
        an average over. Under grpcio they have no effect.
    """
    if front == NGHTTP2 and http2.is_installed:
        from infer_server.endpoints.grpc.nghttp2.server import Nghttp2Server
        from infer_server.endpoints.http2.settings import settings_of
        return Nghttp2Server(methods, inflight, settings_of(channel, max_message_bytes, min_body_rate,
                                                            body_grace_secs), shares_port)
    if front == NGHTTP2:
        log.warning("ngh2 is not installed (pip install ngh2): grpcio serves gRPC, which costs more for each request")
    return GrpcioServer(methods, inflight, max_message_bytes, channel, shares_port)
