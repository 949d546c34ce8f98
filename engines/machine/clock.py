"""Clock for work of one thread: CPU time, which does not advance while the thread is not scheduled.

On a busy machine a wall clock also counts the time slices of other threads; for a kernel that takes longer than a time
slice, repetitions cannot remove that error.
"""
from __future__ import annotations

import time

FINE_S = 1e-6       # required resolution; systems that count thread time in milliseconds fall back to the wall clock

_FINE = hasattr(time, "thread_time") and time.get_clock_info("thread_time").resolution <= FINE_S
thread_seconds = time.thread_time if _FINE else time.perf_counter
