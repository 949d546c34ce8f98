"""CPU and memory of the machine, under Triton's names, and of this process, as Linux tells them under /proc."""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from infer_server.process import resident_bytes

_PROC = Path("/proc")
_IDLE = (3, 4)                  # columns of /proc/stat: idle, and waiting for a disk
_KIB = 1024


class Machine:
    """Utilisation is that since it was asked for last."""

    def __init__(self) -> None:
        self._ticks = _ticks()

    def gauges(self) -> Iterator[tuple[str, str, float]]:
        """Name, meaning, value; nothing where there is no /proc."""
        before, self._ticks = self._ticks, _ticks()
        busy, every = (now - then for now, then in zip(self._ticks, before, strict=True))
        if self._ticks == (0, 0):
            return
        yield "nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", busy / every if every else 0.0
        memory = _memory()
        total = memory.get("MemTotal", 0)
        yield "nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total
        yield "nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", total - memory.get("MemAvailable", total)
        times = os.times()
        yield "process_cpu_seconds_total", "CPU time of this server, in seconds", times.user + times.system
        yield "process_resident_memory_bytes", "Memory of this server, in bytes", resident_bytes()
        yield "process_open_fds", "Open files and sockets of this server", len(os.listdir(_PROC / "self" / "fd"))


def _ticks() -> tuple[int, int]:
    """Of all CPUs since the machine was started: busy, and all."""
    try:
        first = (_PROC / "stat").read_text().split("\n", 1)[0]
    except OSError:
        return 0, 0
    ticks = [int(column) for column in first.split()[1:9]]
    return sum(ticks) - sum(ticks[column] for column in _IDLE), sum(ticks)


def _memory() -> dict[str, int]:
    lines = (line.split() for line in (_PROC / "meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(value) * _KIB for name, value, *_ in lines}
