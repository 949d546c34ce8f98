"""Bodies that are sent compressed: gzip and deflate (zlib), both ways.

https://www.rfc-editor.org/rfc/rfc9110#section-8.4.1
"""
from __future__ import annotations

import zlib
from collections.abc import Mapping

from infer_server.endpoints.http.messages import HttpRequest, HttpResponse
from infer_server.errors import InvalidRequestError, MemoryLimitError, NotServedError

_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_WORTHWHILE_BYTES = 1 << 10
_LEVEL = 1                      # of speed: tensors hardly get smaller with more


def decompressed(request: HttpRequest, coding: str, most_bytes: int) -> HttpRequest:
    """The request with its body as it was. Raises NotServedError, InvalidRequestError, MemoryLimitError: it would have
    more than `most_bytes`."""
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return request
    if coding not in _WINDOW:
        raise NotServedError(f"Content-Encoding '{coding}' is not served; send {', '.join(_WINDOW)} or none")
    inflater = zlib.decompressobj(_WINDOW[coding])
    try:
        body = inflater.decompress(request.body, most_bytes)
    except zlib.error as error:
        raise InvalidRequestError(f"the body is no {coding}: {error}") from error
    if inflater.unconsumed_tail:
        raise MemoryLimitError(f"the body has more than {most_bytes} bytes when it is decompressed (--max-message-mib)")
    if not inflater.eof:
        raise InvalidRequestError(f"the body is no whole {coding}")
    return request._replace(body=body)


def accepted(headers: Mapping[str, str]) -> str:
    """The coding that a client wants its response in; "" if it said nothing that is served."""
    wanted = [part.strip().lower() for part in headers.get("accept-encoding", "").split(",")]
    return next((part for part in wanted if part in _WINDOW), "")


def compressed(response: HttpResponse, coding: str) -> HttpResponse:
    """The response in that coding ("": as it is), if that is worthwhile."""
    if not coding or response.body_bytes < _WORTHWHILE_BYTES:
        return response
    deflater = zlib.compressobj(_LEVEL, wbits=_WINDOW[coding])
    body = (*(deflater.compress(piece) for piece in response.body), deflater.flush())
    return response._replace(body=body, headers={**response.headers, "Content-Encoding": coding})
