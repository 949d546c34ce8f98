"""Server reflection: grpcurl and other tools ask the server for the protocol's definitions.

https://grpc.io/docs/guides/reflection
"""
from __future__ import annotations

import grpc

import protos


def is_installed() -> bool:
    try:
        import grpc_reflection.v1alpha.reflection  # noqa: F401
    except ImportError:
        return False
    return True


def add_reflection(server: grpc.aio.Server) -> None:
    """Adds the service to a server that is not started."""
    from grpc_reflection.v1alpha import reflection
    reflection.enable_server_reflection(
        (protos.INFERENCE_SERVICE, protos.HEALTH_SERVICE, reflection.SERVICE_NAME), server, protos.pool())
