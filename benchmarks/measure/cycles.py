"""Counter of the work of a call: core cycles in user mode, or CPU time on machines without a cycle counter.

Wall time varies by tens of percent with other load and with the core's frequency; user-mode cycles of this process and
of threads that it starts later vary by one to three. CPU time depends on the frequency, but not on the load. Create the
counter before a runtime starts its threads, run the programs in turn, and compare their minima.
"""
from __future__ import annotations

import ctypes
import os
import platform
import struct
import time
from collections.abc import Callable

SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}      # perf_event_open
ATTRIBUTE_BYTES = 128
HARDWARE, CPU_CYCLES = 0, 0
INHERIT, EXCLUDE_KERNEL, EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
CALIBRATION_READS = 200     # the smallest difference of so many reads is the cost of a read


class Counter:
    """Counter of `unit`s of this process and of threads that it starts later."""

    def __init__(self) -> None:
        self._cycles = _open_cycles()
        self.unit = "cycles" if self._cycles is not None else "ns of CPU time"
        self._cost = min(-(self.read() - self.read()) for _ in range(CALIBRATION_READS))

    def read(self) -> int:
        if self._cycles is None:
            return time.process_time_ns()
        count: int = struct.unpack("Q", os.read(self._cycles, 8))[0]
        return count

    def of(self, call: Callable[[], object]) -> int:
        """Return the count of one call."""
        before = self.read()
        call()
        return self.read() - before - self._cost


def _open_cycles() -> int | None:
    """Return a descriptor that counts cycles; None if the machine has no counter or the kernel denies access."""
    number = SYSTEM_CALLS.get(platform.machine())
    if number is None:
        return None
    attribute = struct.pack("IIQQQQQ", HARDWARE, ATTRIBUTE_BYTES, CPU_CYCLES, 0, 0, 0,
                            INHERIT | EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR)
    file: int = ctypes.CDLL(None).syscall(number, ctypes.create_string_buffer(attribute, ATTRIBUTE_BYTES), 0, -1, -1, 0)
    return file if file >= 0 else None
