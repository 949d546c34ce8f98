"""HTTP/2 headers of a gRPC call and its response."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from infer_server.observing import load_report
from infer_server.protos.grpc_framing import binary_text, binary_value, percent_encoded, timeout_secs
from infer_server.protos.http2 import Header

_CONTENT_TYPE = b"application/grpc"
_CODINGS = (b"", b"identity", b"gzip", b"deflate")
_LOAD = load_report.HEADER.encode()
# Headers of gRPC itself, which are not part of a call's metadata.
_RESERVED = frozenset((b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding"))

START = ((b":status", b"200"), (b"content-type", _CONTENT_TYPE), (b"grpc-accept-encoding", b"identity, deflate, gzip"))
START_GZIP = (*START, (b"grpc-encoding", b"gzip"))
SUCCESS = ((b"grpc-status", b"0"),)
INTERNAL, UNIMPLEMENTED = 13, 12


@dataclass
class RequestHead:
    """Headers of a call.

    http_status : HTTP status of the error response if it is not a gRPC call, else 0.
    code, details : gRPC status of the error response; code is 0 if the call can be served.
    remaining_secs : seconds until the deadline; None if there is none.
    """
    headers: tuple[Header, ...] = field(repr=False)
    path: str = ""
    http_status: int = 0
    code: int = 0
    details: str = ""
    remaining_secs: float | None = None
    accepts_gzip: bool = False
    is_encoded: bool = False            # messages may be compressed
    needs_load_report: bool = False     # the client asks for a load report
    size: int = 0                       # bytes, as HPACK counts them

    @cached_property
    def metadata(self) -> tuple[tuple[str, Any], ...]:
        """Metadata of the call; values whose names end with -bin are bytes."""
        return tuple(_pairs(self.headers))


def read_head(headers: tuple[Header, ...]) -> RequestHead:
    """Read the headers of a stream."""
    head = RequestHead(headers)
    method, content_type = b"", b""
    for name, value in headers:
        head.size += len(name) + len(value) + 32
        if name == b":method":
            method = value
        elif name == b":path":
            head.path = value.decode("latin-1")
        elif name == b"content-type":
            content_type = value
        elif name == b"grpc-timeout":
            head.remaining_secs = timeout_secs(value)
            if head.remaining_secs is None:
                head.code, head.details = INTERNAL, f"malformed grpc-timeout: {value[:40]!r}"
        elif name == b"grpc-encoding":
            head.is_encoded = value != b"identity"
            if value not in _CODINGS:
                head.code = UNIMPLEMENTED
                head.details = f"grpc-encoding {value[:40]!r} is not served; send identity, gzip or deflate"
        elif name == b"grpc-accept-encoding":
            head.accepts_gzip = b"gzip" in value
        elif name == _LOAD:
            head.needs_load_report = True
    if method != b"POST":
        head.http_status = 405
    elif content_type != _CONTENT_TYPE and not content_type.startswith((b"application/grpc+", b"application/grpc;")):
        head.http_status = 415
    return head


def success_headers(report: bytes) -> tuple[Header, ...]:
    """Return the trailers of a call that has succeeded, with a serialised load report."""
    return (*SUCCESS, (load_report.TRAILER.encode(), binary_text(report)))


def status_headers(code: int, details: str) -> tuple[Header, ...]:
    """Return the trailers that carry a status."""
    if not details:
        return ((b"grpc-status", b"%d" % code),)
    return (b"grpc-status", b"%d" % code), (b"grpc-message", percent_encoded(details))


def _pairs(headers: Iterable[Header]) -> Iterable[tuple[str, Any]]:
    for name, value in headers:
        if name.startswith(b":") or name in _RESERVED:
            continue
        if name.endswith(b"-bin"):
            for part in value.split(b","):
                try:
                    yield name.decode("latin-1"), binary_value(part.strip())
                except ValueError:
                    continue                    # C core drops such metadata, too
        else:
            yield name.decode("latin-1"), value.decode("latin-1")
