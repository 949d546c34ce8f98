"""Interfaces of engines that the server uses, so that other backends can be substituted."""
from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Shapes = Mapping[str, Sequence[int]]


class GpuDevice(NamedTuple):
    """GPU of this machine that may run a model."""
    number: int
    name: str
    uuid: str
    why_not: str = ""           # reason why it cannot run the model; "" if it can
    target: str = ""            # build target for it; "" if the model is already a plan

    def __str__(self) -> str:
        return f"GPU {self.number} ({self.name})"


BATCH = "batch"             # name of the symbolic extent of the batch axis


class TensorInfo(Protocol):
    """Input or output as the model declares it."""
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...                         # NumPy's name, or "bfloat16"
    @property
    def shape(self) -> tuple[int | str, ...]: ...       # symbolic extents by name; BATCH is the batch axis


class ExecutionContext(Protocol):
    """Memory of one execution at a time; used by one thread at a time."""

    def at(self, shapes: Shapes) -> ExecutionContext:
        """Return the context for inputs of these shapes, for models with open extents other than the batch."""

    def input(self, name: str, batch: int) -> NDArray[Any]:
        """Return a writable view of the first `batch` slots of an input, [batch, ...]; an unbatched input is whole."""

    def execute(self, batch: int) -> None:
        """Run the network on the first `batch` slots, with the GIL released."""

    def output(self, name: str, batch: int) -> NDArray[Any]:
        """Return a view of the results, [batch, ...], valid until the next execution."""

    def close(self) -> None:
        """Stop the context's threads, if there are any."""


@runtime_checkable
class ZeroCopyContext(Protocol):
    """Context that can read inputs and write outputs in memory of requests, on its own GPU or on the host."""
    @property
    def binds_arrays(self) -> bool:
        """True if it accepts arrays on a GPU."""

    @property
    def zero_copy_inputs(self) -> Collection[str]:
        """Inputs that can be read from arrays in host memory."""

    def accepts(self, name: str, array: NDArray[Any]) -> bool:
        """Return True if an array for one of these inputs needs no copy."""

    def execute_with(self, batch: int, arrays: Mapping[str, Sequence[Any]]) -> None:
        """Run the network with inputs read from, and outputs written to, the given arrays.

        For each name there is a list of arrays whose items are concatenated; a number n stands for n items in their
        slots.
        """


class CacheContext(Protocol):
    """Context that keeps states of one sequence, to which each run appends; used by one thread at a time."""

    def start(self, pasts: Mapping[str, NDArray[Any]]) -> None:
        """Replace the states. Raises infer_server.engines.errors.InputError, CapacityError if they are too long."""

    def compile(self) -> None:
        """Compile what a run needs. Raises infer_server.engines.errors.EngineError if states cannot grow in place."""

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run on all other inputs, and return all other outputs. Raises as `start`."""


@runtime_checkable
class CachingEngine(Protocol):
    """Engine whose states can grow in place."""

    def create_cache(self, capacity: int) -> CacheContext:
        """Create a context. Raises infer_server.engines.errors.ConfigError if the model has no such states.

        capacity: largest number of tokens, the elements on the axis along which the states grow.
        """


class Described(Protocol):
    """Description of a model that need not be loaded."""
    @property
    def inputs(self) -> Sequence[TensorInfo]: ...
    @property
    def outputs(self) -> Sequence[TensorInfo]: ...
    @property
    def max_batch(self) -> int: ...                     # 0 if the model has no batch axis
    @property
    def dependence(self) -> str: ...                    # reason why requests must not share a batch; "" if they may
    @property
    def metadata(self) -> Mapping[str, Any]: ...        # metadata of the build: "preprocess", ...


class Engine(Described, Protocol):
    """Loaded model: code and weights, shared by any number of contexts."""
    @property
    def deciding(self) -> Sequence[str]: ...            # inputs whose values select shapes or branches
    @property
    def is_steady(self) -> bool: ...                    # True if the execution time hardly depends on values
    @property
    def threads(self) -> int: ...                       # threads of one execution
    @property
    def arena_bytes(self) -> int: ...                   # memory of a context

    def check(self, shapes: Shapes) -> None:
        """Raise infer_server.engines.errors.InputError if inputs of these shapes contradict each other or the model."""

    def create_context(self, cpus: Sequence[int] | None = None) -> ExecutionContext:
        """Create a context whose threads are pinned to `cpus`, if given; the first CPU is the calling thread's."""


def precision_of(engine: Engine) -> str:
    """Return the precision that an engine was built with; "" if its backend has none."""
    return str(getattr(engine, "precision", ""))


_LONG_NS = 500_000_000
SPECIALISE = "background"       # default policy for new shapes; see infer_server.load_engine


class EngineLoader(Protocol):
    """Function that loads a plan file for a number of intra-op threads. Raises EngineError."""

    def __call__(self, path: Path, threads: int, specialise: str = SPECIALISE, gpu: int = 0) -> Engine: ...


def load_plan(path: Path, threads: int, specialise: str = SPECIALISE, gpu: int = 0,
              cache: Path | bool = True) -> Engine:
    """Load a plan with this project's own runtime.

    Parameters
    ----------
    path : Path
        Plan file.
    threads : int
        Intra-op threads.
    specialise : str
        Policy for new shapes; see infer_server.load_engine.
    gpu : int
        Number of the GPU, for a GPU plan.
    cache : Path or bool
        Folder of the engine cache, which keeps specialisations; True for the user's.

    Raises
    ------
    infer_server.engines.errors.PlanError
        The plan cannot be loaded. PlanTargetError if it is for another machine: compiling it here would hold the
        interpreter lock for seconds.
    """
    from infer_server.engines import load_engine  # here, so that servers with another backend do not import it

    engine: Engine = load_engine(path, threads=threads, on_target_mismatch="refuse", specialise=specialise,
                                 cache=cache, gpu=gpu)
    return engine


def describe_plan(path: Path) -> Described:
    """Describe the model of a plan file without reading its code and weights.

    Raises
    ------
    infer_server.engines.errors.PlanError, OSError
        The file cannot be read.
    """
    from infer_server.engines.loading import describe
    return describe(path)


def gpus_for(path: Path) -> list[GpuDevice]:
    """Return the GPUs of this machine for a GPU plan, each with the reason if it cannot run there.

    The result is empty for other files, and for files that cannot be read, whose load reports the reason.
    """
    from infer_server.engines.errors import EngineError
    from infer_server.engines.loading import gpus_of
    try:
        return [GpuDevice(gpu.number, gpu.name, gpu.uuid, why_not) for gpu, why_not in gpus_of(path)]
    except (EngineError, OSError):
        return []


def gpus_to_build_for() -> list[GpuDevice]:
    """Return the GPUs of this machine, each with the target of builds for it, or the reason why there is none."""
    from infer_server.engines.backends import gpus_here
    return [GpuDevice(gpu.number, gpu.name, gpu.uuid,
                "" if target else f"nothing is built for {gpu.architecture}, which is too old", target)
            for gpu, target in gpus_here()]


def is_mixed(engine: Described) -> bool:
    """Return True if an engine with a batch axis has tensors without it, or with it in another position than the first.

    Requests cannot be concatenated then, and each is executed by itself.
    """
    return engine.max_batch > 0 and any(next(iter(tensor.shape), 0) != BATCH
                                        for tensor in (*engine.inputs, *engine.outputs))


def is_open(engine: Engine) -> bool:
    """Return True if the model has open extents other than the batch."""
    extents = {extent for tensor in engine.inputs for extent in tensor.shape if isinstance(extent, str)}
    return len(extents) > (engine.max_batch > 0)


def warm_up(context: ExecutionContext, engine: Engine) -> dict[int, int]:
    """Execute on zeros, at batch 1 and at the largest batch, so that requests do not pay for page faults.

    Returns
    -------
    dict of int to int
        Time in ns by batch size, of the second execution, or of the first if that took long.
    """
    took_ns = {}
    for batch in sorted({1, max(1, engine.max_batch)}):
        took_ns[batch] = _execute_on_zeros(context, engine, batch)
        if took_ns[batch] < _LONG_NS:
            took_ns[batch] = _execute_on_zeros(context, engine, batch)
    return took_ns


def _execute_on_zeros(context: ExecutionContext, engine: Engine, batch: int) -> int:
    for tensor in engine.inputs:
        view = context.input(tensor.name, batch)
        if tensor.name not in engine.deciding:      # these keep the values that the plan was built for
            view[...] = np.zeros((), view.dtype)
    started_ns = time.monotonic_ns()
    context.execute(batch)
    return time.monotonic_ns() - started_ns
