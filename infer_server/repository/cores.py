"""How the instances of all models share the cores: how many a model has, and which CPUs are whose."""
from __future__ import annotations

import threading
from collections.abc import Sequence

from engines.capacity import memory_limit
from infer_server.config.fields import MOST_WORKING_THREADS
from infer_server.errors import ModelConfigError

ARENA_BUDGET_BYTES = 2 << 30        # of one model's instances together, where nobody said how many they shall be


def default_instances(cores: int, threads: int, arena_bytes: int) -> int:
    """One instance for every `threads` cores, as long as their memory stays within the budget; at least one.

    When requests queue, contexts side by side answer more of them than the same cores on one request after the other.
    """
    affordable = ARENA_BUDGET_BYTES // max(arena_bytes, 1)
    return max(1, min(cores // threads, affordable, MOST_WORKING_THREADS // threads))


def check_memory(instances: int, threads: int, arena_bytes: int) -> None:
    """Raise ModelConfigError if the contexts of a model's instances take more memory than there is.

    Parameters
    ----------
    instances : int
        Instances on the CPU.
    threads : int
        Threads of each; a context has an arena for each of its threads.
    arena_bytes : int
        Size of an arena.
    """
    needed, limit = instances * threads * arena_bytes, memory_limit()
    if needed > limit:
        raise ModelConfigError(
            f"instance_group.count: {instances} instances of {threads} threads take {needed >> 20} MiB of memory for "
            f"their tensors ({arena_bytes >> 20} MiB each), more than the limit of {limit >> 20} MiB; write a lower "
            "count or max_batch_size, or fewer threads")


class CpuDealer:
    """Deals CPUs to instances in turn, so that pinned instances of all models share them evenly. Thread-safe."""

    def __init__(self, cpus: Sequence[int]) -> None:
        self._cpus = list(cpus)
        self._next = 0
        self._lock = threading.Lock()

    def deal(self, threads: int) -> tuple[int, ...]:
        """A CPU for each thread of an instance. Raises ModelConfigError if there are fewer CPUs."""
        if threads > len(self._cpus):
            raise ModelConfigError(f"parameter pin: an instance has {threads} threads, but this process may use only "
                                   f"{len(self._cpus)} CPUs; lower threads, or leave out pin")
        with self._lock:
            dealt = [self._cpus[(self._next + i) % len(self._cpus)] for i in range(threads)]
            self._next += threads
        return tuple(dealt)
