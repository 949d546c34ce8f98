"""Decompression and compression of gRPC messages within limits.

gRPC's C core decompresses a message without a limit before it delivers it: a few hundred kilobytes may become
gigabytes. Therefore its decompression is disabled, and messages are decompressed here, within the limits of a message
and of the bytes in flight.
"""
from __future__ import annotations

import zlib
from functools import partial
from typing import cast

from infer_server.endpoints.inflight import Inflight, OpenCall
from infer_server.protocol.compression import coding_of, inflated
from infer_server.workers import run_steps

_GZIP_BYTES = 1 << 10               # smaller responses are not compressed
_MAX_CONTROL_BYTES = 4 << 20        # maximum decompressed size of messages other than inference


async def plain(data: bytes, max_bytes: int, inflight: Inflight, open_call: OpenCall) -> bytes:
    """Return the message of an inference call, decompressed if it is compressed.

    max_bytes: the limit of a message. open_call: the call that its bytes are counted for. Raises InvalidRequestError,
    MemoryLimitError.
    """
    if not (coding := coding_of(data)):
        return data
    output = await inflight.inflate(inflated(data, coding, max_bytes, partial(inflight.hold, open_call)))
    return cast(bytes, output)              # a bytearray that is not modified any more


def plain_control(data: bytes) -> bytes:
    """Return another call's message, decompressed if compressed. Raises InvalidRequestError, MemoryLimitError."""
    coding = coding_of(data)
    return bytes(run_steps(inflated(data, coding, _MAX_CONTROL_BYTES, lambda _: None))) if coding else data


def gzipped(message: bytes) -> bytes | None:
    """Return a message compressed with gzip, or None if that is not smaller."""
    if len(message) < _GZIP_BYTES:
        return None
    packer = zlib.compressobj(1, wbits=16 + zlib.MAX_WBITS)
    packed = packer.compress(message) + packer.flush()
    return packed if len(packed) < len(message) else None
