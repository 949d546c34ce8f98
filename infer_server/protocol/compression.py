"""Decompresses gzip and deflate (zlib) within a bound, in steps that are short enough for the event loop.

A thousandth of what it becomes is enough to send it, so the output is bounded and counted while it is made.

https://www.rfc-editor.org/rfc/rfc9110#section-8.4.1
https://github.com/grpc/grpc/blob/master/doc/compression.md
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Generator

from infer_server.errors import InvalidRequestError, TooLargeError
from protos.buffers import uninitialised

WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}       # zlib's wbits by coding
_STEP_BYTES = 512 << 10         # made in one step: a millisecond or two
_SLICE_BYTES = 64 << 10         # handed to zlib at a time: what it does not consume of them is copied
_MOST_FACTOR = 1032             # that deflate can grow by
_GZIP_MAGIC = b"\x1f\x8b"
_ZLIB_METHOD = 8                # in the low bits of a zlib stream's first byte


def inflated(data: bytes | bytearray, coding: str, most_bytes: int,
             hold: Callable[[int], None]) -> Generator[None, None, bytearray]:
    """Decompress `data`; yields between two steps.

    Parameters
    ----------
    data : the compressed bytes, one stream.
    coding : "gzip" or "deflate".
    most_bytes : the limit of the output in bytes.
    hold : called with the number of bytes that each step has added; may raise.

    Returns
    -------
    The output, as the value of StopIteration.

    Raises
    ------
    InvalidRequestError : `data` is not one whole stream of that coding.
    TooLargeError : the output exceeds `most_bytes`.
    """
    inflater, source = zlib.decompressobj(WINDOW[coding]), memoryview(data)
    output = uninitialised(min(most_bytes, _MOST_FACTOR * len(data)) + 1)
    size = at = 0
    rest: bytes | memoryview = b""
    while not inflater.eof:
        if not rest:
            rest, at = source[at:at + _SLICE_BYTES], at + _SLICE_BYTES
        try:
            piece = inflater.decompress(rest, _STEP_BYTES)
        except zlib.error as error:
            raise InvalidRequestError(f"the body is no {coding}: {error}") from error
        rest = inflater.unconsumed_tail
        if not piece and not rest and not inflater.eof and at >= len(source):
            raise InvalidRequestError(f"the body is no whole {coding}")
        if size + len(piece) > most_bytes:
            raise TooLargeError(f"the body has more than {most_bytes} bytes when it is decompressed "
                                "(--max-message-mib, for JSON over HTTP --http-max-json-mib)")
        hold(len(piece))
        output[size:size + len(piece)] = piece
        size += len(piece)
        yield
    if behind := len(inflater.unused_data) + max(0, len(source) - at):
        raise InvalidRequestError(f"the body has {behind} bytes behind the end of its {coding} stream: send one stream")
    del output[size:]
    return output


def coding_of(message: bytes | bytearray) -> str:
    """Return the coding of a gRPC message that the transport has left compressed; "" if it is not compressed.

    No message of the protocol begins as a gzip or zlib stream does: 0x1f is no tag, and tags whose low bits are 8 are
    numbers in odd fields, which no request starts with.
    """
    if message.startswith(_GZIP_MAGIC):
        return "gzip"
    if len(message) > 2 and message[0] & 15 == _ZLIB_METHOD and message[0] < 0x80 and not (
            message[0] << 8 | message[1]) % 31 and message[0] >> 4 == 7:
        return "deflate"
    return ""
