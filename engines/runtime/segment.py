"""Segment: a graph compiled for one or more shapes, which an Engine or a program runs.

Each combination of open extents and values of deciding inputs runs by a specialisation: a plan compiled for these
numbers and kept. A model without open extents has one, made at the build.

`specialise` selects what happens without a specialisation. "background": the symbolic plan runs, a plan with
dynamic kernels, and frequent shapes are specialised on a background thread. "wait": the specialisation is
compiled first; but if each of the last shapes came only once, the symbolic plan runs until a shape recurs. "off": the
symbolic plan runs.
"""
from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from infer_server.engines.capacity import memory_limit
from infer_server.engines.errors import EngineError, InputError, PlanTargetError
from infer_server.engines.ir.dtypes import as_in_memory, dtype_named, memory_dtype
from infer_server.engines.ir.graph import BATCH, Array
from infer_server.engines.plan.extents import (
    Extents,
    Shapes,
    check_bounds,
    extents_of,
    open_extents,
    text,
    value_name,
    value_of,
)
from infer_server.engines.plan.plan import IoTensor, Plan, Step
from infer_server.engines.runtime.caches import CacheContext
from infer_server.engines.runtime.context import ExecutionContext
from infer_server.engines.runtime.contexts import OpenContext, StagedContext
from infer_server.engines.runtime.policy import MEMORY_SHARE, REMEMBERED, Demand, IdleMemory, Kept, Policy
from infer_server.engines.runtime.rerun import LastRun, no_rerun
from infer_server.engines.runtime.specialisation import Specialisation, SpecialisationMaker, on_host

if TYPE_CHECKING:       # background work alone needs it, and it takes milliseconds to import
    from concurrent.futures import ThreadPoolExecutor

MOST_WAITING = 16           # maximum number of specialisations queued in the background
Key = tuple[Any, ...]       # numbers of the open extents, and values of the deciding inputs


class Segment:
    """Specialisations of a plan, made when shapes without one are met. Thread-safe.

    rerun       runs quickly if the feeds match the last run, else returns None
    """
    rerun: Callable[[Mapping[str, Any]], dict[str, Array] | None]

    def __init__(self, plan: Plan, threads: int = 1, cpus: Sequence[int] | None = None, gpu: int = 0,
                 specialiser: Callable[[], SpecialisationMaker] | None = None,
                 policy: Policy = Policy()) -> None:        # noqa: B008
        """Load a plan.

        Parameters
        ----------
        plan : Plan
            Plan that is not a program.
        threads, cpus, gpu
            See Specialisation.
        specialiser : callable, optional
            Returns the compiler of specialisations when it is first needed; raises PlanTargetError if the plan is
            stripped or the compiler is not installed.
        policy : Policy
            When specialisations are compiled, and how many are kept.
        """
        part = plan.open_part
        self.plan, self.part, self.threads, self.policy, self.name = plan, part, threads, policy, plan.name
        self.inputs, self.outputs, self.deciding = part.inputs, part.outputs, part.deciding
        self._cpus, self._gpu, self._specialiser_of = cpus, gpu, specialiser
        self._names = (*open_extents(self.inputs), *map(value_name, self.deciding))
        limit = memory_limit() * MEMORY_SHARE if policy.memory is None else policy.memory
        self._ready = Kept[Key, Specialisation](policy.most, limit)
        self._symbolic = Kept[Key, Specialisation](policy.most, limit)
        self._idle = IdleMemory[Specialisation](Specialisation.close)
        self._enlarged = WeakKeyDictionary[Specialisation, Specialisation]()    # compiled for more dependent items
        self._keys: dict[tuple[Any, ...], Key] = {}         # shapes of inputs, values of deciding ones -> extents
        self._lock = threading.RLock()                      # guards the tables; the other locks are held for seconds
        self._making, self._making_symbolic = threading.Lock(), threading.Lock()
        self._waiting, self._refused = set[Key](), set[Key]()
        self._demand = Demand(policy.most)
        self._specialiser: SpecialisationMaker | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._first = self._loaded(plan)            # always kept: the others use its constants
        self._keep(self._key(plan.extents), self._first)
        for one in part.others:
            self._keep(self._key(one.extents), self._loaded(one, self._first))
        if not self._names:
            self.rerun = self._first.rerun

    @property
    def arena_bytes(self) -> int:
        """Bytes of the buffers of a context for the usual shapes."""
        return self.at(self.usual_shapes()).arena_bytes

    @property
    def is_steady(self) -> bool:
        """True if all is compiled for fixed shapes."""
        return not self._names and self._first.is_steady

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Run on all inputs, of any shapes that the model and the profiles allow."""
        arrays = {name: on_host(name, value) for name, value in feeds.items()}
        engine, fed = self.for_feed(arrays), self._undecided(arrays)
        if engine.plan.dependence and self._specialiser_of and (items := engine.items(fed)) > engine.plan.batch_slots:
            return self._for_items(engine, items).run_arrays(fed)
        results = engine.run_arrays(fed)
        if not self._names:
            return results
        last = LastRun(engine, [(name, array.dtype, array.shape, array.tobytes())
                                for name, array in arrays.items() if name in self.deciding])
        with self._lock:
            self.rerun = last.run if engine is next(reversed(self._ready.values())) else no_rerun
        return results

    def items(self, arrays: Mapping[str, Array]) -> int:
        """Return the number of items in a feed (1 if the model has no batch axis). Raises InputError."""
        return self.for_feed(arrays).items(self._undecided(arrays))

    def _undecided(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the inputs that specialisations have."""
        return {name: array for name, array in arrays.items() if name not in self.deciding} if self.deciding else arrays

    def create_context(self, cpus: Sequence[int] | None = None) -> ExecutionContext | OpenContext | StagedContext:
        """Create a context for one owner thread at a time, with memory for each shape that it has run."""
        if self.deciding:
            return StagedContext(self, self._usual)
        return OpenContext(self, cpus) if self._names else self._first.create_context(cpus)

    def create_cache(self, capacity: int) -> CacheContext:
        """Create a context that keeps the keys and values of a decoder's tokens (see CacheContext)."""
        return CacheContext(self, capacity)

    def caching(self, extents: Extents) -> Specialisation:
        """Load the plan that appends to caches in place, for extents with CACHE_CAPACITY. Raises EngineError."""
        with self._making_symbolic:
            plan = self._specialisers().symbolic(extents)
            if plan is None:
                raise PlanTargetError(f"{self.name}: there are no kernels for caches in place on this target")
            return self._loaded(plan, self._first)

    def close(self) -> None:
        """Stop the background thread and the helper threads of pooled contexts."""
        if self._worker:
            self._worker.shutdown(cancel_futures=True)
            self._worker = None
        for engine in (*self._ready.values(), *self._symbolic.values(), *self._enlarged.values()):
            engine.close()

    # ---- specialisations
    def usual_shapes(self, batch: int = 1) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs for which the plan itself was built."""
        return {io.name: io.shape_of(batch, self.plan.extents) for io in self.inputs}

    @property
    def specialised(self) -> list[Extents]:
        """Extents of the current specialisations, least recently used first."""
        with self._lock:
            return [dict(zip(self._names, key, strict=True)) for key in self._ready]

    def keeps(self, engine: Specialisation) -> bool:
        """Return True if an engine is a specialisation, which nothing will replace, not a symbolic plan."""
        with self._lock:
            return any(engine is one for one in self._ready.values())

    def check(self, shapes: Shapes) -> None:
        """Raise InputError if shapes of inputs are inconsistent or outside the profiles, for open extents."""
        if self._names:
            self.extents(shapes)

    def extents(self, shapes: Shapes, values: Mapping[str, Array] = {}) -> dict[str, Any]:      # noqa: B006
        """Return the extents of inputs of these shapes, batch included, and the values of deciding inputs.

        values: those of deciding inputs; by default the usual ones. Raises InputError as `check`.
        """
        extents: dict[str, Any] = extents_of(self.name, self.inputs, shapes)
        check_bounds(self.name, self.part.profiles, extents)
        if extents.get(BATCH) == 0:
            raise InputError(f"{self.name}: nothing is computed of no items ({text(extents)})")
        return {**extents, **{value_name(name): self._value(name, values) for name in self.deciding}}

    def _value(self, name: str, values: Mapping[str, Array]) -> tuple[float, ...]:
        if name not in values:
            usual: tuple[float, ...] = self.plan.extents[value_name(name)]      # type: ignore[assignment]
            return usual
        wanted = next(io.dtype for io in self.inputs if io.name == name)
        if values[name].dtype != memory_dtype(wanted):
            raise InputError(f"{self.name}: input '{name}' is {values[name].dtype}, the model takes {wanted}")
        return value_of(values[name], wanted)

    def usual_values(self) -> dict[str, Array]:
        """Return the values of deciding inputs for which the plan itself was built."""
        shapes = self.usual_shapes()
        found = {io.name: self._usual(io, shapes[io.name]) for io in self.inputs}
        return {name: value for name, value in found.items() if value is not None}

    def _usual(self, io: IoTensor, shape: tuple[int, ...]) -> Array | None:
        """Return the initial value of an input of a context; None if it has none for this shape."""
        value = np.array(self.plan.extents.get(value_name(io.name), ())).astype(dtype_named(io.dtype))
        return as_in_memory(value).reshape(shape) if value.size and value.size == math.prod(shape) else None

    def timed(self, feeds: Mapping[str, Array], batch: int, repeats: int) -> list[tuple[Step, float]]:
        """Profile the steps that run a feed (see ExecutionContext.profile)."""
        context = self.for_feed(feeds).create_context()
        try:
            return context.profile(batch, repeats)
        finally:
            context.close()

    def plan_of(self, feeds: Mapping[str, Array]) -> Plan:
        """Return the plan that runs a feed."""
        return self.for_feed(feeds).plan

    def for_feed(self, feeds: Mapping[str, Array]) -> Specialisation:
        """Return the specialisation that runs a feed; it does not have the deciding inputs."""
        return self.at({name: array.shape for name, array in feeds.items()}, feeds) if self._names else self._first

    def whole_plan(self) -> Plan:
        """Return the plan with all current specialisations and symbolic plans."""
        if not self._names:
            return self.plan
        with self._lock:
            others = tuple(engine.plan for engine in self._ready.values() if engine.plan.extents != self.plan.extents)
        with self._making_symbolic:
            symbolic = self._specialiser.encoded() if self._specialiser else self.part.symbolic
        return replace(self.plan, fingerprint="", open=replace(self.part, others=others, symbolic=symbolic))

    def at(self, shapes: Shapes, values: Mapping[str, Array] = {}) -> Specialisation:       # noqa: B006
        """Return the specialisation that runs inputs of these shapes.

        values: those of deciding inputs, which it does not have; by default the usual ones. Raises InputError, or an
        error of specialising.
        """
        if not self._names:
            return self._first
        engine = self._at(shapes, values)
        with self._lock:
            self._idle.use(engine, engine.arena_bytes)
        return engine

    def _at(self, shapes: Shapes, values: Mapping[str, Array]) -> Specialisation:
        given = (*(tuple(shapes.get(io.name, ())) for io in self.inputs),
                 *((values[name].dtype, values[name].tobytes()) for name in self.deciding if name in values))
        with self._lock:
            key = self._keys.get(given) if len(shapes) == len(self.inputs) else None
            self.rerun = no_rerun
            if key is not None and (engine := self._ready.get(key)):
                self._demand.count(key)
                self._ready.move_to_end(key)
                return engine
        key = self._key(self.extents(shapes, values))
        with self._lock:
            if len(self._keys) > REMEMBERED * self.policy.most:
                self._keys.clear()
            self._keys[given] = key
            if key in self._ready:
                return self._ready[key]
        return self._missing(key)

    def _missing(self, key: Key) -> Specialisation:
        way = self.policy.specialise if self.part.model else "off"      # a stripped plan makes no specialisations
        with self._lock:
            once, requests = self._demand.comes_once, self._demand.count(key)
        if way == "wait" and not (once and requests == 1):
            return self._specialised(key)
        if way == "background" and requests >= self.policy.uses:
            self._order(key)
        return self._symbolic_plan_for(key)

    def _specialised(self, key: Key) -> Specialisation:
        """Return the specialisation, compiled on this thread unless another thread has just done so."""
        with self._making:
            with self._lock:
                if key in self._ready:
                    return self._ready[key]
            try:
                plan = self._specialisers().plan(self._extents(key))
            except ImportError as error:
                raise self._cannot(key, error) from error
            engine = self._loaded(plan, self._first)
            self._keep(key, engine)
            return engine

    def _symbolic_plan_for(self, key: Key) -> Specialisation:
        """Return the plan of a symbolic plan, or the specialisation if the target has no symbolic plans."""
        with self._making_symbolic:
            with self._lock:
                if found := self._ready.get(key) or self._symbolic.get(key):
                    return found
            try:
                plan = self._specialisers().symbolic(self._extents(key))
            except ImportError as error:
                raise self._cannot(key, error) from error
            if plan:
                engine = self._loaded(plan, self._first) if plan.machine.shared else Specialisation(plan, self.threads)
                with self._lock:
                    self._symbolic.keep(key, engine)
                return engine
        return self._specialised(key)

    def _order(self, key: Key) -> None:
        """Queue a specialisation in the background, unless it is queued, failed before or the queue is full."""
        with self._lock:
            if key in self._waiting or key in self._refused or len(self._waiting) >= MOST_WAITING:
                return
            if self._worker is None:
                from concurrent.futures import ThreadPoolExecutor
                self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"specialise {self.name}")
            self._waiting.add(key)
            self._worker.submit(self._make_in_background, key)

    def _make_in_background(self, key: Key) -> None:
        try:
            if not self._is_ending():
                self._specialised(key)
        except Exception as error:      # any error: the symbolic plan runs, and the thread continues
            import logging
            log = logging.getLogger(__name__)
            if not isinstance(error, EngineError | OSError):
                log.exception("%s: making a specialisation failed", self.name)
            self._refused.add(key)
            log.warning("%s: no specialisation for %s, the symbolic plan serves: %s", self.name,
                        text(self._extents(key)), error)
        finally:
            with self._lock:
                self._waiting.discard(key)
                self._symbolic.pop(key, None)

    def _is_ending(self) -> bool:
        """Return True if the process is exiting: executors accept no work then, and would finish all queued work."""
        try:
            return self._worker is None or not self._worker.submit(int)
        except RuntimeError:
            return True

    def _specialisers(self) -> SpecialisationMaker:
        """Return the compiler of specialisations. Raises PlanTargetError or ImportError if there is none."""
        with self._lock:
            if self._specialiser is None:
                if self._specialiser_of is None:
                    raise PlanTargetError(f"{self.name}: loaded without a compiler of specialisations")
                self._specialiser = self._specialiser_of()
                self._specialiser.first = self._first
            return self._specialiser

    def _keep(self, key: Key, engine: Specialisation) -> None:
        with self._lock:
            self._ready.keep(key, engine)
            self.rerun = no_rerun

    def _loaded(self, plan: Plan, base: Specialisation | None = None) -> Specialisation:
        """Load a specialisation, which shares the constants of `base`."""
        return Specialisation(plan, self.threads, self._cpus, base, self._gpu)

    def _for_items(self, engine: Specialisation, items: int) -> Specialisation:
        """Return a specialisation compiled for at least `items` items; the largest so far is kept."""
        extents = engine.plan.extents
        with self._making:
            larger = self._enlarged.get(engine)
            if larger is None or larger.plan.batch_slots < items:
                try:
                    plan = self._specialisers().plan(extents, 1 << (items - 1).bit_length())
                except ImportError as error:
                    raise self._cannot(tuple(extents.values()), error) from error
                larger = self._enlarged[engine] = self._loaded(plan, self._first)
        with self._lock:
            self._idle.use(larger, larger.arena_bytes)
        return larger

    def _key(self, extents: Extents) -> Key:
        return tuple(extents[name] for name in self._names)

    def _extents(self, key: Key) -> dict[str, Any]:
        return dict(zip(self._names, key, strict=True))

    def _cannot(self, key: Key, error: ImportError) -> PlanTargetError:
        have = "; ".join(map(text, self.specialised))
        return PlanTargetError(f"{self.name}: there is no specialisation for {text(self._extents(key))}, only for "
                               f"{have}; to make one, install what is missing ({error})")
