"""Messages over gRPC that were sent compressed.

gRPC's C core decompresses a message without a limit, and hands it on when all of it is there: a few hundred kilobytes
become gigabytes. So it is told to leave messages as they came (aio.aio_server), and they are decompressed here, within
the limits of a message and of what is in flight.
"""
from __future__ import annotations

import zlib
from functools import partial
from typing import cast

from infer_server.endpoints.inflight import Inflight, OpenCall
from infer_server.protocol.compression import coding_of, inflated
from infer_server.workers import at_once

_GZIP_BYTES = 1 << 10               # smaller answers are not worth being compressed
_MOST_CONTROL_BYTES = 4 << 20       # of a compressed message that is no inference, decompressed


async def plain(data: bytes, most_bytes: int, inflight: Inflight, held: OpenCall) -> bytes:
    """Return an inference's message, decompressed if it is not.

    most_bytes: the limit of a message. held: the call that its bytes are counted for. Raises InvalidRequestError,
    MemoryLimitError.
    """
    if not (coding := coding_of(data)):
        return data
    output = await inflight.inflate(inflated(data, coding, most_bytes, partial(inflight.hold, held)))
    return cast(bytes, output)              # a bytearray, which nobody changes


def plain_control(data: bytes) -> bytes:
    """Return the message of any other call, decompressed if it is not. Raises InvalidRequestError, MemoryLimitError."""
    coding = coding_of(data)
    return bytes(at_once(inflated(data, coding, _MOST_CONTROL_BYTES, lambda _: None))) if coding else data


def gzipped(message: bytes) -> bytes | None:
    """Return a message as gzip, if that is smaller."""
    if len(message) < _GZIP_BYTES:
        return None
    packer = zlib.compressobj(1, wbits=16 + zlib.MAX_WBITS)
    packed = packer.compress(message) + packer.flush()
    return packed if len(packed) < len(message) else None
