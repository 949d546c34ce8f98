"""CPU and memory metrics of the machine, with Triton's names, and of the server's processes, from Linux's /proc."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from infer_server.process import cpu_secs, resident_bytes

_PROC = Path("/proc")
_IDLE = (3, 4)                  # columns of /proc/stat: idle and iowait
_KIB = 1024
_PROCESS_METRICS: tuple[tuple[str, str, Callable[[str], float]], ...] = (
    ("process_cpu_seconds_total", "CPU time of this server, in seconds", cpu_secs),
    ("process_resident_memory_bytes", "Memory of this server, in bytes", resident_bytes),
    ("process_open_fds", "Open files and sockets of this server",
     lambda process: len(os.listdir(_PROC / process / "fd"))),
)

Samples = Mapping[str, float]   # values by labels


class MachineMetrics:
    """Machine metrics. The CPU utilization is that since the previous call of `gauges`."""

    def __init__(self, frontend_pids: Callable[[], Mapping[str, int]] = dict) -> None:
        """Include the processes of frontend workers, whose ids `frontend_pids` returns by name."""
        self._frontend_pids = frontend_pids
        self._ticks = _ticks()

    def gauges(self) -> Iterator[tuple[str, str, Samples]]:
        """Yield name, description and samples of each metric; nothing without /proc."""
        before, self._ticks = self._ticks, _ticks()
        busy, every = (now - then for now, then in zip(self._ticks, before, strict=True))
        if self._ticks == (0, 0):
            return
        yield "nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", {"": busy / every if every else 0.0}
        memory = _memory()
        total = memory.get("MemTotal", 0)
        yield "nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", {"": total}
        yield "nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", {
            "": total - memory.get("MemAvailable", total)}
        # Each process separately: a sum would decrease when one ends, which a counter must not.
        frontend_pids = {f'process="{name}"': str(number) for name, number in self._frontend_pids().items()}
        processes = {'process="engines"': "self", **frontend_pids} if frontend_pids else {"": "self"}
        for name, text, of in _PROCESS_METRICS:
            yield name, text, {labels: value for labels, process in processes.items()
                               if (value := _or_none(of, process)) is not None}


def _or_none(of: Callable[[str], float], process: str) -> float | None:
    """Return a value of a process, or None if the process has ended."""
    try:
        return of(process)
    except OSError:
        return None


def _ticks() -> tuple[int, int]:
    """Return busy and total ticks of all CPUs since boot."""
    try:
        first = (_PROC / "stat").read_text().split("\n", 1)[0]
    except OSError:
        return 0, 0
    ticks = [int(column) for column in first.split()[1:9]]
    return sum(ticks) - sum(ticks[column] for column in _IDLE), sum(ticks)


def _memory() -> dict[str, int]:
    lines = (line.split() for line in (_PROC / "meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(value) * _KIB for name, value, *_ in lines}
