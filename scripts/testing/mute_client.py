"""gRPC client that sends requests and does not read. It implements HTTP/2 itself, because every library reads.

https://www.rfc-editor.org/rfc/rfc9113 and, for the literal header fields,
https://www.rfc-editor.org/rfc/rfc7541#section-6.2.2
"""
from __future__ import annotations

import socket
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_FRAME_BYTES = 16384                    # largest frame that every server must accept
_FIRST_WINDOW = 65535
_INITIAL_WINDOW_SIZE = 4                # the setting


class MuteClient:
    """Connection that reads only while the server's flow control permits no more data to be sent."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0))
        self._connection_window = _FIRST_WINDOW
        self._stream_window = _FIRST_WINDOW
        self._windows: dict[int, int] = {}
        self._stream = -1

    def send_request(self, path: str, message: bytes, announced: int = 0, **headers: str) -> None:
        """Send a request on a new stream.

        announced: length in the message's prefix, if `message` is incomplete. headers: grpc_timeout="300m" is the
        header grpc-timeout.
        """
        self._stream += 2
        self._windows[self._stream] = 0
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers",
                  "content-type": "application/grpc"}
        fields |= {name.replace("_", "-"): text for name, text in headers.items()}
        self._send(_frame(_HEADERS, _END_HEADERS, self._stream, b"".join(_literal(*field) for field in fields.items())))
        left = memoryview(b"\0" + struct.pack(">I", announced or len(message)) + message)
        while left:
            window = min(self._connection_window, self._stream_window + self._windows[self._stream], _FRAME_BYTES)
            if window <= 0:
                kind, stream, _ = self.read_frame()
                if kind == _RST_STREAM and stream == self._stream:
                    return                          # the server has reset the stream
                continue
            piece, left = left[:window], left[window:]
            self._send(_frame(_DATA, 0 if left or announced else _END_STREAM, self._stream, piece))
            self._connection_window -= len(piece)
            self._windows[self._stream] -= len(piece)

    def read_frame(self) -> tuple[int, int, bytes]:
        """Return the type, stream and payload of the next frame; raise EOFError at the end of the connection."""
        head = self._read(9)
        payload = self._read(int.from_bytes(head[:3], "big"))
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        if kind == _WINDOW_UPDATE and stream == 0:
            self._connection_window += int.from_bytes(payload, "big")
        elif kind == _WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind == _SETTINGS and not flags & _ACK:
            for i in range(0, len(payload), 6):
                setting, value = struct.unpack(">HI", payload[i:i + 6])
                if setting == _INITIAL_WINDOW_SIZE:
                    self._stream_window = value
            self._send(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._send(_frame(_PING, _ACK, 0, payload))
        return kind, stream, payload

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


def _frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _literal(*field: str) -> bytes:
    """Encode a header field without indexing and compression; name and value are shorter than 127 bytes."""
    return b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in field)
