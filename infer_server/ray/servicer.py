"""Registration of our gRPC services with Ray Serve, by which messages pass as bytes.

In a replica, the handlers are registered with the replica's gRPC server as they are: Serve's own handling of a request
(metadata, tasks, log records, metrics) would cost more than the server's. Elsewhere, and in a replica whose deployment
has an event loop of its own, Serve gets handlers that it can override.
"""
from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import grpc

from infer_server import protos
from infer_server.endpoints.grpc.grpcio.server import Handlers
from infer_server.endpoints.grpc.methods import Methods

# A Watch call would delay the drain of a replica, and report one replica of many. A gRPC client that gets
# UNIMPLEMENTED for Watch assumes that the server is healthy.
WATCH = f"/{protos.HEALTH_SERVICE}/Watch"
METHODS = tuple(method for service in (protos.INFERENCE_SERVICE, protos.HEALTH_SERVICE)
                for method in protos.methods(service) if method.path != WATCH)


class InReplica(NamedTuple):
    """Methods of the server in this process, and the event loop that they belong to."""
    methods: Methods
    loop: asyncio.AbstractEventLoop


_in_replica: InReplica | None = None


def serve_in_replica(methods: Methods) -> None:
    """Have the gRPC server of this replica, which Serve starts later, call these methods without Serve."""
    global _in_replica
    _in_replica = InReplica(methods, asyncio.get_running_loop())


def add_services(servicer: Any, server: Any) -> None:
    """Add GRPCInferenceService and the health check to a gRPC server of Ray Serve.

    Name this function in Serve's `grpc_servicer_functions`. The handlers have no deserialisers, so a replica gets the
    bytes that the client sent.
    """
    if _in_replica and _in_replica.loop is asyncio.get_running_loop():
        # The method of gRPC's class, which Serve's derives from: that of Serve replaces each handler by its own.
        generic_handler = Handlers(_in_replica.methods, disconnect=lambda _: None)
        super(type(server), server).add_generic_rpc_handlers((generic_handler,))
        return
    for service in (protos.INFERENCE_SERVICE, protos.HEALTH_SERVICE):
        handlers = {}
        for method in METHODS:
            if method.path.startswith(f"/{service}/"):
                make = (grpc.stream_stream_rpc_method_handler if method.client_streaming
                        else grpc.unary_unary_rpc_method_handler)
                handlers[method.name] = make(getattr(servicer, method.name))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
