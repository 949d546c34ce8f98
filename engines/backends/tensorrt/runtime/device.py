"""Runs TensorRT engines: pinned host buffers for inputs and outputs, device buffers, and a stream per context."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from infer_server.engines.backends.cuda.runtime.driver import GpuDriver, open_gpu
from infer_server.engines.backends.cuda.runtime.holdings import GpuResources
from infer_server.engines.backends.cuda.runtime.library import CudaError, list_gpus
from infer_server.engines.backends.device import GpuInfo, Loaded
from infer_server.engines.backends.tensorrt.runtime.library import LibraryMissing, library, logged_errors, logger_of
from infer_server.engines.errors import ConfigError, PlanError, PlanTargetError
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.arena import array_at
from infer_server.engines.plan.plan import Plan, TensorView
from infer_server.engines.plan.verification import verify


class TensorRtDevice:
    """GPU of this machine with the installed library. `open_gpu` and `find` are replaced in tests."""

    def __init__(self, open_gpu: Callable[[int], GpuDriver] = open_gpu, number: int = 0,
                 find: Callable[[], Sequence[GpuInfo]] = list_gpus) -> None:
        self.open_gpu, self.number, self.find = open_gpu, number, find

    def at(self, number: int) -> TensorRtDevice:
        return self if number == self.number else TensorRtDevice(self.open_gpu, number, self.find)

    def gpus(self, plan: Plan) -> Sequence[tuple[GpuInfo, str]]:
        return [(gpu, _misfit(plan)) for gpu in self.find()]

    @property
    def name(self) -> str:
        return self.open_gpu(self.number).name

    def mismatch(self, plan: Plan) -> str:
        if misfit := _misfit(plan):
            return misfit
        try:
            self.open_gpu(self.number)
        except CudaError as error:
            return f"made for '{plan.machine.target}', but {error}"
        return ""

    def load(self, plan: Plan, threads: int, base: Loaded | None = None) -> LoadedEngine:
        if threads > 1:
            raise ConfigError(f"{plan.name}: threads={threads}, but a plan for a GPU is run by one; for more requests "
                              "at a time use several contexts")
        if mismatch := self.mismatch(plan):
            raise PlanTargetError(f"{plan.name}: {mismatch}")
        return LoadedEngine(plan, library(plan.machine.target), self.open_gpu(self.number))


def _misfit(plan: Plan) -> str:
    """Return why the installed library cannot read the engine, or "" if it can."""
    try:
        version = library(plan.machine.target).__version__
    except LibraryMissing as error:
        return f"made for '{plan.machine.target}', but {error}"
    made = str(plan.machine.cpu.get("model", "")).rpartition(" ")[2]
    return "" if made == version else (f"built by {plan.machine.target} {made}, but {version} is installed; "
                                       "build it again")


class LoadedEngine:
    """Deserialised engine on a GPU, shared by all executions."""

    def __init__(self, plan: Plan, module: Any, gpu: GpuDriver) -> None:
        """Raise PlanError if TensorRT cannot deserialise the engine here."""
        self.plan, self.gpu, self.logger = verify(plan), gpu, logger_of(module)
        gpu.use()
        self._runtime = module.Runtime(self.logger)
        self.engine = self._runtime.deserialize_cuda_engine(plan.machine.code[0])
        if self.engine is None:
            raise PlanError(f"{plan.name}: TensorRT cannot read the engine ({logged_errors(self.logger)}): "
                            "build it again")

    @property
    def arena_bytes(self) -> int:
        return int(getattr(self.engine, "device_memory_size_v2", self.engine.device_memory_size)) + sum(
            buffer.bytes for buffer in self.plan.machine.buffers)

    def execution(self, cpus: Sequence[int] | None) -> TensorRtExecution:
        """Return a new execution. `cpus` is ignored: no thread is started."""
        return TensorRtExecution(self)


class TensorRtExecution:
    """TensorRT execution context, and its tensors on the host and on the GPU."""

    def __init__(self, loaded: LoadedEngine) -> None:
        """Raise PlanError if memory on the GPU or the host is exhausted."""
        self._loaded, self._gpu, plan = loaded, loaded.gpu, loaded.plan
        self._held = GpuResources(self._gpu, self)
        try:
            with self._held:
                self._gpu.use()
                sizes = [buffer.bytes for buffer in plan.machine.buffers]
                self._hosts = [self._gpu.pinned(size) for size in sizes]
                self._device_buffers = [self._held.allocate(size) for size in sizes]
                self._stream = self._gpu.stream()
                self._held.add(self._stream.close)
                self._context = loaded.engine.create_execution_context()
                if self._context is None:
                    raise PlanError(f"{plan.name}: TensorRT cannot create an execution context: "
                                    f"{logged_errors(loaded.logger)}")
                for view in (*plan.machine.inputs, *plan.machine.outputs):
                    self._context.set_tensor_address(view.name, self._device_buffers[view.buffer])
        except CudaError as error:
            raise PlanError(f"{plan.name}: cannot create a context on the GPU: {error}") from error

    def input(self, view: TensorView, batch: int) -> Array:
        return array_at(self._hosts[view.buffer], 0, view, batch)

    def output(self, view: TensorView, batch: int) -> Array:
        return array_at(self._hosts[view.buffer], 0, view, batch)

    def run(self, batch: int) -> None:
        """Raise PlanError if the GPU or TensorRT fails."""
        try:
            self._gpu.use()
            self._put(batch)
            self._stream.wait()
        except CudaError as error:
            raise self._failed(str(error)) from error

    def _put(self, batch: int) -> None:
        machine = self._loaded.plan.machine
        for view in machine.inputs:
            shape = (batch, *view.shape) if view.batched else view.shape
            self._context.set_input_shape(view.name, shape)
            self._stream.copy_in(self._device_buffers[view.buffer], self._hosts[view.buffer][:view.end(batch)])
        if not self._context.execute_async_v3(self._stream.number):
            raise self._failed(logged_errors(self._loaded.logger))
        for view in machine.outputs:
            self._stream.copy_out(self._hosts[view.buffer][:view.end(batch)], self._device_buffers[view.buffer])

    def _failed(self, why: str) -> PlanError:
        return PlanError(f"{self._loaded.plan.name}: a run on the GPU failed: {why}; after "
                         "an error of a GPU, restart the process")

    def profile(self, batch: int, repeats: int) -> list[float]:
        """Time a run, and return an equal share of it for each layer: TensorRT's layers are not timed one by one."""
        self._gpu.use()
        whole = min(self._stream.seconds(partial(self._put, batch)) for _ in range(repeats))
        layers = len(self._loaded.plan.machine.steps)
        return [whole / layers] * layers

    def close(self) -> None:
        self._context = None
        self._held.release()


DEVICE = TensorRtDevice()
