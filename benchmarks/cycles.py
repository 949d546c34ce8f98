"""User-mode core cycles, from the kernel's performance counters: a measure that holds on a shared machine.

Wall clock moves with other people's load and with the core's clock by tens of percent; user-mode cycles of this process
and of the threads it makes later move by one to three. Make the counter before a runtime makes its threads, take the
programs in turn, and compare their minima.
"""
from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable, Mapping
from time import perf_counter

SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}      # perf_event_open
ATTRIBUTE_BYTES = 128
HARDWARE, CPU_CYCLES = 0, 0
INHERIT, EXCLUDE_KERNEL, EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
CALIBRATION_READS = 200


class CycleCounter:
    """Counts from when it is made. Raises OSError where the kernel does not let us (perf_event_paranoid above 2)."""

    def __init__(self) -> None:
        number = SYSTEM_CALLS.get(platform.machine())
        if number is None:
            raise OSError(f"no cycle counter on {platform.machine()}")
        attribute = struct.pack("IIQQQQQ", HARDWARE, ATTRIBUTE_BYTES, CPU_CYCLES, 0, 0, 0,
                                INHERIT | EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR)
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.syscall(number, ctypes.create_string_buffer(attribute, ATTRIBUTE_BYTES), 0, -1, -1, 0)
        if self._file < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"perf_event_open: {os.strerror(code)}")
        self._cost = min(-(self.read() - self.read()) for _ in range(CALIBRATION_READS))

    def read(self) -> int:
        """Cycles so far."""
        count: int = struct.unpack("Q", os.read(self._file, 8))[0]
        return count

    def of(self, call: Callable[[], object]) -> int:
        """Cycles of one call."""
        before = self.read()
        call()
        return self.read() - before - self._cost


def interleaved(counter: CycleCounter, calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, int]:
    """{name: fewest cycles of a call}, the calls taken in turn until the time is up."""
    for call in calls.values():
        call()
    best = {name: counter.of(call) for name, call in calls.items()}
    end = perf_counter() + seconds
    while perf_counter() < end:
        for name, call in calls.items():
            best[name] = min(best[name], counter.of(call))
    return best
