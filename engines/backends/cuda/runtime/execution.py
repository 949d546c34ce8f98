"""Runs a plan on a GPU: its code and constants once a device, an arena and pinned slots for each context.

A batch of b items runs as the CUDA graph of its bucket, the next power of two: copies of the inputs from their slots,
all launches, copies of the outputs. Kernels take the number of their rows at run time, a graph fixes it; what a bucket
computes beyond the batch is never read.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engines.backends.cuda.runtime.driver import CudaError, CudaMemoryError, GpuDriver, Stream
from engines.errors import PlanCorruptError, PlanError
from engines.ir.graph import Array
from engines.plan.arena import array_at, plan_memory, write_halo
from engines.plan.plan import Operand, Plan, Step, TensorView
from engines.plan.verification import verify

_ELF = b"\x7fELF"


class LoadedPlan:
    """A plan's kernels and constants on a GPU; shared by all executions."""

    def __init__(self, plan: Plan, gpu: GpuDriver) -> None:
        """Raises PlanCorruptError, PlanError: the GPU has not so much memory, or refuses the code."""
        self.plan, self.gpu = verify(plan), gpu
        self.layout = plan_memory(plan.machine.buffers, plan.machine.fills)
        gpu.use()
        self.functions: list[Any] = []
        self.constants = self.allocate(len(plan.machine.constants), "its constants")
        try:
            gpu.write(self.constants, np.frombuffer(plan.machine.constants, np.uint8))
            module = self._module()
            for step in plan.machine.steps:
                if step.launch is None:
                    raise PlanCorruptError(f"{plan.name}: step '{step.name}' is none of a GPU's")
                self.functions.append(gpu.function(module, step.symbol, step.launch.shared_bytes))
        except CudaError as error:
            raise PlanError(f"{plan.name}: the driver does not take its kernels: {error}") from error

    def _module(self) -> Any:
        """The machine code if it is this GPU's own; else the driver makes it of the PTX, which later ones run too."""
        codes = {code[:4] == _ELF: code for code in self.plan.machine.code}
        if True in codes and self.gpu.architecture == self.plan.machine.target.rstrip("a"):
            return self.gpu.load(codes[True])
        if False not in codes:
            raise PlanCorruptError(f"{self.plan.name}: there is no code for {self.gpu.architecture} in it")
        return self.gpu.load(codes[False])

    def allocate(self, size: int, what: str) -> int:
        """Raises PlanError: there is not so much."""
        try:
            return self.gpu.allocate(size)
        except CudaMemoryError as error:
            raise PlanError(f"{self.plan.name}: the GPU has not the {size} bytes that {what} take ({error}); a smaller "
                            "--max-batch or fewer instances take less") from error

    @property
    def arena_bytes(self) -> int:
        return self.layout.total

    def execution(self, cpus: Sequence[int] | None) -> CudaExecution:
        """cpus: the calling thread waits wherever it is."""
        return CudaExecution(self)


class CudaExecution:
    """The buffers of one context on the GPU, the slots of its inputs and outputs on the host, a stream."""

    def __init__(self, loaded: LoadedPlan) -> None:
        self._loaded, self._gpu, machine = loaded, loaded.gpu, loaded.plan.machine
        self._gpu.use()
        self._arena = loaded.allocate(loaded.layout.total, "the buffers of a context")
        self._slots = [_Slots(self._gpu, view, machine.buffers[view.buffer].bytes) for view in machine.inputs]
        self._results = [_Slots(self._gpu, view, machine.buffers[view.buffer].bytes) for view in machine.outputs]
        self._write_halos()
        self._stream: Stream = self._gpu.stream()
        self._graphs: dict[int, Callable[[], None]] = {}        # by bucket

    def _write_halos(self) -> None:
        """Those that are written once, for all batch slots: in the arena, and in the slots that are copied there."""
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

    # ---- the interface of an execution
    def input(self, view: TensorView, batch: int) -> Array:
        return array_at(_of(self._slots, view).memory, 0, view, batch)

    def output(self, view: TensorView, batch: int) -> Array:
        return array_at(_of(self._results, view).memory, 0, view, batch)

    def run(self, batch: int) -> None:
        """Raises PlanError: the GPU failed, by a fault of a kernel or of its own."""
        bucket = min(1 << (batch - 1).bit_length(), self._loaded.plan.batch_slots)
        try:
            self._gpu.use()
            if bucket not in self._graphs:
                self._graphs[bucket] = self._stream.record(lambda: self._put(bucket))
            self._graphs[bucket]()
            self._stream.wait()
        except CudaError as error:
            raise PlanError(f"{self._loaded.plan.name}: a run on the GPU failed: {error}; after an error of a GPU its "
                            "process has to start anew") from error

    def profile(self, batch: int, repeats: int) -> list[float]:
        """With the time that a launch and the wait for it take; the device's own clock is for later."""
        self._gpu.use()
        return [min(self._seconds(index, batch) for _ in range(repeats))
                for index in range(len(self._loaded.plan.machine.steps))]

    def close(self) -> None:
        self._gpu.use()
        self._stream.close()
        for slots in (*self._slots, *self._results):
            self._gpu.unpin(slots.memory)
        self._gpu.free(self._arena)

    # ---- what runs
    def _put(self, batch: int) -> None:
        """All of a run into the stream."""
        for slots in self._slots:
            begin, end = slots.span(batch)
            self._stream.copy_in(self._address(Operand(slots.view.buffer, begin)), slots.memory[begin:end])
        for index in range(len(self._loaded.plan.machine.steps)):
            self._launch(index, batch)
        for slots in self._results:
            begin, end = slots.span(batch)
            self._stream.copy_out(slots.memory[begin:end], self._address(Operand(slots.view.buffer, begin)))

    def _launch(self, index: int, batch: int) -> None:
        step: Step = self._loaded.plan.machine.steps[index]
        assert step.launch is not None
        rows = step.rows_per_item * batch + step.rows
        grid = -(-rows // step.row_step), -(-step.columns // step.column_step)
        self._stream.launch(self._loaded.functions[index], grid, step.launch.threads,
                            [self._address(operand) for operand in step.operands], rows, step.launch.shared_bytes)

    def _seconds(self, index: int, batch: int) -> float:
        begin = time.perf_counter()
        self._launch(index, batch)
        self._stream.wait()
        return time.perf_counter() - begin


class _Slots:
    """A tensor's batch slots on the host: its buffer once more, so that one copy moves it with whatever gaps it has."""

    def __init__(self, gpu: GpuDriver, view: TensorView, size: int) -> None:
        self.view, self.memory = view, gpu.pinned(size)

    def span(self, batch: int) -> tuple[int, int]:
        """The bytes of the buffer that so many items lie in."""
        return self.view.offset, self.view.end(batch)


def _of(slots: Sequence[_Slots], view: TensorView) -> _Slots:
    return next(found for found in slots if found.view == view)
