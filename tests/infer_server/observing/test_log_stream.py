"""Tests of the log stream: a file that is moved away, and a device that accepts no data."""
from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from infer_server.observing import log_stream
from infer_server.observing.log_stream import LogStream

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.Logger("test")
    yield logger
    for handler in logger.handlers:
        handler.close()


def test_a_file_that_was_moved_is_opened_anew_when_asked(tmp_path: Path, log: logging.Logger) -> None:
    file, moved = tmp_path / "log", tmp_path / "log.1"
    log.addHandler(handler := LogStream(file))
    log.warning("first")
    file.rename(moved)
    log.warning("second")
    handler.reopen()
    log.warning("third")
    assert (moved.read_text(), file.read_text()) == ("first\nsecond\n", "third\n")


@pytest.mark.parametrize("rotate", [Path.unlink, lambda file: file.rename(f"{file}.1")])
def test_a_file_that_was_moved_or_deleted_is_noticed(
        tmp_path: Path, log: logging.Logger, monkeypatch: pytest.MonkeyPatch, rotate: object) -> None:
    monkeypatch.setattr(log_stream, "_WATCH_SECS", 0.0)
    file = tmp_path / "log"
    log.addHandler(LogStream(file))
    log.warning("first")
    assert callable(rotate)
    rotate(file)
    log.warning("second")
    assert file.read_text() == "second\n"


def test_a_file_that_cannot_be_opened_anew_goes_on(tmp_path: Path, log: logging.Logger) -> None:
    file, moved = tmp_path / "log", tmp_path / "log.1"
    log.addHandler(handler := LogStream(file))
    file.rename(moved)
    file.mkdir()
    handler.reopen()
    log.warning("goes on")
    first, second = moved.read_text().splitlines()
    assert "cannot be reopened" in first and second == "goes on"


@needs_full
def test_a_full_device_costs_one_line(log: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    log.addHandler(LogStream(FULL))
    for _ in range(100):
        log.warning("lost")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and "No space left on device" in lines[0]


def test_lines_that_were_lost_are_counted_when_there_is_room_again(
        tmp_path: Path, log: logging.Logger) -> None:
    """A limit on the file's size stands in for a full disk; a line is written as far as it fits."""
    file = tmp_path / "log"
    log.addHandler(LogStream(file))
    log.warning("first")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))      # Python ignores SIGXFSZ
    try:
        log.warning("second")
        log.warning("third")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.warning("fourth")
    assert file.read_text() == ("first\nseco\n2 lines before this one were lost: the log could not be written\n"
                                "fourth\n")


@needs_full
def test_stderr_on_a_full_device_costs_nothing(log: logging.Logger) -> None:
    before = os.dup(2)
    try:
        with FULL.open("wb") as full:
            os.dup2(full.fileno(), 2)
        log.addHandler(LogStream())
        log.warning("lost")
    finally:
        os.dup2(before, 2)
        os.close(before)


def test_text_that_is_no_unicode_is_written_escaped(tmp_path: Path, log: logging.Logger) -> None:
    log.addHandler(LogStream(tmp_path / "log"))
    log.warning("name \udc80")
    assert (tmp_path / "log").read_text() == "name \\udc80\n"
