"""HTTP/2 connections by libnghttp2, without input and output: bytes in, events out, bytes out.

This is the only module that imports ngh2, the binding of libnghttp2, whose interface may change before its version
1.0. The server and the client use the names of this module; `is_installed` is False where ngh2 cannot be imported.

    connection = server_connection(max_streams=100, window_bytes=1 << 20)
    connection.receive_data(received)
    for event in connection.events():
        ...
    transport.write(connection.data_to_send())

References
----------
https://www.rfc-editor.org/rfc/rfc9113
https://nghttp2.org/documentation
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

try:
    from ngh2 import (
        Configuration,
        Connection,
        ConnectionClosed,
        DataReceived,
        ErrorCode,
        Event,
        GoAwayReceived,
        NGH2Error,
        PingAcknowledged,
        PingReceived,
        RequestReceived,
        ResponseReceived,
        Role,
        Setting,
        SettingsReceived,
        StreamClosed,
        StreamProtocolError,
        TrailersReceived,
    )
    is_installed = True
except ImportError:
    if TYPE_CHECKING:
        raise
    is_installed = False

__all__ = ["Connection", "ConnectionClosed", "DataReceived", "ErrorCode", "Event", "GoAwayReceived", "NGH2Error",
           "PingAcknowledged", "PingReceived", "RequestReceived", "ResponseReceived", "SettingsReceived",
           "StreamClosed", "StreamProtocolError", "TrailersReceived", "client_connection", "is_installed",
           "server_connection"]

Header = tuple[bytes, bytes]
Headers = Iterable[Header]

_FRAME_BYTES = 64 << 10                 # each DATA frame is an event; gRPC's C core sends as large ones as are allowed
MAX_HEADER_BYTES = 16 << 10             # decoded, with 32 bytes for each field: as gRPC's C core
_MAX_HEADERS = 256
_CONNECTION_WINDOW_BYTES = 1 << 30      # streams have windows of their own, and bytes are counted when they arrive
# Token buckets (burst, tokens per second). A client that cancels calls sends RST_STREAM for each of them: under
# overload with deadlines these are many. libnghttp2's own limit for resets is 1000 and 33 per second.
_RESETS = (20_000, 2_000)
_GLITCHES = (10_000, 330)


def server_connection(max_streams: int, window_bytes: int) -> Connection:
    """Create the server's end of a connection.

    Parameters
    ----------
    max_streams : the number of streams that the client may have open (SETTINGS_MAX_CONCURRENT_STREAMS).
    window_bytes : the bytes of each stream that the client may send before they are acknowledged by
        `acknowledge_received_data` (SETTINGS_INITIAL_WINDOW_SIZE).

    Returns
    -------
    A connection whose SETTINGS are in `data_to_send`. `receive_data` raises NGH2Error for what ends the connection.
    """
    connection = Connection(Role.SERVER, Configuration(
        auto_window_update=False, stream_reset_rate_limit=_RESETS, glitch_rate_limit=_GLITCHES,
        max_inbound_header_list_size=MAX_HEADER_BYTES, max_inbound_header_count=_MAX_HEADERS))
    connection.initiate_connection({
        Setting.MAX_CONCURRENT_STREAMS: max_streams, Setting.INITIAL_WINDOW_SIZE: window_bytes,
        Setting.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES, Setting.MAX_FRAME_SIZE: _FRAME_BYTES})
    connection.set_local_window_size(_CONNECTION_WINDOW_BYTES)
    return connection


def client_connection(window_bytes: int) -> Connection:
    """Create the client's end of a connection, which takes at most `window_bytes` of a stream ahead of its reader."""
    connection = Connection(Role.CLIENT, Configuration(max_inbound_header_list_size=MAX_HEADER_BYTES,
                                                       max_inbound_header_count=_MAX_HEADERS))
    connection.initiate_connection({Setting.ENABLE_PUSH: 0, Setting.INITIAL_WINDOW_SIZE: window_bytes,
                                    Setting.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
                                    Setting.MAX_FRAME_SIZE: _FRAME_BYTES})
    connection.set_local_window_size(_CONNECTION_WINDOW_BYTES)
    return connection
