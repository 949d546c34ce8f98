"""CPU as a device: checks that a plan's code fits it, and runs that code on one thread or several."""
from __future__ import annotations

from collections.abc import Sequence

from infer_server.engines.backends.device import Device, Execution, Loaded
from infer_server.engines.backends.llvm.runtime.execution import SerialExecution
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.machine import cpu
from infer_server.engines.plan.plan import Plan


class LoadedCpuEngine:
    """Plan that is ready to run on so many threads."""

    def __init__(self, plan: Plan, threads: int, base: LoadedPlan | None = None) -> None:
        self.program, self._threads = LoadedPlan(plan, threads, base), threads
        if threads > 1:
            # Imported here because single-threaded serving starts faster without it.
            from infer_server.engines.backends.llvm.runtime.workers import ParallelProgram
            self._shared = ParallelProgram(self.program, threads)

    @property
    def arena_bytes(self) -> int:
        """Return the bytes of one arena. An execution on T threads has T arenas."""
        return (self.program.separate_layout if self._threads > 1 else self.program.shared_layout).total

    def execution(self, cpus: Sequence[int] | None) -> Execution:
        if self._threads == 1:
            return SerialExecution(self.program)
        from infer_server.engines.backends.llvm.runtime.workers import ParallelExecution
        return ParallelExecution(self._shared, cpus)


class CpuDevice:
    """CPU of this machine."""

    @property
    def name(self) -> str:
        return cpu.detect().model

    def at(self, number: int) -> CpuDevice:
        """Return this device: there is only one CPU."""
        return self

    def mismatch(self, plan: Plan) -> str:
        machine, part = cpu.detect(), plan.machine
        architecture = part.cpu.get("architecture", machine.architecture)
        if architecture != machine.architecture:
            return f"made for {architecture}, but this machine is {machine.architecture}"
        missing = machine.lacking(frozenset(part.cpu.get("features", ())))
        if missing:
            return f"made for '{part.target}', but this CPU ({machine.model}) lacks {missing}"
        return ""

    def load(self, plan: Plan, threads: int, base: Loaded | None = None) -> LoadedCpuEngine:
        return LoadedCpuEngine(plan, threads, base.program if isinstance(base, LoadedCpuEngine) else None)


DEVICE: Device = CpuDevice()
