"""HTTP requests and responses, and the mapping from ServeErrors to status codes."""
from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

from infer_server import errors
from infer_server.errors import ServeError
from infer_server.protocol.compression import WINDOW
from infer_server.protocol.json_documents import LARGE_BYTES
from infer_server.protocol.json_values import parsed
from infer_server.protocol.redaction import public_text

JSON = "application/json"
_OK = "HTTP/1.1 200 OK"
_WORTHWHILE_BYTES = 1 << 10     # smaller responses are not compressed
_LEVEL = 1                      # zlib's level: higher ones hardly make tensors smaller

# Triton's status codes (src/http_server.cc, HttpCodeFromError), and 504 for a deadline, which Triton does not map.
_STATUS: dict[type[ServeError], HTTPStatus] = {
    errors.InvalidRequestError: HTTPStatus.BAD_REQUEST,
    errors.ContentTypeError: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    errors.UnknownRegionError: HTTPStatus.NOT_FOUND,
    errors.RegionExistsError: HTTPStatus.CONFLICT,
    errors.UnopenedRegionError: HTTPStatus.INTERNAL_SERVER_ERROR,
    errors.UnknownModelError: HTTPStatus.NOT_FOUND,
    errors.UnknownServiceError: HTTPStatus.NOT_FOUND,
    errors.RestrictedError: HTTPStatus.FORBIDDEN,
    errors.UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.DeadlineExceededError: HTTPStatus.GATEWAY_TIMEOUT,
    errors.SlowMessageError: HTTPStatus.REQUEST_TIMEOUT,
    errors.TooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.MemoryLimitError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.NotServedError: HTTPStatus.NOT_IMPLEMENTED,
    errors.ExecutionError: HTTPStatus.INTERNAL_SERVER_ERROR,
    errors.UnexplainedError: HTTPStatus.BAD_REQUEST,
    errors.ExistsError: HTTPStatus.BAD_REQUEST,
    errors.CancelledError: HTTPStatus.BAD_REQUEST,
    errors.RepositoryError: HTTPStatus.BAD_REQUEST,
}


_NONE: Mapping[str, str] = MappingProxyType({})


class HttpRequest(NamedTuple):
    """Complete request. Names of headers are in lower case."""
    method: str
    path: str                               # decoded, without the query
    headers: Mapping[str, str] = _NONE
    body: bytes | bytearray = b""
    received_ns: int = 0                    # time of its first byte, by time.monotonic_ns()
    version: str = "1.1"                    # HTTP version

    def header_bytes(self, name: str) -> bytes:
        """Return the undecoded value of a header; empty if there is none."""
        return self.headers.get(name, "").encode("latin-1")

    def json(self) -> Any:
        """Parse the body as JSON; an empty one is {}.

        Raises InvalidRequestError if it is not JSON, TooLargeError for more than LARGE_BYTES, which must be parsed in
        steps.
        """
        if len(self.body) > LARGE_BYTES:
            raise errors.TooLargeError(f"a body of {len(self.body)} bytes: {self.path} takes {LARGE_BYTES} of JSON")
        return parsed(self.body) if self.body.strip() else {}


class HttpResponse(NamedTuple):
    """HTTP response."""
    body: Sequence[bytes | memoryview] = ()         # consecutive pieces
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = JSON
    headers: Mapping[str, str] = _NONE

    @property
    def body_bytes(self) -> int:
        count = 0
        for piece in self.body:
            count += piece.nbytes if isinstance(piece, memoryview) else len(piece)
        return count

    def head(self, keep_alive: bool, framing: str = "", version: str = "1.1") -> bytes:
        """Return the status line and headers.

        Parameters
        ----------
        keep_alive : bool
            False adds "Connection: close".
        framing : str
            Header that delimits the body; "" for Content-Length.
        version : str
            HTTP version of the client: "1.0" needs "Connection: keep-alive" to keep the connection.
        """
        status = self.status
        lines = [_OK if status is HTTPStatus.OK else f"HTTP/1.1 {status.value} {status.phrase}",
                 framing or f"Content-Length: {self.body_bytes}"]
        if self.body or framing:
            lines.append(f"Content-Type: {self.content_type}")
        if not keep_alive:
            lines.append("Connection: close")
        elif version == "1.0":
            lines.append("Connection: keep-alive")
        for name, value in self.headers.items():
            lines.append(f"{name}: {value}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def path_of(target: bytes) -> str:
    """Return the path of a request's target, decoded."""
    path = target.partition(b"?")[0].decode("latin-1")
    return unquote(path) if "%" in path else path


def member(body: Any, name: str, kind: type, default: Any = None) -> Any:
    """Return a member of a JSON object, or its default if absent. Raises InvalidRequestError for another type."""
    value = body.get(name, default) if isinstance(body, dict) else None
    if type(value) is not kind:
        raise errors.InvalidRequestError(f"expected a JSON object whose '{name}' is of type {kind.__name__}")
    return value


def json_text(value: Any) -> bytes:
    """Encode a value as JSON without spaces, as Triton does: scripts search for "state":"READY"."""
    return json.dumps(value, separators=(",", ":")).encode()


def json_response(value: Any) -> HttpResponse:
    return HttpResponse((json_text(value),))


def error_text(message: str) -> bytes:
    """Encode an error message as Triton does: {"error": message}."""
    return json_text({"error": message})


def error_response(status: HTTPStatus, message: str) -> HttpResponse:
    return HttpResponse((error_text(message),), status)


def response_of(error: ServeError) -> HttpResponse:
    """Return the response to an error, with the status of its nearest base class that has one."""
    status = next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)
    return error_response(status, public_text(error))


def accepted(headers: Mapping[str, str]) -> str:
    """Return the first supported content coding that a client accepts, or ""."""
    codings = [part.strip().lower() for part in headers.get("accept-encoding", "").split(",")]
    return next((part for part in codings if part in WINDOW), "")


def compressed(response: HttpResponse, coding: str) -> HttpResponse:
    """Return the response compressed with a coding, or unchanged if the coding is "" or the body is small."""
    if not coding or response.body_bytes < _WORTHWHILE_BYTES:
        return response
    deflater = zlib.compressobj(_LEVEL, wbits=WINDOW[coding])
    body = (*(deflater.compress(piece) for piece in response.body), deflater.flush())
    return response._replace(body=body, headers={**response.headers, "Content-Encoding": coding})


def joined(body: bytes | bytearray, data: bytes) -> bytes | bytearray:
    """Return a body with further data; a body in one piece is not copied."""
    if not body:
        return data
    if isinstance(body, bytearray):
        body += data
        return body
    return bytearray(body) + data
