"""The clock for work of one thread: CPU time, which stands still while the thread has no core.

On a machine with other things to do, a wall clock also counts the turns that those were given; no number of repetitions
helps a kernel that takes longer than a turn.
"""
from __future__ import annotations

import time

FINE_S = 1e-6       # some systems count a thread's time in ticks of milliseconds; those fall back on the wall clock

_FINE = hasattr(time, "thread_time") and time.get_clock_info("thread_time").resolution <= FINE_S
thread_seconds = time.thread_time if _FINE else time.perf_counter
