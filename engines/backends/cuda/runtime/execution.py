"""Runs plans on a GPU: code and constants once per device, an arena and pinned host slots per context.

A batch of b items runs as the CUDA graph of its bucket, the next power of two: copies of the inputs from their slots,
all launches, copies of the outputs. Kernels take the number of rows at run time, which a graph fixes; what a bucket
computes beyond the batch is never read. Inputs and outputs bound to arrays on the GPU are copied on the device, for
exactly the items of the batch. Arrays of a single run (`run_with`) are copied before and after the graph, so one graph
serves all of them.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from infer_server.engines.backends.cuda.runtime.arrays import DeviceTensor, NotOnDevice, device_tensor, misfit, rows_of
from infer_server.engines.backends.cuda.runtime.code import functions_of
from infer_server.engines.backends.cuda.runtime.driver import GpuDriver, Recorded, Stream
from infer_server.engines.backends.cuda.runtime.holdings import GpuResources
from infer_server.engines.backends.cuda.runtime.library import CudaError, CudaMemoryError
from infer_server.engines.errors import InputError, PlanError
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.arena import array_at, plan_memory, write_halo
from infer_server.engines.plan.plan import Operand, Plan, Step, TensorView
from infer_server.engines.plan.verification import verify

MOST_GRAPHS = 32        # per context: one per bucket and set of bound arrays

RUN_ARRAY = -1

# Of a graph: items to launch, items to copy, and each tensor's bound address, 0 (host slots) or RUN_ARRAY.
Key = tuple[int, int, tuple[int, ...]]


class CudaPlan:
    """Kernels and constants of a plan on a GPU, shared by all executions and freed after the last one."""

    def __init__(self, plan: Plan, gpu: GpuDriver) -> None:
        """Load the plan.

        Raises
        ------
        PlanCorruptError, PlanTargetError
            The plan is damaged, or the driver rejects all of its code.
        PlanError
            Memory is exhausted, or the driver fails.
        """
        self.plan, self.gpu = verify(plan), gpu
        self.layout = plan_memory(plan.machine.buffers, plan.machine.fills)
        with GpuResources(gpu, self) as held:
            gpu.use()
            self.constants = self.allocate(len(plan.machine.constants), "its constants", held)
            try:
                gpu.write(self.constants, np.frombuffer(plan.machine.constants, np.uint8))
                self.functions = functions_of(plan, gpu, held)
            except CudaError as error:
                raise PlanError(f"{plan.name}: loading its kernels failed: {error}") from error

    def allocate(self, size: int, what: str, held: GpuResources) -> int:
        """Allocate GPU memory. Raise PlanError if there is not enough."""
        try:
            return held.allocate(size)
        except CudaMemoryError as error:
            raise self._too_little(f"{what} ({size} bytes)", error) from error

    def slots(self, view: TensorView, is_input: bool) -> _Slots:
        """Allocate the pinned host slots of a tensor. Raise PlanError if there is not enough memory."""
        size = self.plan.machine.buffers[view.buffer].bytes
        try:
            return _Slots(view, self.gpu.pinned(size), is_input)
        except CudaMemoryError as error:
            raise self._too_little(f"{size} bytes of pinned memory for '{view.name}'", error) from error

    def _too_little(self, what: str, error: CudaError) -> PlanError:
        free, whole = self.gpu.memory()
        return PlanError(f"{self.plan.name}: not enough memory for {what} ({error}); {free} of {whole} bytes of this "
                         f"GPU ({self.gpu.name}) are free; reduce --max-batch or the number of instances")

    @property
    def arena_bytes(self) -> int:
        return self.layout.total

    def execution(self, cpus: Sequence[int] | None) -> CudaExecution:
        """Return a new execution. `cpus` is ignored: no thread is started."""
        return CudaExecution(self)


class CudaExecution:
    """Buffers of one context on the GPU, host slots of its inputs and outputs, and a stream."""

    def __init__(self, loaded: CudaPlan) -> None:
        """Raise PlanError if memory is exhausted or the GPU is lost."""
        self._loaded, self._gpu, machine = loaded, loaded.gpu, loaded.plan.machine
        self._is_closed = False
        self._graphs: dict[Key, Recorded] = {}
        self._bound: dict[TensorView, DeviceTensor] = {}
        self._run_arrays: dict[TensorView, Sequence[DeviceTensor | int]] = {}
        self._held = GpuResources(self._gpu, self)
        try:
            with self._held:
                self._gpu.use()
                self._arena = loaded.allocate(loaded.layout.total, "the buffers of a context", self._held)
                self._slots = [loaded.slots(view, True) for view in machine.inputs]
                self._results = [loaded.slots(view, False) for view in machine.outputs]
                self._write_halos()
                self._stream: Stream = self._gpu.stream()
                self._held.add(self._stream.close)
                self._held.add(partial(_close_all, self._graphs))
        except CudaError as error:
            raise PlanError(f"{loaded.plan.name}: cannot create a context on the GPU: {error}") from error

    def _write_halos(self) -> None:
        """Write the constant halos of all batch slots, in the arena and in the host slots that are copied there."""
        plan = self._loaded.plan
        for fill in plan.machine.fills:
            whole = np.zeros(plan.machine.buffers[fill.view.buffer].bytes, np.uint8)
            write_halo(array_at(whole, 0, fill.view, plan.batch_slots), fill, 0)
            self._gpu.write(self._address(Operand(fill.view.buffer)), whole)
            for slots in self._slots:
                if slots.view.buffer == fill.view.buffer:
                    slots.memory[:] = whole

    def _address(self, operand: Operand) -> int:
        if operand.buffer is None:
            return self._loaded.constants + operand.offset
        return self._arena + self._loaded.layout.offsets[operand.buffer] + operand.offset

    # ---- interface of an Execution
    def input(self, view: TensorView, batch: int) -> Array:
        return array_at(_slots_of(self._slots, view).memory, 0, view, batch)

    def output(self, view: TensorView, batch: int) -> Array:
        return array_at(_slots_of(self._results, view).memory, 0, view, batch)

    def bind(self, view: TensorView, array: Any) -> None:
        """Bind an input or output to an array on this GPU; None unbinds it, which uses the host slots again."""
        if array is None:
            self._bound.pop(view, None)
        else:
            self._bound[view] = self._tensor(view, array)

    def _tensor(self, view: TensorView, array: Any) -> DeviceTensor:
        """Return the tensor of an array on this GPU. Raise InputError if it does not fit."""
        try:
            self._gpu.use()
            tensor = device_tensor(array, self._stream.number)
            why = misfit(tensor, view)
            if not why and not self._gpu.holds(tensor.address):
                why = f"it is not in the memory of this GPU ({self._gpu.name})"
            if not why and tensor.read_only and view in self._loaded.plan.machine.outputs:
                why = "it is read-only"
        except NotOnDevice as error:
            why = str(error)
        except CudaError as error:
            raise self._failed(error) from error
        if why:
            raise InputError(f"{self._loaded.plan.name}: '{view.name}' cannot be bound to that array: {why}")
        return tensor

    def run_with(self, batch: int, arrays: Mapping[TensorView, Sequence[Any]]) -> None:
        """Run with arrays for this run only. Raises what `bind` and `run` raise."""
        try:
            for view, pieces in arrays.items():
                self._run_arrays[view] = [piece if isinstance(piece, int) else self._tensor(view, piece)
                                      for piece in pieces]
            self.run(batch)
        finally:
            self._run_arrays.clear()

    def run(self, batch: int) -> None:
        """Run a batch.

        Raises
        ------
        PlanError
            A kernel or the GPU failed.
        InputError
            A bound array has fewer items than the batch, or the context is closed.
        """
        if self._is_closed:
            raise InputError(f"{self._loaded.plan.name}: the context is closed; create a new one")
        try:
            self._gpu.use()
            for view, tensor in self._bound.items():
                if view.batched and tensor.shape[0] < batch and view not in self._run_arrays:
                    raise InputError(f"{self._loaded.plan.name}: batch {batch}, but '{view.name}' is bound to an array "
                                     f"of {tensor.shape[0]} items")
            for stream in {piece.stream for pieces in (self._bound.values(), *self._run_arrays.values())
                           for piece in pieces if not isinstance(piece, int)} - {None}:
                self._gpu.wait_for(stream)      # type: ignore[arg-type]
            self._copy_run_arrays(self._slots, batch)
            self._graph(batch)()
            self._copy_run_arrays(self._results, batch)
            self._stream.wait()
        except CudaError as error:
            raise self._failed(error) from error

    def _failed(self, error: CudaError) -> PlanError:
        return PlanError(f"{self._loaded.plan.name}: a run on the GPU failed: {error}; after an error "
                         "of a GPU, restart the process")

    def profile(self, batch: int, repeats: int) -> list[float]:
        """Return the seconds of each step by the GPU's clock, the minimum of `repeats` runs."""
        try:
            self._gpu.use()
            return [min(self._stream.seconds(partial(self._launch, index, batch)) for _ in range(repeats))
                    for index in range(len(self._loaded.plan.machine.steps))]
        except CudaError as error:
            raise self._failed(error) from error

    def seconds(self, batch: int) -> float:
        """Return the seconds of a run by the GPU's clock, from the first copy to the last."""
        try:
            self._gpu.use()
            return self._stream.seconds(self._graph(batch))
        except CudaError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        self._is_closed = True
        self._held.release()

    # ---- work of a run
    def _graph(self, batch: int) -> Recorded:
        bucket = min(1 << (batch - 1).bit_length(), self._loaded.plan.batch_slots)
        key = bucket, batch if self._bound else bucket, tuple(
            RUN_ARRAY if slots.view in self._run_arrays else
            self._bound[slots.view].address if slots.view in self._bound else 0
            for slots in (*self._slots, *self._results))
        if key not in self._graphs:
            while len(self._graphs) >= MOST_GRAPHS:
                self._graphs.pop(next(iter(self._graphs))).close()
            self._graphs[key] = self._stream.record(partial(self._put, *key[:2]))
        return self._graphs[key]

    def _put(self, bucket: int, batch: int) -> None:
        """Enqueue launches for `bucket` items, and copies of `batch` items of tensors without arrays of this run."""
        for slots in self._slots:
            if slots.view not in self._run_arrays:
                self._copy(slots, self._bound.get(slots.view), 0, batch)
        for index in range(len(self._loaded.plan.machine.steps)):
            self._launch(index, bucket)
        for slots in self._results:
            if slots.view not in self._run_arrays:
                self._copy(slots, self._bound.get(slots.view), 0, batch)

    def _copy_run_arrays(self, every: Sequence[_Slots], batch: int) -> None:
        """Copy the pieces of this run's arrays, up to the end of the batch."""
        for slots in every:
            first = 0
            items = batch if slots.view.batched else 1
            for piece in (*self._run_arrays[slots.view], items) if slots.view in self._run_arrays else ():
                tensor = None if isinstance(piece, int) else piece
                end = min(first + (piece if isinstance(piece, int) else slots.items(piece)), items)
                if first < end:
                    self._copy(slots, tensor, first, end)
                first = end

    def _copy(self, slots: _Slots, tensor: DeviceTensor | None, first: int, end: int) -> None:
        """Copy items first..end - 1 of an input to its buffer, or of an output from it.

        The other side is `tensor`, whose first item is item `first`, or the host slots if it is None.
        """
        view, into = slots.view, slots.is_input
        if tensor is None:
            begin, stop = slots.span(first, end)
            address, memory = self._address(Operand(view.buffer, begin)), slots.memory[begin:stop]
            if into:
                self._stream.copy_in(address, memory)
            else:
                self._stream.copy_out(memory, address)
            return
        shift = first * view.item_stride
        for rows in rows_of(view, end - first):
            here = self._address(Operand(view.buffer, rows.tensor_offset + shift)), rows.step
            there = tensor.address + rows.array_offset, rows.width
            self._stream.copy_rows(*(here if into else there), *(there if into else here), rows.width, rows.number)

    def _launch(self, index: int, batch: int) -> None:
        step: Step = self._loaded.plan.machine.steps[index]
        assert step.launch is not None
        rows = step.rows_per_item * batch + step.rows
        grid = -(-rows // step.row_step), -(-step.columns // step.column_step)
        self._stream.launch(self._loaded.functions[index], grid, step.launch.threads,
                            [self._address(operand) for operand in step.operands], rows, step.launch.shared_bytes)


class _Slots:
    """Pinned host copy of a tensor's buffer. It has the buffer's layout, gaps included, so that one copy moves it."""

    def __init__(self, view: TensorView, memory: Array, is_input: bool) -> None:
        self.view, self.memory, self.is_input = view, memory, is_input

    def span(self, first: int, end: int) -> tuple[int, int]:
        """Return the range of bytes of the buffer that the items occupy."""
        return self.view.offset + first * self.view.item_stride, self.view.end(end)

    def items(self, tensor: DeviceTensor) -> int:
        """Return the number of items in `tensor`, 1 without a batch axis."""
        return tensor.shape[0] if self.view.batched else 1


def _slots_of(slots: Sequence[_Slots], view: TensorView) -> _Slots:
    return next(found for found in slots if found.view == view)


def _close_all(graphs: dict[Key, Recorded]) -> None:
    while graphs:
        graphs.popitem()[1].close()
