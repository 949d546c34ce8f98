"""Transports of a load test by URL scheme: gRPC, HTTP, and gRPC with tensors in shared memory."""
from __future__ import annotations

from infer_server.clients.load.transports.over_grpc import GrpcTransport
from infer_server.clients.load.transports.over_http import HttpTransport
from infer_server.clients.load.transports.over_shared_memory import SharedMemoryTransport
from infer_server.clients.load.transports.transport import Transport

SCHEMES: dict[str, type[GrpcTransport | HttpTransport]] = {
    "grpc": GrpcTransport, "http": HttpTransport, "shm": SharedMemoryTransport}

_NAMES_OF_GRPC = ("dns:", "unix:", "unix-abstract:")    # https://grpc.github.io/grpc/core/md_doc_naming.html


def split_url(url: str) -> tuple[str, str]:
    """Return scheme and address of "scheme://host:port"; the scheme defaults to "grpc", also for gRPC's names."""
    scheme, separator, address = url.partition("://")
    return ("grpc", url) if not separator or is_name_of_grpc(url) else (scheme, address)


def is_name_of_grpc(address: str) -> bool:
    """Return True for a name that gRPC resolves: "unix:/run/server.sock", "dns:///host:port"."""
    return address.startswith(_NAMES_OF_GRPC)


def open_transport(url: str) -> Transport:
    scheme, address = split_url(url)
    return SCHEMES[scheme](address)
