"""Load engines from plan files; a plan for another machine is compiled again for this one, or rejected."""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer_server.engines.backends import device_of
from infer_server.engines.backends.device import GpuInfo, OneOfSeveral
from infer_server.engines.plan.file import read_outline, read_plan
from infer_server.engines.plan.plan import IoTensor
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.load.create import engine_of
from infer_server.engines.runtime.load.options import LoadOptions
from infer_server.engines.runtime.load.recompile import retuned


def load_engine(path: str | os.PathLike[str], threads: int = 1, on_target_mismatch: str = "relower",
                cpus: Sequence[int] | None = None, specialise: str = "",
                specialisations: int = 64, cache: str | os.PathLike[str] | bool = True, gpu: int = 0,
                retune: bool = False) -> Engine:
    """Load a plan file into an engine.

    Parameters
    ----------
    path
        The plan file. It may be replaced or removed afterwards.
    threads
        Threads that share one request. For many requests at a time, one thread and several contexts give more.
    on_target_mismatch
        If this CPU lacks what the code needs, "relower" compiles the plan's graph again for this one (seconds; needs
        llvmlite), "refuse" raises PlanTargetError.
    cpus
        CPUs to which the threads of every context are pinned, one for each thread.
    specialise
        What happens at shapes that a plan with open extents has not met: "background" (the default), "wait" or "off";
        see docs/howto/open-shapes.md. Segments of programs are specialised for shapes that come again.
    specialisations
        The most that are kept in memory.
    cache
        Where plans that are compiled for this CPU or for new shapes are kept on disk: the user's engine cache (True), a
        folder, or nowhere (False).
    gpu
        The number of the GPU that a plan for GPUs runs on.
    retune
        Time the tactics of a plan for a GPU that was built without one (minutes, once per cache).

    Raises
    ------
    PlanCorruptError, PlanVersionError, PlanTargetError, ConfigError, OSError
    """
    options = LoadOptions(threads, on_target_mismatch, cpus, specialise or "background", specialisations, cache, gpu)
    plan = read_plan(path)
    return engine_of(retuned(plan, cache, gpu) if retune else plan, options, str(path))


def gpus_of(path: str | os.PathLike[str]) -> Sequence[tuple[GpuInfo, str]]:
    """Return the GPUs of this machine, each with the reason why a plan file cannot run there ("" if it can).

    Returns () for a plan for CPUs. Raises PlanCorruptError, PlanVersionError, PlanTargetError, OSError.
    """
    plan = read_outline(path)
    device = device_of(plan.machine.backend)
    return device.gpus(plan) if isinstance(device, OneOfSeveral) else ()


@dataclass(frozen=True)
class Description:
    """Properties of an engine that are known without loading it; see Engine."""
    inputs: tuple[IoTensor, ...]
    outputs: tuple[IoTensor, ...]
    max_batch: int
    dependence: str
    metadata: Mapping[str, Any]


def describe(path: str | os.PathLike[str]) -> Description:
    """Read the description of a plan file's engine without its code and weights.

    Raises PlanCorruptError, PlanVersionError, OSError.
    """
    plan = read_outline(path)
    tensors = plan.open_part
    return Description(tensors.inputs, tensors.outputs, plan.max_batch, plan.dependence, plan.metadata)
