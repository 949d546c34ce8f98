"""A GPU as a device: does a plan's code fit it, and what runs that code."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from engines.backends.cuda.runtime.driver import GpuDriver, open_gpu
from engines.backends.cuda.runtime.execution import LoadedPlan
from engines.backends.cuda.runtime.library import CudaError, found_gpus
from engines.backends.device import GpuInfo, Loaded
from engines.errors import ConfigError, PlanError, PlanTargetError
from engines.plan.plan import Plan


class CudaDevice:
    """A GPU of this machine, by its number. `open_gpu` opens it, `find` says which there are: the tests put emulated
    ones in their place."""

    def __init__(self, open_gpu: Callable[[int], GpuDriver] = open_gpu, number: int = 0,
                 find: Callable[[], Sequence[GpuInfo]] = found_gpus) -> None:
        self.open_gpu, self.number, self.find = open_gpu, number, find

    def at(self, number: int) -> CudaDevice:
        return self if number == self.number else CudaDevice(self.open_gpu, number, self.find)

    def gpus(self, plan: Plan) -> Sequence[tuple[GpuInfo, str]]:
        return [(gpu, _misfit(plan.machine.target, gpu.architecture)) for gpu in self.find()]

    @property
    def gpu(self) -> GpuDriver:
        """Raises CudaError: there is none of that number."""
        return self.open_gpu(self.number)

    @property
    def name(self) -> str:
        return self.gpu.name

    def mismatch(self, plan: Plan) -> str:
        try:
            return _misfit(plan.machine.target, self.gpu.architecture)
        except CudaError as error:
            return f"made for '{plan.machine.target}', a GPU, but {error}"

    def load(self, plan: Plan, threads: int, beside: Loaded | None = None) -> LoadedPlan:
        """threads: of the host, which have nothing to do here but wait; one does."""
        if threads > 1:
            raise ConfigError(f"{plan.name}: threads={threads}, but a plan for a GPU is run by one; for more requests "
                              "at a time use several contexts")
        if mismatch := self.mismatch(plan):
            raise PlanTargetError(f"{plan.name}: {mismatch}")
        try:
            return LoadedPlan(plan, self.gpu)
        except CudaError as error:
            raise PlanError(f"{plan.name}: the GPU does not take it: {error}") from error


def _misfit(target: str, here: str) -> str:
    """Why code for one architecture does not run on another; "" if it does."""
    if target.endswith("a") and here != target[:-1]:
        return f"made for '{target}', whose code runs on no other, but this GPU is {here}"
    if _number(here) < _number(target):
        return f"made for '{target}', but this GPU is {here}, an older one"
    return ""


def _number(architecture: str) -> int:
    return int(architecture.removeprefix("sm_").rstrip("a"))


DEVICE = CudaDevice()
