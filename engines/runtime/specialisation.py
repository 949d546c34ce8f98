"""Specialisation: a loaded plan for one number of every open extent, for any number of threads."""
from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from infer_server.engines.backends import device_of
from infer_server.engines.backends.device import Loaded, Show
from infer_server.engines.errors import ConfigError, InputError
from infer_server.engines.ir.dtypes import as_in_memory, memory_dtype
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.extents import Extents
from infer_server.engines.plan.plan import IoTensor, Plan
from infer_server.engines.plan.symbolic.plans import LateMachine, SymbolicPlan
from infer_server.engines.runtime.context import ExecutionContext, names_of


def _checked_cpus(cpus: Sequence[int] | None, threads: int) -> tuple[int, ...] | None:
    if cpus is None:
        return None
    if len(set(cpus)) != threads or len(cpus) != threads:
        raise ConfigError(f"cpus={list(cpus)}: {threads} threads take as many CPUs, each another one")
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(cpus)
    if unknown := sorted(set(cpus) - allowed):
        raise ConfigError(f"cpus={list(cpus)}: this process may not use {unknown}; it has {sorted(allowed)}")
    return tuple(cpus)


class SpecialisationMaker(Protocol):
    """Interface of the compiler of specialisations: infer_server.engines.compiler.specialise.Specialiser.

    first: the specialisation whose constants they share
    """
    first: Specialisation | None

    def plan(self, extents: Extents, max_batch: int | None = None) -> Plan: ...
    def symbolic(self, extents: Extents) -> Plan | None: ...
    def encoded(self) -> bytes | memoryview: ...


class PooledContext:
    """Context manager of a pooled context, which returns to the pool on exit."""
    __slots__ = ("_context", "_pool")

    def __init__(self, pool: deque[ExecutionContext], context: ExecutionContext) -> None:
        self._pool, self._context = pool, context

    def __enter__(self) -> ExecutionContext:
        return self._context

    def __exit__(self, *error: object) -> None:
        self._pool.append(self._context)


def _rerun_of(pool: deque[ExecutionContext]) -> Callable[[Mapping[str, Any]], dict[str, Array] | None]:
    """Return Specialisation.rerun for a pool of contexts; a closure looks up no attributes of it at each run."""
    take, put = pool.pop, pool.append

    def rerun(feeds: Mapping[str, Any]) -> dict[str, Array] | None:
        try:
            context = take()
        except IndexError:
            return None
        try:
            return context.rerun.run(feeds) if context.rerun else None
        finally:
            put(context)

    return rerun


class Specialisation:
    """A loaded plan for fixed shapes. Thread-safe.

    A run takes a context from a pool, or makes one if all are in use.

    rerun       runs quickly if names, shapes and dtypes are those of the last run; else runs nothing, returns None
    """

    def __init__(self, plan: Plan, threads: int = 1, cpus: Sequence[int] | None = None,
                 base: Specialisation | None = None, gpu: int = 0) -> None:
        """Load a plan.

        Parameters
        ----------
        plan : Plan
            Plan read from a file or just built.
        threads : int
            Threads of each context.
        cpus : sequence of int, optional
            CPUs to which the threads are pinned.
        base : Specialisation, optional
            Specialisation whose plan this plan shares constants with.
        gpu : int
            Index of the GPU, for a plan for GPUs.

        Raises
        ------
        PlanCorruptError, PlanTargetError, ConfigError
        """
        if threads < 1:
            raise ConfigError(f"threads={threads}: at least 1")
        self._cpus = _checked_cpus(cpus, threads)
        self.plan, self.threads = plan, threads
        device = device_of(plan.machine.backend, gpu)
        self._loaded: Loaded = device.load(plan, threads, base._loaded if base else None)
        self._feeds = Feeds(plan)
        self._unread = _unread(plan)
        self._idle: deque[ExecutionContext] = deque()      # append and pop of a deque are atomic
        self.rerun = _rerun_of(self._idle)

    @property
    def inputs(self) -> tuple[IoTensor, ...]:
        return self.plan.inputs

    @property
    def outputs(self) -> tuple[IoTensor, ...]:
        return self.plan.outputs

    @property
    def is_steady(self) -> bool:
        """True if all is compiled, so that the time of an execution hardly depends on its values."""
        return not any(step.fallback for step in self.plan.machine.steps)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the buffers of one context."""
        return self._loaded.arena_bytes

    @cached_property
    def bytes(self) -> int:
        """Bytes of the constants and of the buffers of one context."""
        machine = self.plan.machine
        return len(machine.constants) + machine.expanded_bytes + self.arena_bytes

    def create_context(self, cpus: Sequence[int] | None = None) -> ExecutionContext:
        """Make a context with memory of its own (see Engine.create_context)."""
        cpus = _checked_cpus(cpus, self.threads) or self._cpus
        return ExecutionContext(self.plan, self._loaded.execution(cpus))

    def items(self, arrays: Mapping[str, Array]) -> int:
        """Return the number of items in a feed (1 if the model has no batch axis). Raises InputError."""
        return self._feeds.check(arrays)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Run the model on a feed of any number of items. Raises InputError."""
        return self.run_arrays({name: on_host(name, value) for name, value in feeds.items()})

    def run_arrays(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model on arrays in the dtypes of memory (see `infer_server.engines.ir.dtypes.as_in_memory`)."""
        items = self._feeds.check(arrays)
        if self._unread:
            arrays = {name: array for name, array in arrays.items() if name not in self._unread}
        context = self._taken()
        try:
            if not 1 <= items <= self.plan.batch_slots:
                return _run_slices(context, self.plan, arrays, items)
            results = context.run(arrays, items)
            context.expect(items, self._unread)
            return results
        finally:
            self._idle.append(context)

    def show(self, feeds: Mapping[str, Array], show: Show) -> None:
        """Run, and call `show` with a view of each output as soon as it is complete, for plans of one thread.

        Raises InputError as `run`, and for more than max_batch items.
        """
        arrays = {name: on_host(name, value) for name, value in feeds.items()}
        items = self._feeds.check(arrays)
        with self.pooled_context() as context:
            for name in arrays.keys() - self._unread:
                np.copyto(context.input(name, items), arrays[name])
            context.show(items, show)

    def pooled_context(self) -> PooledContext:
        """Return a pooled context, or a new one if all are in use, as a context manager."""
        return PooledContext(self._idle, self._taken())

    def _taken(self) -> ExecutionContext:
        try:
            return self._idle.pop()
        except IndexError:
            return self.create_context()

    def close(self) -> None:
        """Stop the helper threads of pooled contexts and free their memory; the specialisation remains usable."""
        while self._idle:
            self._idle.pop().close()


def on_host(name: str, value: Any) -> Array:
    """Convert a feed to an array in the dtypes of memory. Raises InputError if it is on a GPU."""
    if hasattr(value, "__cuda_array_interface__") and not isinstance(value, np.ndarray):
        raise InputError(f"input '{name}' lies on a GPU: make a context and bind it, context.bind('{name}', array)")
    return as_in_memory(np.asarray(value))


class Feeds:
    """Validator of feeds: the expected dtypes and shapes of a plan's inputs."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._expected = {io.name: (memory_dtype(io.dtype), io.batched, view.shape)
                          for io, view in zip(plan.inputs, plan.machine.inputs, strict=True)}

    def check(self, arrays: Mapping[str, Array]) -> int:
        """Return the number of items in the feeds (1 if the model has no batch axis). Raises InputError."""
        if len(arrays) != len(self._expected) or any(name not in self._expected for name in arrays):
            self._refuse_names(arrays)
        items: int | None = None
        for name, (dtype, batched, shape) in self._expected.items():
            array = arrays[name]
            if array.dtype != dtype:
                raise InputError(f"{self._plan.name}: input '{name}' is {array.dtype}, the model takes {dtype}")
            if (array.shape[1:] if batched else array.shape) != shape or array.ndim < batched:
                expected = ["batch", *shape] if batched else [*shape]
                raise InputError(f"{self._plan.name}: input '{name}' has shape {list(array.shape)}, the model takes "
                                 f"[{', '.join(map(str, expected))}]")
            if batched:
                if items is not None and len(array) != items:
                    self._refuse_counts(arrays)
                items = len(array)
        return 1 if items is None else items

    def _refuse_names(self, arrays: Mapping[str, Array]) -> None:
        taken = names_of(self._expected)
        if unknown := [name for name in arrays if name not in self._expected]:
            raise InputError(f"{self._plan.name} has no input '{unknown[0]}'; it has {taken}")
        missing = next(name for name in self._expected if name not in arrays)
        raise InputError(f"{self._plan.name}: input '{missing}' is missing; the model takes {taken}")

    def _refuse_counts(self, arrays: Mapping[str, Array]) -> None:
        counts = [f"'{name}' has {len(arrays[name])}" for name, (_, batched, _) in self._expected.items() if batched]
        raise InputError(f"{self._plan.name}: inputs disagree on the batch: {', '.join(counts)}")


_unread_of: WeakKeyDictionary[SymbolicPlan, frozenset[str]] = WeakKeyDictionary()


def _unread(plan: Plan) -> frozenset[str]:
    """Return the inputs whose values are not read: no step reads their buffer, and no output is in it."""
    machine = plan.machine
    if not isinstance(machine, LateMachine) or machine.symbolic is None:
        return _unread_by(plan)
    if machine.symbolic not in _unread_of:
        _unread_of[machine.symbolic] = _unread_by(machine.symbolic.traced)
    return _unread_of[machine.symbolic]


def _unread_by(plan: Plan) -> frozenset[str]:
    machine = plan.machine
    # Unknown for plans that run from their graph or on a GPU, and for steps without operands.
    if not machine.code or any(step.launch or not (step.operands or step.fallback) for step in machine.steps):
        return frozenset()
    read = {view.buffer for view in machine.outputs}
    for step in machine.steps:
        read.update(operand.buffer for operand in step.operands if operand.buffer is not None)
        if step.fallback:
            read.update(view.buffer for view in step.fallback.inputs if not isinstance(view, str))
    return frozenset(io.name for io, view in zip(plan.inputs, machine.inputs, strict=True) if view.buffer not in read)


def _run_slices(context: ExecutionContext, plan: Plan, arrays: Mapping[str, Array], items: int) -> dict[str, Array]:
    slots = plan.batch_slots
    if plan.dependence:
        raise InputError(f"{plan.name}: {items} items, but the plan takes 1 to {slots} at once, and they cannot be run "
                         f"in slices, for they depend on each other: {plan.dependence}. Build it with --max-batch "
                         f"{max(items, 1)}")
    results = {io.name: np.empty(io.shape_of(items), memory_dtype(io.dtype)) for io in plan.outputs}
    for start in range(0, items, slots):
        part = slice(start, min(start + slots, items))
        feeds = {io.name: arrays[io.name][part] if io.batched else arrays[io.name] for io in plan.inputs
                 if io.name in arrays}
        outputs = context.run(feeds, part.stop - part.start)
        for io in plan.outputs:
            items_of = (slice(None),) * io.batch_axis + (part,) if io.batched else ...
            results[io.name][items_of] = outputs[io.name]
    return results
