"""One line that is rewritten while a load test runs; nothing where there is no terminal."""
from __future__ import annotations

import sys
from typing import TextIO

from clients.load.measure import Summary
from clients.load.schedule import Load

CLEAR = "\r\033[K"


class Progress:
    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()

    def window(self, load: Load, seconds: float, summary: Summary) -> None:
        """Shows the summary of the last window, `seconds` into the measurement."""
        errors = sum(summary.errors.values())
        self._write(f"{load}: {seconds:.1f} s, {summary.throughput:.1f} infer/s, p50 {summary.latency.p50:.2f} ms, "
                    f"p99 {summary.latency.p99:.2f} ms, {errors} errors")

    def text(self, text: str) -> None:
        self._write(text)

    def clear(self) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        if self._live:
            self._stream.write(CLEAR + text)
            self._stream.flush()
