"""The serving side of a backend: a device loads a plan and runs it. Its modules import nothing that compiles."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from engines.ir.graph import Array
from engines.plan.plan import MachinePart, Plan, TensorView

Show = Callable[[str, Array], None]     # takes a tensor's name, and the tensor where it lies


class Execution(Protocol):
    """The memory of one run, and what carries it out: what is behind an ExecutionContext. One thread at a time."""

    def input(self, view: TensorView, batch: int) -> Array:
        """Where the caller writes an input."""

    def output(self, view: TensorView, batch: int) -> Array:
        """Where the caller finds an output."""

    def run(self, batch: int) -> None: ...

    def profile(self, batch: int, repeats: int) -> list[float]:
        """Seconds of each step, run alone: the least of `repeats`."""

    def close(self) -> None: ...


@runtime_checkable
class ShowsOutputs(Protocol):
    """An execution that stops between its steps."""

    def show(self, batch: int, show: Show) -> None:
        """Run, and show each output as soon as it is whole: what lies in its memory later may be another tensor."""


def whole_before(machine: MachinePart) -> Mapping[int, Sequence[TensorView]]:
    """Step -> the outputs to be shown before it; those that are kept, before the step that would follow the last."""
    found: dict[int, list[TensorView]] = {}
    for view in machine.outputs:
        buffer, end = machine.buffers[view.buffer], len(machine.steps)
        found.setdefault(end if buffer.first < 0 else min(buffer.last + 1, end), []).append(view)   # inputs are kept
    return found


@runtime_checkable
class RunsAtOnce(Protocol):
    """An execution that knows beforehand what its runs of so many items call."""

    def ready(self, batch: int) -> Callable[[], None]:
        """Such a run. It stays right for as long as the execution."""


def ready(execution: Execution, batch: int) -> Callable[[], None]:
    """A run of so many items, ready to be called."""
    return execution.ready(batch) if isinstance(execution, RunsAtOnce) else partial(execution.run, batch)


@runtime_checkable
class BindsArrays(Protocol):
    """An execution whose tensors may be arrays that lie on its device."""

    def bind(self, view: TensorView, array: Any) -> None:
        """Take an input from that array, or put an output there, at each run from now on; None: no more. Raises
        InputError: it is not there, or does not fit."""

    def run_with(self, batch: int, placed: Mapping[TensorView, Sequence[Any]]) -> None:
        """A run, for which alone these tensors are arrays whose items stand side by side; a number in the place of one:
        so many items are in their slots, as all are behind the last. Raises InputError, likewise."""


@runtime_checkable
class WorksInArrays(Protocol):
    """An execution that may read inputs where their caller has them, and write outputs where he gets them."""

    def lend(self, view: TensorView, array: Array) -> bool:
        """Let an array be an input or an output until `take_back`. False: it cannot, and is to be copied."""

    def take_back(self) -> bool:
        """Whether all that was lent is its owner's again. If not, a thread that is late may yet write into the outputs
        what stands there: they are to be copied. They are kept until it is done."""


@runtime_checkable
class TakesItems(WorksInArrays, Protocol):
    """One that may do so with inputs whose items are in several arrays."""

    def takes(self, view: TensorView, array: Array | None = None) -> bool:
        """Whether arrays may be items of an input; and whether this one may."""

    def lend_items(self, view: TensorView, first: int, array: Array) -> bool:
        """Let an array be the items of an input from slot `first` on, until `take_back`. False: it cannot, and is to be
        copied."""


class Loaded(Protocol):
    """A plan made ready to run: code and constants, shared by any number of executions."""
    @property
    def arena_bytes(self) -> int:
        """Of one execution's buffers."""

    def execution(self, cpus: Sequence[int] | None) -> Execution:
        """cpus: where its threads stay; None: anywhere."""


class GpuInfo(NamedTuple):
    """What is known of a GPU before anything runs on it."""
    number: int
    name: str
    architecture: str
    memory: int             # bytes
    uuid: str               # as NVIDIA's tools write it


@runtime_checkable
class OneOfSeveral(Protocol):
    """A device that is one of a machine's GPUs."""

    def gpus(self, plan: Plan) -> Sequence[tuple[GpuInfo, str]]:
        """All of them, each with why the plan does not run there; "" if it does. Nothing of a GPU is started."""


class Device(Protocol):
    """What runs the plans of a backend on this machine."""

    @property
    def name(self) -> str:
        """Of the processor, as times are known by."""

    def at(self, number: int) -> Device:
        """The device of that number, where the machine has several."""

    def mismatch(self, plan: Plan) -> str:
        """What the plan needs and this machine is not; "" if they fit."""

    def load(self, plan: Plan, threads: int, beside: Loaded | None = None) -> Loaded:
        """threads: that work on one execution. beside: the plan of the same model that it shares constants with, as
        this has loaded it. Raises PlanCorruptError, PlanTargetError, ConfigError."""
