"""Tests of gRPC over HTTP/2: message framing, timeouts, status texts and binary metadata."""
from __future__ import annotations

import random

import pytest

from infer_server.protos.grpc_framing import (
    MessageReader,
    MessageTooLargeError,
    binary_text,
    binary_value,
    percent_decoded,
    percent_encoded,
    prefix_of,
    timeout_secs,
    timeout_text,
)


@pytest.mark.parametrize("seed", range(30))
def test_messages_are_read_however_their_bytes_arrive(seed: int) -> None:
    rng = random.Random(seed)
    messages = [(rng.randbytes(rng.choice((0, 1, 4, 5, 6, 300, 70_000, 2_500_000))), rng.random() < 0.3)
                for _ in range(4)]
    stream = b"".join(prefix_of(len(message), flag) + message for message, flag in messages)
    reader, found, at = MessageReader(1 << 22), list[tuple[bytes, bool]](), 0
    while at < len(stream):
        size = rng.choice((1, 2, 5, 7, 1000, 16384, 1 << 20)) if len(stream) > 10_000 else rng.randint(1, 9)
        if size < 100 and at > 1000:
            size = 50_000
        found += [(bytes(message), flag) for message, flag in reader.feed(stream[at:at + size])]
        at += size
    assert found == messages and reader.is_between


def test_a_message_is_refused_when_its_length_is_known() -> None:
    reader = MessageReader(100)
    assert list(reader.feed(prefix_of(101)[:4])) == []
    with pytest.raises(MessageTooLargeError, match=r"larger than max \(101 vs. 100\)"):
        reader.feed(prefix_of(101)[4:])


def test_a_message_in_part_takes_no_more_memory_than_twice_what_has_arrived() -> None:
    reader = MessageReader(1 << 32)
    reader.feed(prefix_of((1 << 32) - 1))
    reader.feed(bytes(1 << 20))
    reader.feed(bytes(3 << 20))
    assert not reader.is_between and len(reader._buffer) <= 8 << 20


@pytest.mark.parametrize(("text", "secs"), [(b"1H", 3600.0), (b"2M", 120.0), (b"3S", 3.0), (b"40m", 0.04),
                                            (b"500u", 5e-4), (b"99999999n", 0.099999999), (b"0n", 0.0)])
def test_timeouts_have_six_units(text: bytes, secs: float) -> None:
    assert timeout_secs(text) == pytest.approx(secs)


@pytest.mark.parametrize("text", [b"", b"1", b"S", b"123456789S", b"-1S", b"1.5S", b"1 S", b"1s"])
def test_a_timeout_that_is_none_is_found(text: bytes) -> None:
    assert timeout_secs(text) is None


@pytest.mark.parametrize("secs", [0.0, 1e-9, 0.3, 59.5, 3600.0, 1e7, 3e11])
def test_a_timeout_is_written_as_finely_as_it_can_be(secs: float) -> None:
    text = timeout_text(secs)
    assert len(text) <= 9 and timeout_secs(text) == pytest.approx(secs, rel=1e-6, abs=1e-9)
    assert timeout_secs(timeout_text(1e20)) == 99_999_999 * 3600.0


@pytest.mark.parametrize("text", ["", "plain", "100 %", "line\nbreak", "äöü €", "\x00\x7f"])
def test_status_texts_survive_the_header(text: str) -> None:
    encoded = percent_encoded(text)
    assert encoded.isascii() and percent_decoded(encoded) == text
    assert all(0x20 <= byte <= 0x7E for byte in encoded)


@pytest.mark.parametrize("value", [b"", b"a", b"ab", b"abc", bytes(range(256))])
def test_binary_metadata_survive_the_header(value: bytes) -> None:
    assert binary_value(binary_text(value)) == value
    with pytest.raises(ValueError, match="not base64"):
        binary_value(b"*")
