"""OpenEngine: an engine for models with open extents or inputs whose values decide about shapes or branches.

Each combination of extents and deciding values runs by a specialisation: a plan compiled for these numbers and kept.

    engine.run({"x": array})        # as Engine.run
    context.at({"x": (1, 77)})      # an ExecutionContext for these shapes

`specialise` selects what happens without a specialisation. "background": the general version runs, a plan with
dynamic-shape kernels, and frequent shapes are specialised on a background thread. "wait": the specialisation is
compiled first; but if each of the last shapes came only once, the general version runs until a shape recurs. "off": the
general version runs.
"""
from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Protocol

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
from infer_server.engines.plan.plan import GeneralKernel, IoTensor, Plan, Step
from infer_server.engines.runtime.engine import Engine, PlanProperties
from infer_server.engines.runtime.open_context import CacheContext, OpenContext
from infer_server.engines.runtime.policy import MEMORY_SHARE, REMEMBERED, Demand, IdleMemory, Kept, Policy
from infer_server.engines.runtime.rerun import LastRun
from infer_server.engines.runtime.staged import StagedContext

MOST_WAITING = 16           # maximum number of specialisations queued in the background
Key = tuple[Any, ...]       # numbers of the open extents, and values of the deciding inputs
Ordered = tuple[Future[None], float]        # a queued specialisation and the time when it was queued

log = logging.getLogger(__name__)


class SpecialisationMaker(Protocol):
    """Interface of the compiler of specialisations: infer_server.engines.compiler.specialise.Specialiser.

    first: the engine whose constants they share
    """
    first: Engine | None

    def plan(self, extents: Extents, max_batch: int | None = None) -> Plan: ...
    def general(self, extents: Extents) -> Plan: ...

    @property
    def generals(self) -> tuple[tuple[GeneralKernel, ...], tuple[bytes, ...]]: ...


class OpenEngine(PlanProperties):
    """Engine of a plan with open extents. Thread-safe."""

    def __init__(self, plan: Plan, specialiser: Callable[[], SpecialisationMaker], threads: int = 1,
                 cpus: Sequence[int] | None = None, policy: Policy = Policy(), gpu: int = 0) -> None:  # noqa: B008
        """Load a plan with open extents.

        specialiser: returns the compiler of specialisations when it is first needed; raises PlanTargetError if the plan
        is stripped or the compiler is not installed.
        """
        assert plan.open is not None
        self.plan, self.part, self.threads, self.policy = plan, plan.open, threads, policy
        self._cpus, self._gpu = tuple(cpus) if cpus is not None else None, gpu
        self._names = (*open_extents(self.part.inputs), *map(value_name, self.part.deciding))
        limit = memory_limit() * MEMORY_SHARE if policy.memory is None else policy.memory
        self._ready = Kept[Key, Engine](policy.most, limit)         # specialisations
        self._general = Kept[Key, Engine](policy.most, limit)
        self._idle = IdleMemory[Engine](Engine.close)
        self._keys: dict[tuple[Any, ...], Key] = {}         # shapes of inputs, values of deciding ones -> extents
        self._last: LastRun | None = None                     # last run, by the engine at the end of `_ready`
        self._lock = threading.RLock()                      # guards the tables; the other locks are held for seconds
        self._making, self._making_general = threading.Lock(), threading.Lock()
        self._waiting, self._refused = dict[Key, Ordered](), dict[Key, str]()
        self._demand = Demand(policy.most)
        self._make = specialiser
        self._specialiser: SpecialisationMaker | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._first = Engine(plan, threads, self._cpus, gpu=gpu)  # always kept: the others use its constants
        self._first.larger = lambda items: self._larger(plan.extents, items)
        self._keep(self._key(plan.extents), self._first)
        for one in self.part.others:
            self._keep(self._key(one.extents), self._engine(one))

    # ---- interface of Engine
    @property
    def inputs(self) -> tuple[IoTensor, ...]:
        return self.part.inputs

    @property
    def outputs(self) -> tuple[IoTensor, ...]:
        return self.part.outputs

    @property
    def arena_bytes(self) -> int:
        """Bytes of the buffers of a context for the usual shapes."""
        return self.at(self.usual_shapes()).arena_bytes

    def run(self, feeds: Mapping[str, Array] | Array) -> dict[str, Array]:
        """Run the model (see Engine.run) on any shapes that the model and the profiles allow."""
        if type(feeds) is not dict:
            feeds = self.feeds_of(feeds)
        if (again := self.rerun(feeds)) is not None:
            return again
        arrays = {name: as_in_memory(np.asarray(value)) for name, value in self.defaults.complete(feeds).items()}
        engine = self.for_feed(arrays)
        made = engine.run_arrays({name: array for name, array in arrays.items() if name not in self.part.deciding})
        last = LastRun(engine, [(name, array.dtype, array.shape, array.tobytes())
                              for name, array in arrays.items() if name in self.part.deciding])
        with self._lock:
            self._last = last if engine is next(reversed(self._ready.values())) else None
        return made

    def rerun(self, feeds: Mapping[str, Any]) -> dict[str, Array] | None:
        """Run quickly if the feeds match the last run, else return None (see Engine.rerun)."""
        last = self._last
        return last.run(feeds) if last else None

    def create_context(self, cpus: Sequence[int] | None = None) -> OpenContext | StagedContext:
        """Create a context for one owner thread at a time, with memory for each shape that it has run."""
        if self.part.deciding:
            return StagedContext(self, self._usual)
        return OpenContext(self, cpus)

    def create_cache(self, capacity: int) -> CacheContext:
        """Create a context that keeps the keys and values of a decoder's tokens (see CacheContext)."""
        return CacheContext(self, capacity)

    def caching(self, extents: Extents) -> Engine:
        """Return an engine that appends to caches in place, for extents with CACHE_CAPACITY. Raises EngineError."""
        with self._making_general:
            return self._engine(self._specialisers().general(extents))

    def close(self) -> None:
        """Stop the background thread and the helper threads of pooled contexts."""
        if self._worker:
            self._worker.shutdown(cancel_futures=True)
            self._worker = None
        for engine in (*self._ready.values(), *self._general.values()):
            engine.close()

    # ---- specialisations
    def usual_shapes(self, batch: int = 1) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs for which the plan itself was built."""
        return {io.name: io.shape_of(batch, self.plan.extents) for io in self.part.inputs}

    @property
    def specialised(self) -> list[Extents]:
        """Extents of the current specialisations, the last used at the end."""
        with self._lock:
            return [dict(zip(self._names, key, strict=True)) for key in self._ready]

    def keeps(self, engine: Engine) -> bool:
        """Return True if an engine is a specialisation, which nothing will replace, not a general version."""
        with self._lock:
            return any(engine is one for one in self._ready.values())

    def check(self, shapes: Shapes) -> None:
        """Raise InputError if shapes of inputs are inconsistent or outside the profiles."""
        self.extents(shapes)

    def extents(self, shapes: Shapes, values: Mapping[str, Array] = {}) -> dict[str, Any]:      # noqa: B006
        """Return the extents of inputs of these shapes, batch included, and the values of deciding inputs.

        values: those of deciding inputs; by default the usual ones. Raises InputError as `check`.
        """
        extents: dict[str, Any] = extents_of(self.name, self.part.inputs, shapes)
        check_bounds(self.name, self.part.profiles, extents)
        if extents.get(BATCH) == 0 and not self.policy.segment:
            raise InputError(f"{self.name}: nothing is computed of no items ({text(extents)})")
        return {**extents, **{value_name(name): self._value(name, values) for name in self.part.deciding}}

    @property
    def deciding(self) -> tuple[str, ...]:
        return self.part.deciding

    def _value(self, name: str, values: Mapping[str, Array]) -> tuple[float, ...]:
        if name not in values:
            usual: tuple[float, ...] = self.plan.extents[value_name(name)]      # type: ignore[assignment]
            return usual
        wanted = next(io.dtype for io in self.part.inputs if io.name == name)
        if values[name].dtype != memory_dtype(wanted):
            raise InputError(f"{self.name}: input '{name}' is {values[name].dtype}, the model takes {wanted}")
        return value_of(values[name], wanted)

    def usual_values(self) -> dict[str, Array]:
        """Return the values of deciding inputs for which the plan itself was built."""
        shapes = self.usual_shapes()
        found = {io.name: self._usual(io, shapes[io.name]) for io in self.part.inputs}
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

    def for_feed(self, feeds: Mapping[str, Array]) -> Engine:
        """Return the engine that runs a feed; it does not have the deciding inputs."""
        return self.at({name: array.shape for name, array in feeds.items()}, feeds)

    def whole_plan(self) -> Plan:
        """Return the plan with all current specialisations and general kernels."""
        with self._lock:
            others = tuple(engine.plan for engine in self._ready.values() if engine.plan.extents != self.plan.extents)
            general, made = self._specialiser.generals if self._specialiser else (self.part.general, ())
        machine = replace(self.plan.machine, code=tuple(dict.fromkeys((*self.plan.machine.code, *made))))
        return replace(self.plan, machine=machine, open=replace(self.part, others=others, general=general),
                       fingerprint="")

    def takes(self, extents: Extents) -> bool:
        """Return True if the model can be specialised for these numbers and the usual values; it is then."""
        try:
            self.at({io.name: io.shape_of(1, extents) for io in self.part.inputs})
        except EngineError:
            return False
        return True

    def at(self, shapes: Shapes, values: Mapping[str, Array] = {}) -> Engine:       # noqa: B006
        """Return the engine that runs inputs of these shapes.

        values: those of deciding inputs, which the engine does not have; by default the usual ones. Raises InputError,
        or an error of specialising.
        """
        engine = self._at(shapes, values)
        with self._lock:
            self._idle.use(engine, engine.arena_bytes)
        return engine

    def _at(self, shapes: Shapes, values: Mapping[str, Array]) -> Engine:
        given = (*(tuple(shapes.get(io.name, ())) for io in self.part.inputs),
                 *((values[name].dtype, values[name].tobytes()) for name in self.part.deciding if name in values))
        with self._lock:
            key = self._keys.get(given) if len(shapes) == len(self.part.inputs) else None
            self._last = None
            if key is not None and (engine := self._ready.get(key)):
                self._demand.again(key)
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

    def _missing(self, key: Key) -> Engine:
        way = self.policy.specialise
        with self._lock:
            once = self._demand.comes_once
            new = self._demand.is_new(key)
        if way == "off" or new and (once or self.policy.segment):
            return self._general_version(key)
        if way == "wait":
            return self._specialised(key)
        if self.part.general and not self.policy.segment:
            with self._lock:
                frequent = self._demand.count_run(key) >= self.policy.uses
            if frequent:
                self._order(key)
            return self._general_version(key)
        return self._made_soon(key) or self._general_version(key)

    def _made_soon(self, key: Key) -> Engine | None:
        """Queue a specialisation in the background; return it if it is ready within the patience of the policy.

        Does not wait if there is a general version.
        """
        ordered = self._order(key)
        if ordered is None or key in self._general:
            return None
        made, since = ordered
        wait([made], max(since + self.policy.patience - time.monotonic(), 0))
        with self._lock:
            return self._ready.get(key)

    def _specialised(self, key: Key) -> Engine:
        """Return the specialisation, compiled on this thread unless another thread has just done so."""
        with self._making:
            with self._lock:
                if key in self._ready:
                    return self._ready[key]
            try:
                plan = self._specialisers().plan(self._extents(key))
            except ImportError as error:
                raise self._cannot(key, error) from error
            engine = self._engine(plan)
            self._keep(key, engine)
            return engine

    def _general_version(self, key: Key) -> Engine:
        with self._making_general:
            with self._lock:
                if found := self._ready.get(key) or self._general.get(key):
                    return found
            try:
                plan = self._specialisers().general(self._extents(key))
            except ImportError as error:
                raise self._cannot(key, error) from error
            engine = self._engine(plan) if plan.machine.shared else Engine(plan, self.threads)
            with self._lock:
                self._general.keep(key, engine)
            return engine

    def _order(self, key: Key) -> Ordered | None:
        """Queue a specialisation in the background, once; return None if it failed before or the queue is full."""
        with self._lock:
            if key in self._waiting or key in self._refused or len(self._waiting) >= MOST_WAITING:
                return self._waiting.get(key)
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"specialise {self.name}")
            self._waiting[key] = self._worker.submit(self._make_in_background, key), time.monotonic()
            return self._waiting[key]

    def _make_in_background(self, key: Key) -> None:
        try:
            if not self._is_ending():
                self._specialised(key)
        except Exception as error:      # any error: the general version runs, and the thread continues
            if not isinstance(error, EngineError | OSError):
                log.exception("%s: making a specialisation failed", self.name)
            self._refused[key] = str(error)
            log.warning("%s: no specialisation for %s, the general version serves: %s", self.name,
                        text(self._extents(key)), error)
        finally:
            with self._lock:
                self._waiting.pop(key, None)
                self._general.pop(key, None)

    def _is_ending(self) -> bool:
        """Return True if the process is exiting: executors accept no work then, and would finish all queued work."""
        try:
            return self._worker is None or not self._worker.submit(int)
        except RuntimeError:
            return True

    def _specialisers(self) -> SpecialisationMaker:
        with self._lock:
            if self._specialiser is None:
                self._specialiser = self._make()
                self._specialiser.first = self._first
            return self._specialiser

    def _keep(self, key: Key, engine: Engine) -> None:
        with self._lock:
            self._ready.keep(key, engine)
            self._last = None

    def _engine(self, plan: Plan) -> Engine:
        engine = Engine(plan, self.threads, self._cpus, self._first, self._gpu)
        engine.larger = lambda items: self._larger(plan.extents, items)
        return engine

    def _larger(self, extents: Extents, items: int) -> Engine:
        """Return the specialisation for a larger batch of items that depend on each other."""
        with self._making:
            try:
                return self._engine(self._specialisers().plan(extents, items))
            except ImportError as error:
                raise self._cannot(tuple(extents.values()), error) from error

    def _key(self, extents: Extents) -> Key:
        return tuple(extents[name] for name in self._names)

    def _extents(self, key: Key) -> dict[str, Any]:
        return dict(zip(self._names, key, strict=True))

    def _cannot(self, key: Key, error: ImportError) -> PlanTargetError:
        have = "; ".join(map(text, self.specialised))
        return PlanTargetError(f"{self.name}: there is no specialisation for {text(self._extents(key))}, only for "
                               f"{have}; to make one, install what is missing ({error})")
