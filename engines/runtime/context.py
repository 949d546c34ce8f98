"""ExecutionContext: memory and execution state of one request or batch at a time."""
from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np

from infer_server.engines.backends.device import (
    BindsArrays,
    Execution,
    Show,
    ShowsOutputs,
    SupportsInPlace,
    SupportsScatteredItems,
    SupportsZeroCopy,
    ready,
)
from infer_server.engines.errors import ConfigError, InputError
from infer_server.engines.ir.dtypes import memory_dtype
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.arena import ChangingArray
from infer_server.engines.plan.plan import Plan, Step, TensorView
from infer_server.engines.runtime.rerun import Rerun
from infer_server.engines.runtime.results import Results

ZERO_COPY_BYTES = 1 << 17   # arrays of at least this size are used without a copy; smaller ones are copied sooner
ITEM_BYTES = 1 << 16        # items of at least this size are read in place, each by itself


class ExecutionContext:
    """The memory of one run at a time, for one owner thread at a time."""

    def __init__(self, plan: Plan, execution: Execution) -> None:
        self.plan, self.execution = plan, execution
        self._inputs = {io.name: view for io, view in zip(plan.inputs, plan.machine.inputs, strict=True)}
        self._outputs = {io.name: view for io, view in zip(plan.outputs, plan.machine.outputs, strict=True)}
        self._arrays: dict[tuple[str, str, int], Array] = {}    # (kind, name, batch) -> cached array
        self.rerun: Rerun | None = None                         # set by `expect`
        self._reruns: dict[int, Rerun | None] = {}              # by batch size
        self._repeated: set[int] = set()                        # batch sizes that have run more than once
        zero_copy, accepts, binds = _roles(type(execution))
        self._zero_copy: Any = execution if zero_copy else None
        self._scattered: Any = execution if accepts else None
        self._binder: BindsArrays | None = execution if binds else None        # type: ignore[assignment]
        self._results = Results()
        self._large_outputs = [(name, view) for name, view in self._outputs.items() if self._zero_copy
                               and math.prod(view.shape) * memory_dtype(view.dtype).itemsize >= ZERO_COPY_BYTES]

    def at(self, shapes: Mapping[str, Sequence[int]]) -> ExecutionContext:
        """Return the context for these shapes: this one, for a plan without open extents. See OpenContext."""
        return self

    def input(self, name: str, batch: int = 1) -> Array:
        """Return the memory of an input, to be written: [batch, ...], or the whole tensor if it has no batch axis.

        Its values stay until they are overwritten.
        """
        return self._array("input", name, batch)

    def execute(self, batch: int = 1) -> None:
        """Run the network on the first `batch` items. The GIL is released for all but fallback steps."""
        self._check(batch)
        self.execution.run(batch)

    def show(self, batch: int, show: Show) -> None:
        """Execute, and call `show` for each output as soon as it is complete."""
        self._check(batch)
        assert isinstance(self.execution, ShowsOutputs), "several threads do not stop between two steps"
        self.execution.show(batch, show)

    def output(self, name: str, batch: int = 1) -> Array:
        """Return an output of the last execute: a view, valid until the next one."""
        return self._array("output", name, batch)

    def run(self, arrays: Mapping[str, Array], batch: int) -> dict[str, Array]:
        """Run on checked inputs and return the outputs; large arrays are used in place if the execution can."""
        zero_copy, released = dict[str, Array](), True
        try:
            for name, array in arrays.items():
                # A plan supports one of the two: if items are read in place, outputs are not written in place.
                if array.nbytes < ZERO_COPY_BYTES or isinstance(array, ChangingArray) or not (
                        self._set_buffer(self._inputs[name], array) or self._set_item_buffer(name, 0, array)):
                    np.copyto(self.input(name, batch), array)
            for name, view in self._large_outputs:
                array = self._results.array((batch, *view.shape) if view.batched else view.shape,
                                            memory_dtype(view.dtype))
                if self._set_buffer(view, array):
                    zero_copy[name] = array
            self.execute(batch)
        finally:
            if self._zero_copy:
                released = self._zero_copy.release_buffers()
        results = {name: zero_copy[name] if name in zero_copy else self.output(name, batch) for name in self._outputs}
        return {name: array if name in zero_copy and released else array.copy() for name, array in results.items()}

    def run_in_place(self, arrays: Mapping[str, Array], batch: int, caches: Mapping[str, Array]) -> dict[str, Array]:
        """Run on checked inputs, some of which are caches that outputs overwrite, and return the other outputs."""
        copied, execution = dict[str, Array](), self.execution
        in_place = execution if isinstance(execution, SupportsInPlace) else None        # takes 10 us
        try:
            for name, array in caches.items():
                if in_place is None or not in_place.set_in_place_buffer(self._inputs[name], array):
                    copied[name] = array
                    np.copyto(self.input(name, batch), array)
            for name, array in arrays.items():
                np.copyto(self.input(name, batch), array)
            self.execute(batch)
        finally:
            if self._zero_copy:
                self._zero_copy.release_buffers()
        for name, array in copied.items():
            np.copyto(array, self.input(name, batch))
        buffers = {self._inputs[name].buffer for name in caches}
        return {name: self.output(name, batch).copy() for name, view in self._outputs.items()
                if view.buffer not in buffers}

    def expect(self, batch: int, unread: Collection[str] = ()) -> None:
        """Set `rerun` for a batch size that has run before.

        It is None if an array is large enough to be used without a copy.

        unread: inputs whose values are not read.
        """
        if batch not in self._reruns:
            self._reruns[batch] = None          # many shapes run once
        elif batch not in self._repeated:
            self._repeated.add(batch)
            self._reruns[batch] = self._rerun(batch, unread)
        self.rerun = self._reruns[batch]

    def _rerun(self, batch: int, unread: Collection[str]) -> Rerun | None:
        buffers = {io.name: self.input(io.name, batch) for io in self.plan.inputs}
        outputs = [(io.name, self.output(io.name, batch)) for io in self.plan.outputs]
        copied = [buffer for name, buffer in buffers.items() if name not in unread] + [buffer for _, buffer in outputs]
        if any(buffer.nbytes >= ZERO_COPY_BYTES for buffer in copied):
            return None
        inputs = [(io.name, buffers[io.name].shape, memory_dtype(io.dtype),
                   None if io.name in unread else buffers[io.name]) for io in self.plan.inputs]
        return Rerun(inputs, outputs, ready(self.execution, batch))

    def _set_buffer(self, view: TensorView, array: Array) -> bool:
        return self._zero_copy is not None and self._zero_copy.set_buffer(view, array)

    @cached_property
    def zero_copy_inputs(self) -> frozenset[str]:
        """Inputs whose items are large, so that `execute_with` reads them in place; none on a GPU."""
        scattered = self._scattered
        return frozenset(name for name, view in self._inputs.items()
                         if scattered and view.item_stride >= ITEM_BYTES and scattered.accepts(view))

    def accepts(self, name: str, array: Array) -> bool:
        """Return True if `execute_with` reads an array of items of one of `zero_copy_inputs` without a copy."""
        view = self._inputs[name]
        return (self._scattered is not None and array.dtype == memory_dtype(view.dtype)
                and array.nbytes % view.item_stride == 0 and self._scattered.accepts(view, array))

    def _set_item_buffer(self, name: str, first: int, array: Array) -> bool:
        return self._scattered is not None and name in self.zero_copy_inputs and self._scattered.set_item_buffer(
            self._inputs[name], first, array)

    def bind(self, name: str, array: Any) -> None:
        """Read an input from, or write an output to, an array on the plan's GPU at each execute from now on.

        Parameters
        ----------
        name
            An input or output.
        array
            A dense array of at least as many items as are executed, with __cuda_array_interface__ or DLPack (torch,
            cupy, pycuda, numba, jax). Work that writes it must be done, unless it names its stream. None: the host's
            memory again.

        Raises
        ------
        InputError
            The array does not fit.
        ConfigError
            The plan is for a CPU.
        """
        self._binds().bind(self._view(name), array)

    @property
    def binds_arrays(self) -> bool:
        """True if inputs and outputs may be arrays on a GPU."""
        return self._binder is not None

    def execute_with(self, batch: int, arrays: Mapping[str, Sequence[Any]]) -> None:
        """Execute a batch whose items lie in several arrays.

        Parameters
        ----------
        batch
            Items of the batch.
        arrays
            {input name: arrays of whole items, in order}. A number in place of an array means so many items of `input`,
            as are all behind the last array. On a GPU they are arrays there, of inputs and of outputs, and errors are
            those of `bind`. On a CPU they have the dtype of `input`; what cannot be read in place (see `accepts`)
            is copied. They must not change until the call returns.
        """
        self._check(batch)
        if self._binder:
            self._binder.run_with(batch, {self._view(name): pieces for name, pieces in arrays.items()})
            return
        try:
            for name, pieces in arrays.items():
                self._copy_or_set(name, pieces, batch)
            self.execution.run(batch)
        finally:
            if self._zero_copy:
                self._zero_copy.release_buffers()

    def _copy_or_set(self, name: str, pieces: Sequence[Any], batch: int) -> None:
        first, slots, axis = 0, self.input(name, batch), self._inputs[name].batch_axis
        before, behind = slots.shape[:axis], slots.shape[axis + 1:]
        for piece in pieces:
            if isinstance(piece, int):
                first += piece
                continue
            end = first + piece.shape[axis]
            if piece.dtype != slots.dtype or end > batch or piece.shape != (*before, end - first, *behind):
                raise InputError(f"{self.plan.name}: {piece.dtype}{list(piece.shape)} is given for input '{name}' from "
                                 f"item {first} on, in a batch of {slots.dtype}{list(slots.shape)}")
            if not self._set_item_buffer(name, first, piece):
                np.copyto(slots[(*(slice(None),) * axis, slice(first, end))], piece)
            first = end

    def _binds(self) -> BindsArrays:
        if self._binder is None:
            raise ConfigError(f"{self.plan.name}: the plan runs on the CPU; write to context.input(name) instead")
        return self._binder

    def _view(self, name: str) -> TensorView:
        if (view := self._inputs.get(name) or self._outputs.get(name)) is None:
            raise InputError(f"{self.plan.name} has no input or output '{name}'; it has "
                             f"{names_of({**self._inputs, **self._outputs})}")
        return view

    def profile(self, batch: int = 1, repeats: int = 5) -> list[tuple[Step, float]]:
        """Return (step, seconds) for each step, run alone on one thread: the least of `repeats` passes."""
        self._check(batch)
        if repeats < 1:
            raise ConfigError(f"profile: repeats={repeats}, at least 1")
        return list(zip(self.plan.machine.steps, self.execution.profile(batch, repeats), strict=True))

    def close(self) -> None:
        """Stop the context's threads. Its memory is freed with the last view of it."""
        self.execution.close()

    def _array(self, kind: str, name: str, batch: int) -> Array:
        """Return the cached array of a tensor, whose address never changes."""
        found = self._arrays.get((kind, name, batch))
        if found is None:
            self._check(batch)
            table = self._inputs if kind == "input" else self._outputs
            if name not in table:
                raise InputError(f"{self.plan.name} has no {kind} '{name}'; it has {names_of(table)}")
            make = self.execution.input if kind == "input" else self.execution.output
            found = self._arrays[kind, name, batch] = make(table[name], batch)
        return found

    def _check(self, batch: int) -> None:
        if not 1 <= batch <= self.plan.batch_slots:
            limit = f"1 to {self.plan.max_batch}" if self.plan.max_batch else "1 (the model has no batch axis)"
            raise InputError(f"{self.plan.name}: batch {batch}, but the plan was built for {limit}")


@cache
def _roles(kind: type) -> tuple[bool, bool, bool]:
    """Return whether executions of a class are SupportsZeroCopy, SupportsScatteredItems and BindsArrays."""
    return issubclass(kind, SupportsZeroCopy), issubclass(kind, SupportsScatteredItems), issubclass(kind, BindsArrays)


def names_of(names: Mapping[str, object]) -> str:
    """Return the quoted names, for a message."""
    return ", ".join(f"'{name}'" for name in names)
