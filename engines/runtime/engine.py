"""Engine: a loaded plan, for any number of threads.

    engine = load_engine("model.plan")
    engine.run({"x": array})                # from any thread
    context = engine.create_context()       # memory of its own, for one thread at a time

A plan has one or more segments, graphs that are compiled, and a segment has one or more specialisations, each compiled
for one number of every open extent. A model of fixed shapes is one segment with one specialisation. Callers need not
know which kind of plan an engine holds.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from infer_server.engines.errors import InputError
from infer_server.engines.ir.dtypes import memory_dtype
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.extents import Shapes
from infer_server.engines.plan.plan import DEFAULTS, IoTensor, Plan
from infer_server.engines.runtime.caches import CacheContext
from infer_server.engines.runtime.contexts import AnyContext
from infer_server.engines.runtime.policy import Policy
from infer_server.engines.runtime.segment import Segment
from infer_server.engines.runtime.specialisation import Specialisation, SpecialisationMaker
from infer_server.engines.summary import Summarised, Summary, summary

if TYPE_CHECKING:       # most plans are no programs
    from infer_server.engines.runtime.program import Program


class Engine(Summarised):
    """A loaded plan. Thread-safe."""

    def __init__(self, plan: Plan, threads: int = 1, cpus: Sequence[int] | None = None, gpu: int = 0,
                 specialiser: Callable[[], SpecialisationMaker] | None = None, policy: Policy = Policy(),  # noqa: B008
                 executor: Segment | Program | None = None) -> None:
        """Load a plan; `infer_server.load_engine` does so for the plan of a file.

        Parameters
        ----------
        plan : Plan
            Plan read from a file or just built.
        threads : int
            Threads of each context.
        cpus : sequence of int, optional
            CPUs to which the threads are pinned.
        gpu : int
            Index of the GPU, for a plan for GPUs.
        specialiser : callable, optional
            Returns the compiler of specialisations; without it the engine runs at the shapes of the plan only.
        policy : Policy
            When specialisations are compiled, and how many are kept.
        executor : Segment or Program, optional
            Runs the plan; by default a segment.

        Raises
        ------
        PlanCorruptError, PlanTargetError, ConfigError
        """
        self.plan, self.threads = plan, threads
        self.executor = executor or Segment(plan, threads, cpus, gpu, specialiser, policy)

    # ---- properties of the plan
    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def inputs(self) -> tuple[IoTensor, ...]:
        return self.executor.inputs

    @property
    def outputs(self) -> tuple[IoTensor, ...]:
        return self.executor.outputs

    @property
    def max_batch(self) -> int:
        """Maximum number of items of one execute; 0 if the model has no batch axis."""
        return self.plan.max_batch

    @property
    def dependence(self) -> str:
        """Reason why a batch must be neither split nor merged with others; "" if items are independent."""
        return self.plan.dependence

    @property
    def precision(self) -> str:
        """Requested precision of the build: int8, fp16, bf16, fp32 or best."""
        return self.plan.precision

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata of the build: preprocessing of the calibration pictures, versions, ..."""
        return self.plan.metadata

    @property
    def deciding(self) -> tuple[str, ...]:
        """Names of the inputs whose values decide about shapes or branches."""
        return self.executor.deciding

    @property
    def is_steady(self) -> bool:
        """True if all is compiled for fixed shapes, so that the time of an execution hardly depends on its values."""
        return self.executor.is_steady

    @property
    def arena_bytes(self) -> int:
        """Bytes of the buffers of one context, at the shapes that the plan was built for."""
        return self.executor.arena_bytes

    @cached_property
    def defaults(self) -> Defaults:
        """Default values of optional inputs."""
        return Defaults(self.plan)

    def summary(self) -> Summary:
        """Return what a notebook shows of the engine."""
        return summary("Engine", self.plan, ("threads", [str(self.threads)]))

    # ---- shapes
    def usual_shapes(self, batch: int = 1) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs for which the plan was built."""
        return self.executor.usual_shapes(batch)

    def usual_values(self) -> dict[str, Array]:
        """Return the values of deciding inputs for which the plan was built."""
        return self.executor.usual_values()

    def check(self, shapes: Shapes) -> None:
        """Raise InputError if shapes of inputs are inconsistent, or outside the profiles of open extents."""
        self.executor.check(shapes)

    def items(self, arrays: Mapping[str, Array]) -> int:
        """Return the number of items in a feed (1 if the model has no batch axis). Raises InputError if it is wrong."""
        return self.executor.items(arrays)

    def at(self, shapes: Shapes, values: Mapping[str, Array] = {}) -> Specialisation:       # noqa: B006
        """Return the specialisation that runs inputs of these shapes, compiled if the policy says so.

        values: those of deciding inputs, which it does not have; by default the usual ones.

        Raises
        ------
        InputError
            The shapes are inconsistent or outside the profiles.
        ConfigError
            The plan is a program, which has several segments.
        EngineError
            Compiling fails.
        """
        return self.executor.at(shapes, values)

    def plan_of(self, feeds: Mapping[str, Array]) -> Plan:
        """Return the plan that runs a feed: its specialisation, or the whole plan of a program."""
        return self.executor.plan_of(feeds)

    def whole_plan(self) -> Plan:
        """Return the plan with all current specialisations."""
        return self.executor.whole_plan()

    # ---- runs
    def create_context(self, cpus: Sequence[int] | None = None) -> AnyContext:
        """Make a context with memory of its own, for one owner thread at a time.

        Parameters
        ----------
        cpus
            The CPUs of its threads, one for each; by default those of load_engine, else any but the caller's. The first
            one is the caller's own, whose thread is not moved: pin it with os.sched_setaffinity.

        Raises
        ------
        ConfigError
            There are not as many CPUs as threads, or the process may not use one of them.
        """
        return self.executor.create_context(cpus)

    def create_cache(self, capacity: int) -> CacheContext:
        """Create a context that keeps the keys and values of a decoder's tokens.

        Parameters
        ----------
        capacity : int
            Largest number of tokens, at least 1.

        Raises
        ------
        ConfigError
            The plan has no caches: they need an input with an open extent for the tokens so far, and an output that
            is this input with further tokens.
        """
        return self.executor.create_cache(capacity)

    def run(self, feeds: Mapping[str, Any] | Array) -> dict[str, Any]:
        """Run the model; callable from any thread.

        Parameters
        ----------
        feeds
            {input name: array}, in the dtypes and shapes of the ONNX model, with any number of items on the batch axis.
            More than max_batch run in slices if the items are independent; else the plan is compiled for so many.
            An array alone is taken for the only input of the model, or the only one without a default value.
            bfloat16 is taken in ml_dtypes' dtype, or as its bits (uint16); so are float8 and int4 (uint8).
            Sequences are lists, strings are arrays of objects.

        Returns
        -------
        dict
            {output name: array}; dtypes that numpy lacks come back as their bits.

        Raises
        ------
        InputError
            A name, dtype or shape does not fit.
        """
        if type(feeds) is not dict:
            feeds = self.feeds_of(feeds)
        results = self.executor.rerun(feeds)
        return self.executor.run(self.defaults.complete(feeds)) if results is None else results

    def feeds_of(self, value: Any) -> Mapping[str, Any]:
        """Return {input name: array}: the value if it is a mapping, else the value as the only required input.

        Raises InputError if the model has several required inputs, or none.
        """
        if isinstance(value, Mapping):
            return value
        required = [io.name for io in self.inputs if io.name not in self.defaults.values]
        if len(required) != 1:
            raise InputError(f"{self.name} takes {len(required)} inputs, {', '.join(map(repr, required))}; run it on "
                             f"{{name: array}} instead of a {type(value).__name__}")
        return {required[0]: value}

    def close(self) -> None:
        """Stop the threads of pooled contexts and in the background, and free their memory."""
        self.executor.close()


class Defaults:
    """Default values of optional inputs from the model; for one item if the input has a batch axis."""

    def __init__(self, plan: Plan) -> None:
        self._inputs = {io.name: io for io in plan.inputs}
        self.values = {name: np.array(value, memory_dtype(self._inputs[name].dtype))
                       for name, value in plan.metadata.get(DEFAULTS, {}).items()}

    def complete(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the feeds with default values for missing optional inputs."""
        missing = self.values.keys() - feeds.keys()
        if not missing:
            return feeds
        items = next((np.shape(value)[io.batch_axis] for name, value in feeds.items()
                      if (io := self._inputs.get(name)) and io.batched and np.ndim(value) > io.batch_axis), 1)
        return {**feeds, **{name: np.repeat(self.values[name], items, io.batch_axis) if io.batched else
                            self.values[name] for name in missing for io in [self._inputs[name]]}}
