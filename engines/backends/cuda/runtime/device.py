"""A GPU as a device: does a plan's code fit it, and what runs that code."""
from __future__ import annotations

from collections.abc import Callable

from engines.backends.cuda.runtime.driver import CudaError, GpuDriver, open_gpu
from engines.backends.cuda.runtime.execution import LoadedPlan
from engines.backends.device import Device, Loaded
from engines.errors import ConfigError, PlanTargetError
from engines.plan.plan import Plan


class CudaDevice:
    """The first GPU of this machine. `open_gpu` finds it: the tests put an emulated one in its place."""

    def __init__(self, open_gpu: Callable[[], GpuDriver] = open_gpu) -> None:
        self.open_gpu = open_gpu

    def mismatch(self, plan: Plan) -> str:
        target = plan.machine.target
        try:
            here = self.open_gpu().architecture
        except CudaError as error:
            return f"made for '{target}', a GPU, but {error}"
        if target.endswith("a") and here != target[:-1]:
            return f"made for '{target}', whose code runs on no other, but this GPU is {here}"
        if _number(here) < _number(target):
            return f"made for '{target}', but this GPU is {here}, an older one"
        return ""

    def load(self, plan: Plan, threads: int, beside: Loaded | None = None) -> LoadedPlan:
        """threads: of the host, which have nothing to do here but wait; one does."""
        if threads > 1:
            raise ConfigError(f"{plan.name}: threads={threads}, but a plan for a GPU is run by one; for more requests "
                              "at a time use several contexts")
        if mismatch := self.mismatch(plan):
            raise PlanTargetError(f"{plan.name}: {mismatch}")
        return LoadedPlan(plan, self.open_gpu())


def _number(architecture: str) -> int:
    return int(architecture.removeprefix("sm_").rstrip("a"))


DEVICE: Device = CudaDevice()
