"""Interface of the serving side of a backend: a device loads a plan and runs it, and imports no compiler."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import MachinePart, Plan, TensorView

Show = Callable[[str, Array], None]     # called with a tensor's name and a view of its buffer


class Execution(Protocol):
    """State of one ExecutionContext: its memory and a way to run the plan. Used by one thread at a time."""

    def input(self, view: TensorView, batch: int) -> Array:
        """Return the array that the caller fills with the first `batch` items of an input."""

    def output(self, view: TensorView, batch: int) -> Array:
        """Return the array that holds the first `batch` items of an output after a run."""

    def run(self, batch: int) -> None: ...

    def profile(self, batch: int, repeats: int) -> list[float]:
        """Return the seconds that each step takes when run alone, the minimum of `repeats` runs."""

    def close(self) -> None: ...


@runtime_checkable
class ShowsOutputs(Protocol):
    """Execution that can stop between its steps."""

    def show(self, batch: int, show: Show) -> None:
        """Run the plan and call `show` for each output as soon as it is final.

        Later steps may reuse the memory of a shown output.
        """


def final_before(machine: MachinePart) -> Mapping[int, Sequence[TensorView]]:
    """Map each step to the outputs that are final before it runs.

    Outputs that keep their buffer until the end are under len(machine.steps).
    """
    found: dict[int, list[TensorView]] = {}
    for view in machine.outputs:
        buffer, end = machine.buffers[view.buffer], len(machine.steps)
        # first < 0: the output shares the buffer of an input, which no step overwrites.
        found.setdefault(end if buffer.first < 0 else min(buffer.last + 1, end), []).append(view)
    return found


@runtime_checkable
class RunsAtOnce(Protocol):
    """Execution that can prepare its runs of a given batch size."""

    def ready(self, batch: int) -> Callable[[], None]:
        """Return a call that runs `batch` items. It stays valid as long as the execution."""


def ready(execution: Execution, batch: int) -> Callable[[], None]:
    """Return a call that runs `batch` items on an execution."""
    return execution.ready(batch) if isinstance(execution, RunsAtOnce) else partial(execution.run, batch)


@runtime_checkable
class BindsArrays(Protocol):
    """Execution that can read inputs from, and write outputs to, arrays on its device."""

    def bind(self, view: TensorView, array: Any) -> None:
        """Use an array on the device for an input or output in all later runs, or none if `array` is None.

        Raises
        ------
        InputError
            The array is not on this device, or its dtype, shape or strides do not fit.
        """

    def run_with(self, batch: int, arrays: Mapping[TensorView, Sequence[Any]]) -> None:
        """Run `batch` items with some tensors in arrays on the device, for this run only.

        Parameters
        ----------
        batch : int
            Number of items.
        arrays : mapping from TensorView to sequence
            Pieces of each tensor in order of its items: an array on the device, or the number of items that stay in the
            host's slots. Items after the last piece are in the slots, too.

        Raises
        ------
        InputError
            An array is not on this device, or does not fit.
        """


@runtime_checkable
class SupportsZeroCopy(Protocol):
    """Execution that can read inputs from, and write outputs to, arrays of the caller without a copy."""

    def set_buffer(self, view: TensorView, array: Array) -> bool:
        """Use the caller's array as the buffer of an input or output until `release_buffers`.

        Returns False if the array cannot be used and has to be copied.
        """

    def release_buffers(self) -> bool:
        """Release all arrays of the caller, and return True if no thread can still access them.

        If False, a late thread may still write to the outputs: the caller has to copy them, and the arrays are kept
        alive until that thread is done.
        """


@runtime_checkable
class SupportsInPlace(SupportsZeroCopy, Protocol):
    """Execution that can overwrite an array of the caller."""

    def set_in_place_buffer(self, view: TensorView, array: Array) -> bool:
        """Use the caller's array as the buffer of an input and the output that overwrites it, until `release_buffers`.

        Returns False if the array cannot be used and has to be copied.
        """


@runtime_checkable
class SupportsScatteredItems(SupportsZeroCopy, Protocol):
    """Execution that can read the items of an input from several arrays of the caller."""

    def accepts(self, view: TensorView, array: Array | None = None) -> bool:
        """Return True if arrays can hold items of an input, and `array`, if it is not None, is one of them."""

    def set_item_buffer(self, view: TensorView, first: int, array: Array) -> bool:
        """Use the caller's array for the items of an input from slot `first` on until `release_buffers`.

        Returns False if the array cannot be used and has to be copied.
        """


class Loaded(Protocol):
    """Plan ready to run: code and constants, shared by any number of executions."""
    @property
    def arena_bytes(self) -> int:
        """Size of the buffers of one execution, in bytes."""

    def execution(self, cpus: Sequence[int] | None) -> Execution:
        """Return a new execution whose threads are pinned to `cpus`; None pins none."""


class GpuInfo(NamedTuple):
    """Properties of a GPU that are known before anything runs on it."""
    number: int
    name: str
    architecture: str
    memory: int             # bytes
    uuid: str               # as nvidia-smi prints it


@runtime_checkable
class OneOfSeveral(Protocol):
    """Device that is one of a machine's GPUs."""

    def gpus(self, plan: Plan) -> Sequence[tuple[GpuInfo, str]]:
        """Return all GPUs and, for each, why the plan cannot run on it ("" if it can), without initialising a GPU."""


class Device(Protocol):
    """Processor of this machine that runs the plans of a backend."""

    @property
    def name(self) -> str:
        """Name of the processor, under which kernel times are stored."""

    def at(self, number: int) -> Device:
        """Return the device with index `number`, on machines with several."""

    def mismatch(self, plan: Plan) -> str:
        """Return why this machine cannot run the plan, or "" if it can."""

    def load(self, plan: Plan, threads: int, base: Loaded | None = None) -> Loaded:
        """Load a plan.

        Parameters
        ----------
        plan : Plan
            Plan for this backend.
        threads : int
            Threads that work on one execution.
        base : Loaded, optional
            Plan of the same model, loaded by this device, that holds the shared constants.

        Raises
        ------
        PlanCorruptError, PlanTargetError, ConfigError
            The plan is damaged, is for another machine, or does not allow so many threads.
        """
