"""Write log records to a file or stderr without failing callers or growing a buffer.

A record that the device does not take (ENOSPC, EIO, a closed pipe) is dropped: the first one is reported once on
stderr, the number of dropped records once the device takes records again. A file is reopened by reopen(), and within a
second after something else has moved or deleted it, as logrotate does.
"""
from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

_STDERR = 2
_WATCH_SECS = 1.0               # interval of the checks whether the file was moved
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class LogStream(logging.Handler):
    """Logging handler that writes each record with one system call."""

    def __init__(self, path: Path | None = None) -> None:
        """Open the file, or stderr if `path` is None. Raises OSError if the file cannot be opened."""
        super().__init__()
        self.path = Path(os.path.abspath(path)) if path else None
        self._descriptor = self._open_descriptor()
        self._check_at = time.monotonic() + _WATCH_SECS
        self._dropped = 0               # records dropped since the last one that was written
        self._is_within_line = False    # True if only a part of the last record was written

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:               # the caller's arguments do not match its format
            self.handleError(record)
            return
        if self.path and time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + _WATCH_SECS
            if self._has_moved():
                self._try_reopen()
        self._write_line(text)

    def reopen(self) -> None:
        """Reopen the file, as after a rotation, from any thread; keep the old file if that fails."""
        if self.path:
            self.acquire()
            try:
                self._try_reopen()
            finally:
                self.release()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        super().close()

    def _open_descriptor(self) -> int:
        if self.path:
            return os.open(self.path, _FLAGS, 0o666)
        try:                            # duplicate: if stderr were closed, a socket could get its number
            return os.dup(_STDERR) if sys.stderr else -1
        except OSError:
            return -1

    def _has_moved(self) -> bool:
        assert self.path is not None
        try:
            there = os.stat(self.path)
        except OSError:
            return True
        return not os.path.samestat(there, os.fstat(self._descriptor))

    def _try_reopen(self) -> None:
        try:
            descriptor = self._open_descriptor()
        except OSError as error:
            self._write_line(f"the log file {self.path} cannot be reopened, and the old one is still used: "
                             f"{error.strerror}")
            return
        os.close(self._descriptor)
        self._descriptor, self._is_within_line = descriptor, False

    def _write_line(self, text: str) -> None:
        if self._descriptor < 0:
            return
        if self._dropped:
            text = f"{self._dropped} lines before this one were lost: the log could not be written\n{text}"
        try:
            self._write(("\n" if self._is_within_line else "") + text + "\n")
        except OSError as error:
            self._dropped += 1
            if self._dropped == 1 and self.path:
                self._report(error)
        else:
            self._dropped = 0

    def _write(self, text: str) -> None:
        rest = memoryview(text.encode(errors="backslashreplace"))
        while rest:
            rest = rest[os.write(self._descriptor, rest):]
            self._is_within_line = bool(rest)

    def _report(self, error: OSError) -> None:
        """Report once on stderr why the file cannot be written to."""
        line = (f"infer-server: error: --log-file {self.path}: {error.strerror}; lines are lost until it can be "
                "written\n")
        try:
            os.write(_STDERR, line.encode(errors="backslashreplace"))
        except OSError:
            return                      # there is nowhere to report it


def reopen_log() -> bool:
    """Reopen the files of the root logger; return False if it has none."""
    files = [handler for handler in logging.getLogger().handlers if isinstance(handler, LogStream) and handler.path]
    for handler in files:
        handler.reopen()
    return bool(files)
