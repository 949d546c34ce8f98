"""Attack a gRPC port with HTTP/2 that no client speaks, and check that other clients are served meanwhile.

    python -m scripts.http2_attacks 127.0.0.1:8001 --seeds 8000

Each attack has connections of its own. Before, during and after all of them another client asks ServerLive; the
slowest of its answers is reported. The exit status is 1 if one of them failed.
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
from contextlib import closing, suppress

import grpc

import protos
from protos.grpc_framing import prefix_of
from protos.http2 import NGH2Error, client_connection

LIVE = f"/{protos.INFERENCE_SERVICE}/ServerLive"
INFER = f"/{protos.INFERENCE_SERVICE}/ModelInfer"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
_END_STREAM, _END_HEADERS = 1, 4
_SECS = 20.0                        # for the server to close a connection or to answer


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field without indexing and without compression."""
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


def request_block(path: str = INFER, *more: tuple[str, str]) -> bytes:
    fields = ((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers"),
              ("content-type", "application/grpc"), *more)
    return b"".join(literal(*each) for each in fields)


Pieces = Iterator[bytes]


def rapid_reset() -> Pieces:
    block = request_block()
    for first in range(1, 100_000, 200):
        yield b"".join(frame(_HEADERS, _END_HEADERS, stream, block) + frame(_RST, 0, stream, bytes(4))
                       for stream in range(first, first + 200, 2))


def continuation_flood() -> Pieces:
    yield frame(_HEADERS, 0, 1, request_block())
    for _ in range(2000):
        yield frame(_CONTINUATION, 0, 1, literal("a", "b" * 1000))


def settings_flood() -> Pieces:
    for _ in range(200):
        yield frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 65535)) * 500


def ping_flood() -> Pieces:
    for _ in range(200):
        yield frame(_PING, 0, 0, bytes(8)) * 500


def priority_storm() -> Pieces:
    for _ in range(200):
        yield b"".join(frame(_PRIORITY, 0, stream, struct.pack(">IB", 0, 9)) for stream in range(1, 1001, 2))


def header_bomb() -> Pieces:
    """An entry of 4000 bytes in HPACK's table, and 16,000 references to it in one block (64 MB)."""
    entry = b"\x40" + _length(1) + b"a" + _length(4000) + b"b" * 4000
    for stream in range(1, 21, 2):
        yield frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, request_block() + entry + b"\xbe" * 10_000)


def many_streams() -> Pieces:
    block = request_block()
    for first in range(1, 40_000, 1000):
        yield b"".join(frame(_HEADERS, _END_HEADERS, stream, block) for stream in range(first, first + 1000, 2))


def zero_windows() -> Pieces:
    """Calls whose answers may never be sent."""
    yield frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
    block = request_block(LIVE)
    for first in range(1, 10_000, 1000):
        yield b"".join(frame(_HEADERS, _END_HEADERS, stream, block) + frame(_DATA, _END_STREAM, stream, prefix_of(0))
                       for stream in range(first, first + 1000, 2))


def window_overflow() -> Pieces:
    yield frame(_WINDOW, 0, 0, struct.pack(">I", (1 << 31) - 1)) * 2


def lying_lengths() -> Pieces:
    block = request_block()
    for stream in range(1, 2001, 2):
        yield frame(_HEADERS, _END_HEADERS, stream, block) + frame(_DATA, 0, stream, prefix_of(0xFFFFFFFF) + bytes(999))


def goaways() -> Pieces:
    for _ in range(100):
        yield frame(_GOAWAY, 0, 0, struct.pack(">II", 0, 0)) + frame(_HEADERS, _END_HEADERS, 1, request_block())


ATTACKS: tuple[Callable[[], Pieces], ...] = (
    rapid_reset, continuation_flood, settings_flood, ping_flood, priority_storm, header_bomb, many_streams,
    zero_windows, window_overflow, lying_lengths, goaways)


def attack(address: tuple[str, int], pieces: Pieces, linger_secs: float = 1.0) -> str:
    """Send the pieces on a connection, without reading. Returns how it ended."""
    with closing(socket.create_connection(address, timeout=linger_secs)) as connection:
        try:
            connection.sendall(_PREFACE + frame(_SETTINGS, 0, 0))
            for piece in pieces:
                connection.sendall(piece)
        except TimeoutError:
            return "the server takes no more"
        except OSError:
            return "closed while it was sent"
        try:
            while connection.recv(1 << 16):
                pass
        except TimeoutError:
            return "open"
        except OSError:                     # a reset: what was sent behind the end was not read
            return "closed"
    return "closed"


def exchange(message: bytes) -> bytes:
    """The bytes of a connection with three calls."""
    client = client_connection(1 << 20)
    sent = client.data_to_send()
    for path in (LIVE, INFER, LIVE):
        stream = client.send_request([(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()),
                                      (b":authority", b"x"), (b"te", b"trailers"),
                                      (b"content-type", b"application/grpc")])
        with suppress(NGH2Error):
            client.send_data(stream, prefix_of(len(message)) + message, end_stream=True)
        sent += client.data_to_send()
    return sent


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Bytes that are cut, changed, doubled or left out somewhere."""
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
    """A client that asks ServerLive all the time."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address, self._stop_asking = address, threading.Event()
        self.answered, self.slowest_secs, self.failure = 0, 0.0, ""

    def run(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            live = channel.unary_unary(LIVE)
            while not self._stop_asking.is_set():
                began = time.monotonic()
                try:
                    live(b"", timeout=_SECS)
                except grpc.RpcError as error:
                    self.failure = str(error.code())
                    return
                self.answered += 1
                self.slowest_secs = max(self.slowest_secs, time.monotonic() - began)
                self._stop_asking.wait(0.01)

    def stop(self) -> None:
        self._stop_asking.set()
        self.join(2 * _SECS)


def run(address: str, seeds: int, first_seed: int = 0, attacks: tuple[Callable[[], Pieces], ...] = ATTACKS
        ) -> tuple[Counter[str], Watcher]:
    """Run all attacks, and `seeds` connections whose bytes are mutated. Returns how these ended, and the watcher."""
    host, _, port = address.rpartition(":")
    where = host, int(port)
    watcher, seen = Watcher(address), Counter[str]()
    watcher.start()
    for pieces in attacks:
        seen[f"{pieces.__name__}: {attack(where, pieces())}"] += 1
    message = b"\x0a\x01m"
    for seed in range(first_seed, first_seed + seeds):
        rng = random.Random(seed)
        data = mutated(exchange(message), rng)
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
    parser.add_argument("--seeds", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    options = parser.parse_args()
    seen, watcher = run(options.address, options.seeds, options.seed)
    for what, count in sorted(seen.items()):
        print(f"{count:6} {what}")
    print(f"{watcher.answered} answers to another client meanwhile, the slowest after {watcher.slowest_secs:.3f} s")
    if watcher.failure:
        print(f"another client failed: {watcher.failure}", file=sys.stderr)
    return 1 if watcher.failure else 0


if __name__ == "__main__":
    sys.exit(main())
