"""Results of a long-running command, stored as they are found; it continues after parts that fail or hang."""
from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Findings:
    """Recorder of results, which prints them and writes them to a file."""

    def __init__(self, path: Path | None, minutes: float) -> None:
        self.path, self.end = path, time.monotonic() + 60 * minutes
        self.lost: Callable[[], bool] = lambda: False       # returns True if this process cannot continue
        self.values: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}

    def __call__(self, key: str, value: Any) -> None:
        self.values[key] = value
        print(f"{key:60s} {value}", flush=True)
        if self.path:
            self.path.write_text(json.dumps(self.values, indent=1, default=str))

    def is_due(self, key: str) -> bool:
        """Return True if there is time left and the result is neither known nor failed."""
        return not {key, f"FAILED {key}"} & self.values.keys() and time.monotonic() < self.end

    @contextmanager
    def part(self, name: str, seconds: float | None = None) -> Iterator[None]:
        """Run a part of the command; record an exception as its failure and continue with the next part.

        seconds: time limit after which the process restarts without the part, because a kernel that hangs blocks its
        thread; None: no limit.
        """
        begin = time.monotonic()
        watch = threading.Timer(seconds or 0, self._give_up, (name, seconds, threading.get_ident()))
        watch.daemon = True
        if seconds:
            watch.start()
        try:
            yield
        except Exception:
            self(f"FAILED {name}", traceback.format_exc())
            if self.lost():
                self._start_anew()
        finally:
            watch.cancel()
        self(f"seconds for {name}", round(time.monotonic() - begin, 1))

    def _give_up(self, name: str, seconds: float, thread: int) -> None:
        where = "".join(traceback.format_stack(sys._current_frames().get(thread)))
        self(f"FAILED {name}", f"no end after {seconds:g} s, in\n{where}")
        self._start_anew()

    def _start_anew(self) -> None:
        """Restart the program if results are stored in a file; it continues after the failed part."""
        if self.path:
            left = str(max(self.end - time.monotonic(), 0) / 60)
            os.execv(sys.executable, [*sys.orig_argv, "--minutes", left])
