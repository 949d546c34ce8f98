"""Frames between processes arrive whole and in order, however the bytes are divided."""
from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from infer_server.frontend_workers import link
from infer_server.frontend_workers.link import Frame, Link
from scripts.testing.numpy_engine import TIMEOUT_SECS


class Collects(Link):
    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self.gone = asyncio.Event()

    def received(self, frame: Frame) -> None:
        self.frames.append(frame)

    def closed(self, reason: Exception | None) -> None:
        self.gone.set()


class Keeps:
    """Transport that collects the bytes written to it."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def writelines(self, pieces: list[bytes]) -> None:
        self.data += b"".join(pieces)


def some_frames(sizes: list[int]) -> list[Frame]:
    rng = np.random.default_rng(len(sizes))
    return [Frame(link.INFER, i, rng.bytes(size), rng.bytes(i % 50), b"ipv4:127.0.0.1:%d" % i, i * 10**15, i / 8)
            for i, size in enumerate(sizes)]


def written(frames: list[Frame]) -> bytes:
    keeps, end = Keeps(), Collects()
    end.connection_made(keeps)          # type: ignore[arg-type]
    for frame in frames:
        half = len(frame.payload) // 2
        end.send(frame.kind, frame.number, frame.payload[:half], memoryview(frame.payload)[half:], about=frame.about,
                 peer=frame.peer, received_ns=frame.received_ns, remaining_secs=frame.remaining_secs)
    return keeps.data


@pytest.mark.parametrize("piece", [1, 7, 100, 65_536, 262_144])
def test_frames_arrive_whole_and_in_order_however_they_are_cut(piece: int) -> None:
    sizes = [0, 1, 300, 70_000, 5, 65_535, 65_536, 65_537, 3] if piece > 1 else [0, 1, 300, 70_000, 5]
    frames = some_frames(sizes * (1 + min(piece // 1000, 4)))
    assert received(written(frames), piece) == frames


@pytest.mark.parametrize("piece", [1000, 65_536, 262_144])
def test_what_is_said_beside_a_payload_may_be_more_than_the_buffer_has(piece: int) -> None:
    """Many short HTTP headers become several times as long in JSON, and may exceed the receive buffer."""
    frames = [Frame(link.HTTP, i, bytes([i]) * size, b"%d" % i * about, b"127.0.0.1:1")
              for i, (size, about) in enumerate([(3, 10), (64_000, 220_000), (0, 300_000), (65_535, 262_144 - 44),
                                                 (1, 700_000), (100_000, 700_000), (10, 1)])]
    assert received(written(frames), piece) == frames


def received(data: bytes, piece: int) -> list[Frame]:
    """Return the frames parsed from data that arrives in pieces of at most `piece` bytes."""
    end, at = Collects(), 0
    while at < len(data):
        room = end.get_buffer(-1)
        assert len(room), "the event loop ends a connection that has no room"
        count = min(piece, len(room), len(data) - at)
        room[:count] = data[at:at + count]
        at += count
        end.buffer_updated(count)
    return end.frames


def test_both_ends_of_a_socket_learn_that_the_other_is_gone() -> None:
    async def main() -> list[Frame]:
        loop, ends = asyncio.get_running_loop(), (Collects(), Collects())
        for end, half in zip(ends, socket.socketpair(), strict=True):
            await loop.create_unix_connection(lambda end=end: end, sock=half)       # type: ignore[misc]
        frames = some_frames([10, 3 << 20, 0])
        for frame in frames:
            ends[0].send(frame.kind, frame.number, frame.payload, about=frame.about, peer=frame.peer,
                         received_ns=frame.received_ns, remaining_secs=frame.remaining_secs)
        while len(ends[1].frames) < len(frames):
            await asyncio.sleep(0)
        ends[1]._transport.close()
        await asyncio.wait_for(asyncio.gather(*(end.gone.wait() for end in ends)), TIMEOUT_SECS)
        ends[0].send(link.READ)             # nobody has it, and nothing happens
        return ends[1].frames

    assert asyncio.run(main()) == some_frames([10, 3 << 20, 0])


