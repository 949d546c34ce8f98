"""Decompress gzip and deflate (zlib) data within a size limit, in steps that are short enough for the event loop.

Data may expand a thousandfold, so the output is limited and accounted for while it is produced.

https://www.rfc-editor.org/rfc/rfc9110#section-8.4.1
https://github.com/grpc/grpc/blob/master/doc/compression.md
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Generator

from infer_server.errors import InvalidRequestError, TooLargeError
from infer_server.protos.buffers import uninitialised

WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}       # zlib's wbits by coding
_STEP_BYTES = 512 << 10         # output of one step, about 1 to 2 ms
_SLICE_BYTES = 64 << 10         # input given to zlib at a time, since it copies the unconsumed rest
_MAX_FACTOR = 1032              # maximum expansion of deflate
_GZIP_MAGIC = b"\x1f\x8b"
_ZLIB_METHOD = 8                # in the low bits of a zlib stream's first byte


def inflated(data: bytes | bytearray, coding: str, max_bytes: int,
             hold: Callable[[int], None]) -> Generator[None, None, bytearray]:
    """Decompress data of one of the codings in WINDOW; yields between steps.

    Parameters
    ----------
    data : bytes-like
        Compressed data, one stream.
    max_bytes : int
        Limit of the output in bytes.
    hold : callable
        Called with the number of bytes that each step has added; may raise.

    Returns
    -------
    bytearray
        Output, as the value of StopIteration.

    Raises
    ------
    InvalidRequestError
        The data is not exactly one stream of that coding.
    TooLargeError
        The output exceeds `max_bytes`.
    """
    inflater, source = zlib.decompressobj(WINDOW[coding]), memoryview(data)
    output = uninitialised(min(max_bytes, _MAX_FACTOR * len(data)) + 1)
    size = at = 0
    rest: bytes | memoryview = b""
    while not inflater.eof:
        if not rest:
            rest, at = source[at:at + _SLICE_BYTES], at + _SLICE_BYTES
        try:
            piece = inflater.decompress(rest, _STEP_BYTES)
        except zlib.error as error:
            raise InvalidRequestError(f"the body is not valid {coding} data: {error}") from error
        rest = inflater.unconsumed_tail
        if not piece and not rest and not inflater.eof and at >= len(source):
            raise InvalidRequestError(f"the body ends within its {coding} stream")
        if size + len(piece) > max_bytes:
            raise TooLargeError(f"the body has more than {max_bytes} bytes when it is decompressed "
                                "(--max-message-mib, for JSON over HTTP --http-max-json-mib)")
        hold(len(piece))
        output[size:size + len(piece)] = piece
        size += len(piece)
        yield
    if behind := len(inflater.unused_data) + max(0, len(source) - at):
        raise InvalidRequestError(f"the body has {behind} bytes after the end of its {coding} stream; send one stream")
    del output[size:]
    return output


def coding_of(message: bytes | bytearray) -> str:
    """Return the coding of a gRPC message that the transport did not decompress; "" if it is not compressed.

    No message of the protocol begins like a gzip or zlib stream: 0x1f is not a valid tag, and the tags whose low bits
    are 8 are varints in field numbers with which no request begins.
    """
    if message.startswith(_GZIP_MAGIC):
        return "gzip"
    if len(message) > 2 and message[0] & 15 == _ZLIB_METHOD and message[0] < 0x80 and not (
            message[0] << 8 | message[1]) % 31 and message[0] >> 4 == 7:
        return "deflate"
    return ""
