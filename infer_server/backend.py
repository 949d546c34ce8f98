"""What the server asks of an engine: the seam behind which backends stand."""
from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Shapes = Mapping[str, Sequence[int]]


class Gpu(NamedTuple):
    """A GPU of this machine, as one that may run a model."""
    number: int
    name: str
    uuid: str
    why_not: str = ""           # it does not run it; "": it does
    target: str = ""            # what is built for it; "": the model is a plan already

    def __str__(self) -> str:
        return f"GPU {self.number} ({self.name})"


BATCH = "batch"             # the symbolic extent that counts items


class Tensor(Protocol):
    """An input or output as the model declares it."""
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...                         # numpy's name, or "bfloat16"
    @property
    def shape(self) -> tuple[int | str, ...]: ...       # symbolic extents by name, BATCH that of items


class ExecutionContext(Protocol):
    """The memory of one execution at a time; used by one thread at a time."""

    def at(self, shapes: Shapes) -> ExecutionContext:
        """The context for inputs of these shapes, where the model leaves extents open beside the batch."""

    def input(self, name: str, batch: int) -> NDArray[Any]:
        """A view of the first `batch` slots of an input, [batch, ...], to be written. An unbatched input is whole."""

    def execute(self, batch: int) -> None:
        """Runs the network on the first `batch` slots, with the GIL released."""

    def output(self, name: str, batch: int) -> NDArray[Any]:
        """A view of the results, [batch, ...], valid until the next execute."""

    def close(self) -> None:
        """Ends the context's threads, if it has any."""


@runtime_checkable
class PlacesTensors(Protocol):
    """A context whose inputs may be read where requests have them: on the GPU that it executes on, where outputs may be
    put likewise, or in the host's memory."""
    @property
    def binds_arrays(self) -> bool:
        """Whether it takes arrays on a GPU."""

    @property
    def in_place(self) -> Collection[str]:
        """The inputs that it takes as arrays of the host's memory."""

    def takes(self, name: str, array: NDArray[Any]) -> bool:
        """Whether it copies nothing of an array for one of these."""

    def execute_with(self, batch: int, placed: Mapping[str, Sequence[Any]]) -> None:
        """Take the items of inputs from arrays, and put outputs there, this once: for each such name the arrays, whose
        items stand side by side. A number in the place of one: so many items are in their slots."""


class Described(Protocol):
    """What a model says of itself, whether it is loaded or not."""
    @property
    def inputs(self) -> Sequence[Tensor]: ...
    @property
    def outputs(self) -> Sequence[Tensor]: ...
    @property
    def max_batch(self) -> int: ...                     # 0: the model has no batch axis
    @property
    def dependence(self) -> str: ...                    # why requests must not share a batch; "": they may
    @property
    def metadata(self) -> Mapping[str, Any]: ...        # what the build says of itself: "preprocess", ...


class Engine(Described, Protocol):
    """A loaded model: code and weights, shared by any number of contexts."""
    @property
    def deciding(self) -> Sequence[str]: ...            # inputs whose values decide what is computed
    @property
    def is_steady(self) -> bool: ...                    # whether the time of an execution hardly follows from values
    @property
    def threads(self) -> int: ...                       # that work on one execution
    @property
    def arena_bytes(self) -> int: ...                   # of memory that a context takes

    def check(self, shapes: Shapes) -> None:
        """Raises engines.errors.InputError: inputs of these shapes, each as the model declares it, do not fit together,
        or are not what the engine takes."""

    def create_context(self, cpus: Sequence[int] | None = None) -> ExecutionContext:
        """cpus: what its threads are pinned to, one each, the first for the caller's; None: not pinned."""


def precision_of(engine: Engine) -> str:
    """Return the precision that an engine was built with; "" of a backend that has none."""
    return str(getattr(engine, "precision", ""))


_LONG_NS = 500_000_000
SPECIALISE = "background"       # what is done about shapes that an engine has not met; see engines.load_engine


class EngineLoader(Protocol):
    """Loads a plan file, for so many intra-op threads. Raises engines.errors.EngineError."""

    def __call__(self, path: Path, threads: int, specialise: str = SPECIALISE, gpu: int = 0) -> Engine: ...


def load_plan(path: Path, threads: int, specialise: str = SPECIALISE, gpu: int = 0,
              cache: Path | bool = True) -> Engine:
    """Loads a plan with this project's own runtime. Raises engines.errors.PlanError.

    gpu: which, of a plan for GPUs. cache: the folder of the engine cache, where specialisations are kept; True: the
    user's.

    A plan for another machine is refused, PlanTargetError: to compile it here would hold the interpreter for seconds.
    """
    from engines import load_engine  # here, so that a server over another backend does not load this one

    engine: Engine = load_engine(path, threads=threads, on_target_mismatch="refuse", specialise=specialise,
                                 cache=cache, gpu=gpu)
    return engine


def describe_plan(path: Path) -> Described:
    """What a plan file says of its model, read without its code and its weights. Raises engines.errors.PlanError,
    OSError."""
    from engines.loading import describe
    return describe(path)


def gpus_for(path: Path) -> list[Gpu]:
    """The GPUs of this machine if a plan file is for one, each with why the plan does not run there. None for any other
    file; where it cannot be read, loading it says why."""
    from engines.errors import EngineError
    from engines.loading import gpus_of
    try:
        return [Gpu(gpu.number, gpu.name, gpu.uuid, why_not) for gpu, why_not in gpus_of(path)]
    except (EngineError, OSError):
        return []


def gpus_to_build_for() -> list[Gpu]:
    """The GPUs of this machine, each with the target of builds for it, or why there is none."""
    from engines.backends import gpus_here
    return [Gpu(gpu.number, gpu.name, gpu.uuid,
                "" if target else f"nothing is built for {gpu.architecture}, which is too old", target)
            for gpu, target in gpus_here()]


def is_mixed(engine: Described) -> bool:
    """Whether some tensors of an engine that takes batches have the batch elsewhere than in front, or not at all:
    requests cannot lie side by side then, and each is executed by itself, its tensors whole."""
    return engine.max_batch > 0 and any(next(iter(tensor.shape), 0) != BATCH
                                        for tensor in (*engine.inputs, *engine.outputs))


def is_open(engine: Engine) -> bool:
    """Whether the model leaves extents open beside the batch."""
    extents = {extent for tensor in engine.inputs for extent in tensor.shape if isinstance(extent, str)}
    return len(extents) > (engine.max_batch > 0)


def warm_up(context: ExecutionContext, engine: Engine) -> dict[int, int]:
    """Executes on zeros, at batch 1 and at the largest batch, so that no request pays for page faults.

    Returns how many ns each takes, by batch: after the first time, unless that was so long that it hardly matters.
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
        if tensor.name not in engine.deciding:      # which have the values that the plan was built for
            view[...] = np.zeros((), view.dtype)
    started_ns = time.monotonic_ns()
    context.execute(batch)
    return time.monotonic_ns() - started_ns
