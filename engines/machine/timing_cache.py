"""Timing cache: measured times of tactics, kept for later builds.

A time is that of one item on this machine. Its key has everything that affects it: the kernel's spec, the tactic, the
instruction set, the processor and the compiler's version. A build that finds every time in the cache chooses the same
tactics as the build that measured them.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infer_server.engines.errors import ConfigError
from infer_server.engines.files import atomic_write

FORMAT = 1


class TimingCache:
    """Mapping from keys to microseconds, stored in a JSON file; without a path, in memory only."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path else None
        self._times: dict[str, float] = {}
        if self.path and self.path.exists():
            self._times = self._read(self.path)

    @staticmethod
    def _read(path: Path) -> dict[str, float]:
        try:
            content: Any = json.loads(path.read_text())
            if content["format"] != FORMAT:
                raise ConfigError(f"timing cache '{path}' has format {content['format']}, this compiler writes "
                                  f"{FORMAT}; delete it or name another file with --timing-cache")
            return {str(key): float(time) for key, time in content["times_us"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise ConfigError(f"'{path}' is no timing cache ({error}); delete it or name another file with "
                              "--timing-cache") from error

    def get(self, key: str) -> float | None:
        return self._times.get(key)

    def put(self, key: str, microseconds: float) -> None:
        self._times[key] = microseconds

    def __len__(self) -> int:
        return len(self._times)

    def save(self) -> None:
        """Write the file atomically, merged with the times that other builds have added to it."""
        if self.path is None:
            return
        if self.path.exists():
            self._times = {**self._read(self.path), **self._times}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path) as file:
            content = {"format": FORMAT, "times_us": dict(sorted(self._times.items()))}
            file.write(json.dumps(content, indent=0).encode())
