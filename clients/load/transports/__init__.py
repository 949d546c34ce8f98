"""The ways to a server, by the scheme of its address: gRPC, HTTP, and tensors in shared memory beside gRPC."""
from __future__ import annotations

from clients.load.transports.over_grpc import GrpcTransport
from clients.load.transports.over_http import HttpTransport
from clients.load.transports.over_shared_memory import SharedMemoryTransport
from clients.load.transports.transport import Transport

SCHEMES: dict[str, type[GrpcTransport | HttpTransport]] = {
    "grpc": GrpcTransport, "http": HttpTransport, "shm": SharedMemoryTransport}


def open_transport(url: str) -> Transport:
    """The way to "host:port", which is gRPC, or to "scheme://host:port"."""
    scheme, separator, address = url.rpartition("://")
    return SCHEMES[scheme if separator else "grpc"](address)
