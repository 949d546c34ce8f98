"""Bodies that are sent compressed: gzip and deflate (zlib), both ways.

https://www.rfc-editor.org/rfc/rfc9110#section-8.4.1
"""
from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping

from infer_server.endpoints.http.messages import HttpRequest, HttpResponse
from infer_server.errors import InvalidRequestError, MemoryLimitError, NotServedError

_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_PIECE_BYTES = 4 << 20          # that are decompressed at a time
_SLICE_BYTES = 256 << 10        # that are handed over at a time: what is not consumed of them is copied
_WORTHWHILE_BYTES = 1 << 10
_LEVEL = 1                      # of speed: tensors hardly get smaller with more


async def decompressed(request: HttpRequest, coding: str, most_bytes: int, hold: Callable[[int], None]) -> HttpRequest:
    """The request with its body as it was, which a thousandth of it may have become: piece by piece, between which
    others have their turn. hold: counts the bytes of each. Raises NotServedError, InvalidRequestError,
    MemoryLimitError: it would have more than `most_bytes`; what `hold` raises."""
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return request
    if coding not in _WINDOW:
        raise NotServedError(f"Content-Encoding '{coding}' is not served; send {', '.join(_WINDOW)} or none")
    inflater, body = zlib.decompressobj(_WINDOW[coding]), memoryview(request.body)
    pieces: list[bytes] = []
    size = at = 0
    rest: bytes | memoryview = b""
    while not inflater.eof:
        if not rest:
            rest, at = body[at:at + _SLICE_BYTES], at + _SLICE_BYTES
        try:
            piece = inflater.decompress(rest, _PIECE_BYTES)
        except zlib.error as error:
            raise InvalidRequestError(f"the body is no {coding}: {error}") from error
        rest = inflater.unconsumed_tail
        if not piece and not rest and not inflater.eof and at >= len(body):
            raise InvalidRequestError(f"the body is no whole {coding}")
        size += len(piece)
        if size > most_bytes:
            raise MemoryLimitError(f"the body has more than {most_bytes} bytes when it is decompressed "
                                   "(--max-message-mib)")
        hold(len(piece))
        pieces.append(piece)
        await asyncio.sleep(0)
    return request._replace(body=b"".join(pieces))


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
