"""OpenEngine: a loaded plan whose model has open extents, or inputs whose values decide what is computed. It runs any
legal shapes and values, each by a specialisation: a plan for these numbers, kept for the next time.

    engine.run({"x": array})        # as Engine.run
    context.at({"x": (1, 77)})      # an ExecutionContext for these shapes

Where there is no specialisation yet, `specialise` says what happens. "background": the general version serves, the same
graph by kernels that take extents at run time, and a shape that comes often is specialised on a thread of its own.
"wait" makes the specialisation first; where the last shapes came once each, the general version serves until a shape
comes again. "off" makes none, the general version serves.
"""
from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from engines.capacity import memory_limit
from engines.errors import EngineError, InputError, PlanTargetError
from engines.ir.dtypes import as_in_memory, dtype_named, memory_dtype
from engines.ir.graph import BATCH, Array
from engines.plan.extents import (
    Extents,
    Shapes,
    check_bounds,
    extents_of,
    open_extents,
    text,
    value_name,
    value_of,
)
from engines.plan.plan import GeneralKernel, IoTensor, Plan, Step
from engines.runtime.engine import Engine, OfPlan
from engines.runtime.open_context import OpenContext
from engines.runtime.policy import MEMORY_SHARE, REMEMBERED, Demand, IdleMemory, Policy
from engines.runtime.rerun import LastRun
from engines.runtime.staged import StagedContext

MOST_WAITING = 16           # specialisations to be made in the background
Key = tuple[Any, ...]       # the numbers of the open extents, and the values of deciding inputs
Ordered = tuple[Future[None], float]        # what is made in the background, and since when

log = logging.getLogger(__name__)


class SpecialisationMaker(Protocol):
    """What makes specialisations: engines.compiler.specialise.Specialiser.

    first: the engine whose constants they share
    """
    first: Engine | None

    def plan(self, extents: Extents, max_batch: int | None = None) -> Plan: ...
    def general(self, extents: Extents) -> Plan: ...

    @property
    def generals(self) -> tuple[tuple[GeneralKernel, ...], tuple[bytes, ...]]: ...


class OpenEngine(OfPlan):
    """Thread-safe, as Engine is."""

    def __init__(self, plan: Plan, specialiser: Callable[[], SpecialisationMaker], threads: int = 1,
                 cpus: Sequence[int] | None = None, policy: Policy = Policy(), gpu: int = 0) -> None:  # noqa: B008
        """plan: of a model with open extents. specialiser: called when one is wanted; PlanTargetError: there is none,
        for the plan is stripped or the compiler is not installed."""
        assert plan.open is not None
        self.plan, self.part, self.threads, self.policy = plan, plan.open, threads, policy
        self._cpus, self._gpu = tuple(cpus) if cpus is not None else None, gpu
        self._names = (*open_extents(self.part.inputs), *map(value_name, self.part.deciding))
        self._ready: OrderedDict[Key, Engine] = OrderedDict()       # the one used last at the end
        self._general: OrderedDict[Key, Engine] = OrderedDict()
        self._idle = IdleMemory[Engine](Engine.close)
        self._keys: dict[tuple[Any, ...], Key] = {}         # shapes of inputs, values of deciding ones -> extents
        self._last: LastRun | None = None                     # of what is at the end of `_ready`
        self._lock = threading.RLock()                      # of the tables; the others are held for seconds
        self._making, self._making_general = threading.Lock(), threading.Lock()
        self._waiting: dict[Key, Ordered] = {}
        self._refused: dict[Key, str] = {}
        self._demand = Demand(policy.most)
        self._make = specialiser
        self._specialiser: SpecialisationMaker | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._first = Engine(plan, threads, self._cpus, gpu=gpu)  # kept for the others, which use its constants
        self._first.larger = lambda items: self._larger(plan.extents, items)
        self._keep(self._key(plan.extents), self._first)
        for one in self.part.others:
            self._keep(self._key(one.extents), self._engine(one))

    # ---- as of an Engine
    @property
    def inputs(self) -> tuple[IoTensor, ...]:
        return self.part.inputs

    @property
    def outputs(self) -> tuple[IoTensor, ...]:
        return self.part.outputs

    @property
    def arena_bytes(self) -> int:
        """Of a context that has met the usual shapes."""
        return self.at(self.usual_shapes()).arena_bytes

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """As Engine.run, for any shapes that the model and the profiles allow."""
        again = self.rerun(feeds)
        if again is not None:
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
        """As Engine.rerun."""
        last = self._last
        return last.run(feeds) if last else None

    def create_context(self, cpus: Sequence[int] | None = None) -> OpenContext | StagedContext:
        """A context for one owner thread at a time; it has memory for each of the shapes that it met."""
        if self.part.deciding:
            return StagedContext(self, self._usual)
        return OpenContext(self, cpus)

    def close(self) -> None:
        """Stop the background thread, and the helper threads of the pooled contexts."""
        if self._worker:
            self._worker.shutdown(cancel_futures=True)
            self._worker = None
        for engine in (*self._ready.values(), *self._general.values()):
            engine.close()

    # ---- specialisations
    def usual_shapes(self, batch: int = 1) -> dict[str, tuple[int, ...]]:
        """Those of the inputs that the plan itself is for."""
        return {io.name: io.shape_of(batch, self.plan.extents) for io in self.part.inputs}

    @property
    def specialised(self) -> list[Extents]:
        """The extents for which there is a specialisation now, the one used last at the end."""
        with self._lock:
            return [dict(zip(self._names, key, strict=True)) for key in self._ready]

    def keeps(self, engine: Engine) -> bool:
        """Whether it is a specialisation: nothing will come in its place."""
        with self._lock:
            return any(engine is one for one in self._ready.values())

    def check(self, shapes: Shapes) -> None:
        """Raises InputError: inputs of these shapes do not fit together, or the profiles."""
        self.extents(shapes)

    def extents(self, shapes: Shapes, values: Mapping[str, Array] = {}) -> dict[str, Any]:      # noqa: B006
        """The extents in inputs of these shapes, the batch among them, and the values of deciding inputs, the usual
        ones where they are not given. Raises InputError as `check` does."""
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
        """Those of deciding inputs that the plan itself is for."""
        shapes = self.usual_shapes()
        found = {io.name: self._usual(io, shapes[io.name]) for io in self.part.inputs}
        return {name: value for name, value in found.items() if value is not None}

    def _usual(self, io: IoTensor, shape: tuple[int, ...]) -> Array | None:
        """What an input of a context holds before it is written."""
        value = np.array(self.plan.extents.get(value_name(io.name), ())).astype(dtype_named(io.dtype))
        return as_in_memory(value).reshape(shape) if value.size and value.size == math.prod(shape) else None

    def timed(self, feeds: Mapping[str, Array], batch: int, repeats: int) -> list[tuple[Step, float]]:
        """As ExecutionContext.profile, for a feed."""
        context = self.for_feed(feeds).create_context()
        try:
            return context.profile(batch, repeats)
        finally:
            context.close()

    def plan_of(self, feeds: Mapping[str, Array]) -> Plan:
        """The specialisation that runs a feed."""
        return self.for_feed(feeds).plan

    def for_feed(self, feeds: Mapping[str, Array]) -> Engine:
        """The specialisation that runs a feed; deciding inputs are none of its."""
        return self.at({name: array.shape for name, array in feeds.items()}, feeds)

    def whole_plan(self) -> Plan:
        """The plan with all specialisations and general kernels that there are now."""
        with self._lock:
            others = tuple(engine.plan for engine in self._ready.values() if engine.plan.extents != self.plan.extents)
            general, made = self._specialiser.generals if self._specialiser else (self.part.general, ())
        machine = self.plan.machine
        machine = replace(machine, code=tuple(dict.fromkeys((*machine.code, *made))))
        return replace(self.plan, machine=machine, open=replace(self.part, others=others, general=general),
                       fingerprint="")

    def takes(self, extents: Extents) -> bool:
        """Whether there is a graph of the model for these numbers and the usual values; it is specialised for them."""
        shapes = {io.name: io.shape_of(1, extents) for io in self.part.inputs}
        try:
            self.at(shapes)
        except EngineError:
            return False
        return True

    def at(self, shapes: Shapes, values: Mapping[str, Array] = {}) -> Engine:       # noqa: B006
        """The engine that runs inputs of these shapes; values: of deciding inputs, which it does not take, where these
        are not the usual ones. Raises InputError, or what specialising raises."""
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
                frequent = self._demand.count(key) >= self.policy.uses
            if frequent:
                self._order(key)
            return self._general_version(key)
        return self._made_soon(key) or self._general_version(key)

    def _made_soon(self, key: Key) -> Engine | None:
        """Have it made in the background; the engine, if that takes no longer than we are patient for. Nothing is
        waited for where there is a general version."""
        ordered = self._order(key)
        if ordered is None or key in self._general:
            return None
        made, since = ordered
        wait([made], max(since + self.policy.patience - time.monotonic(), 0))
        with self._lock:
            return self._ready.get(key)

    def _specialised(self, key: Key) -> Engine:
        """Made here, unless another thread has just made it."""
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
                self._general[key] = engine
                self._drop_least_used(self._general)
            return engine

    def _order(self, key: Key) -> Ordered | None:
        """Have it made in the background, once; what comes while many wait is not made."""
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
        except Exception as error:      # whatever it is, the general version serves, and the thread lives on
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
        """Whether the process ends, which would wait for all that was ordered: executors take nothing more then."""
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
            self._ready[key], self._last = engine, None
            self._drop_least_used(self._ready)

    def _drop_least_used(self, kept: OrderedDict[Key, Engine]) -> None:
        """Keep those that were used last, as many as there is room for."""
        limit = memory_limit() * MEMORY_SHARE if self.policy.memory is None else self.policy.memory
        while len(kept) > 1 and (len(kept) > self.policy.most or sum(one.bytes for one in kept.values()) > limit):
            kept.popitem(last=False)

    def _engine(self, plan: Plan) -> Engine:
        engine = Engine(plan, self.threads, self._cpus, self._first, self._gpu)
        engine.larger = lambda items: self._larger(plan.extents, items)
        return engine

    def _larger(self, extents: Extents, items: int) -> Engine:
        """The specialisation for so many items that depend on each other."""
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
