"""Distribute CPU cores among the instances of all models: default instance counts and CPU pinning."""
from __future__ import annotations

import threading
from collections.abc import Sequence

from infer_server.config.fields import MAX_WORKING_THREADS
from infer_server.engines.capacity import memory_limit
from infer_server.errors import ModelConfigError

ARENA_BUDGET_BYTES = 2 << 30        # total arena memory of one model's instances when their number is the default


def default_instances(cores: int, threads: int, arena_bytes: int) -> int:
    """Return the default number of instances: one for every `threads` cores, within the memory budget, at least one.

    Several contexts side by side have a higher throughput than the same cores on one request after the other.

    Parameters
    ----------
    cores : int
        Cores that instances may use.
    threads : int
        Threads of an instance.
    arena_bytes : int
        Size of the arena of one instance.
    """
    affordable = ARENA_BUDGET_BYTES // max(arena_bytes, 1)
    return max(1, min(cores // threads, affordable, MAX_WORKING_THREADS // threads))


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


def check_state_memory(sequences: int, capacity: int, token_bytes: int) -> None:
    """Raise ModelConfigError if growable states of all sequences may take more memory than there is.

    Parameters
    ----------
    sequences : int
        Slots of all instances.
    capacity : int
        Largest number of tokens of a sequence.
    token_bytes : int
        Size of a token in all states.
    """
    needed, limit = sequences * capacity * token_bytes, memory_limit()
    if needed > limit:
        raise ModelConfigError(
            f"parameter state_capacity: {sequences} sequences of up to {capacity} tokens take {needed >> 20} MiB of "
            f"memory for their states ({token_bytes} bytes for each token), more than the limit of {limit >> 20} MiB; "
            "write a lower state_capacity, or fewer max_candidate_sequences or instances")


class CpuDealer:
    """Round-robin allocator of CPUs for pinned instances of all models. Thread-safe."""

    def __init__(self, cpus: Sequence[int]) -> None:
        self._cpus = list(cpus)
        self._next = 0
        self._lock = threading.Lock()

    def deal(self, threads: int) -> tuple[int, ...]:
        """Return one CPU for each thread of an instance.

        Raises
        ------
        ModelConfigError
            The process may use fewer CPUs than the instance has threads.
        """
        if threads > len(self._cpus):
            raise ModelConfigError(f"parameter pin: an instance has {threads} threads, but this process may use only "
                                   f"{len(self._cpus)} CPUs; lower threads, or leave out pin")
        with self._lock:
            dealt = [self._cpus[(self._next + i) % len(self._cpus)] for i in range(threads)]
            self._next += threads
        return tuple(dealt)
