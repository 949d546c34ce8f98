"""GPU as a device: checks that a plan's code fits, and loads it."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from infer_server.engines.backends.cuda.runtime.driver import GpuDriver, open_gpu
from infer_server.engines.backends.cuda.runtime.execution import CudaPlan
from infer_server.engines.backends.cuda.runtime.library import CudaError, list_gpus
from infer_server.engines.backends.device import GpuInfo, Loaded
from infer_server.engines.errors import ConfigError, PlanError, PlanTargetError
from infer_server.engines.plan.plan import Plan


class CudaDevice:
    """GPU of this machine. `open_gpu` and `find` are replaced by emulated ones in tests."""

    def __init__(self, open_gpu: Callable[[int], GpuDriver] = open_gpu, number: int = 0,
                 find: Callable[[], Sequence[GpuInfo]] = list_gpus) -> None:
        self.open_gpu, self.number, self.find = open_gpu, number, find

    def at(self, number: int) -> CudaDevice:
        return self if number == self.number else CudaDevice(self.open_gpu, number, self.find)

    def gpus(self, plan: Plan) -> Sequence[tuple[GpuInfo, str]]:
        return [(gpu, _misfit(plan.machine.target, gpu.architecture)) for gpu in self.find()]

    @property
    def gpu(self) -> GpuDriver:
        """Driver of this GPU. Raises CudaError if there is no GPU of that number."""
        return self.open_gpu(self.number)

    @property
    def name(self) -> str:
        return self.gpu.name

    def mismatch(self, plan: Plan) -> str:
        try:
            return _misfit(plan.machine.target, self.gpu.architecture)
        except CudaError as error:
            return f"built for the GPU target '{plan.machine.target}', but {error}"

    def load(self, plan: Plan, threads: int, base: Loaded | None = None) -> CudaPlan:
        """Load a plan. `threads` may only be 1, as the host just waits for the GPU."""
        if threads > 1:
            raise ConfigError(f"{plan.name}: threads={threads}, but a plan for a GPU is run by one; for more requests "
                              "at a time use several contexts")
        if mismatch := self.mismatch(plan):
            raise PlanTargetError(f"{plan.name}: {mismatch}")
        try:
            return CudaPlan(plan, self.gpu)
        except CudaError as error:
            raise PlanError(f"{plan.name}: loading it on the GPU failed: {error}") from error


def _misfit(target: str, here: str) -> str:
    """Return why code for one architecture cannot run on another, or "" if it can."""
    if target.endswith("a") and here != target[:-1]:
        return f"built for '{target}', which runs on no other architecture, but this GPU is {here}"
    if _number(here) < _number(target):
        return f"built for '{target}', but this GPU is {here}, which is older"
    return ""


def _number(architecture: str) -> int:
    return int(architecture.removeprefix("sm_").rstrip("a"))


DEVICE = CudaDevice()
