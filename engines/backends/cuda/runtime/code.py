"""Chooses the code that the driver can load: machine code for exactly this GPU, else PTX.

A driver may reject machine code of a newer CUDA. PTX is written in the lowest version with the needed features; the
driver compiles it at each start.
"""
from __future__ import annotations

import re
from functools import partial
from typing import Any

from infer_server.engines.backends.cuda.runtime.driver import ELF, GpuDriver
from infer_server.engines.backends.cuda.runtime.holdings import GpuResources
from infer_server.engines.backends.cuda.runtime.library import CudaCodeError
from infer_server.engines.errors import PlanCorruptError, PlanTargetError
from infer_server.engines.plan.plan import Plan

# PTX version -> first CUDA whose driver accepts it, if newer than the oldest driver: PTX ISA, "Release Notes".
CUDA_OF_PTX = {"7.8": "11.8", "8.4": "12.4", "8.6": "12.7", "8.7": "12.8"}


def functions_of(plan: Plan, gpu: GpuDriver, held: GpuResources) -> list[Any]:
    """Load a plan's code and return the kernel of each step. The module is added to `held`.

    Raises
    ------
    PlanCorruptError
        The plan has no code for this GPU, or a step without a launch.
    PlanTargetError
        The driver rejects all of the code.
    CudaError
        Any other error of the driver.
    """
    own = gpu.takes_cubins and gpu.architecture == plan.machine.target.rstrip("a")
    forms = [code for code in plan.machine.code if own or code[:4] != ELF]      # the machine code comes first
    if not forms:
        raise PlanCorruptError(f"{plan.name}: the plan has no code for {gpu.architecture}; build it again")
    for code in forms[:-1]:
        try:
            return _functions(plan, code, gpu, held)
        except CudaCodeError as refusal:
            import logging  # imported only when it is needed
            logging.getLogger(__name__).warning("%s: %s rejects the machine code (%s), so the PTX is compiled",
                                                plan.name, _driver(gpu), refusal)
    try:
        return _functions(plan, forms[-1], gpu, held)
    except CudaCodeError as refusal:
        raise PlanTargetError(f"{plan.name}: {_driver(gpu)} rejects the kernels: {refusal}"
                              f"{_needed(forms[-1])}") from refusal


def _functions(plan: Plan, code: bytes, gpu: GpuDriver, held: GpuResources) -> list[Any]:
    """Return the kernels of one form of the code. On CudaCodeError the module is unloaded."""
    module = gpu.load(code)
    try:
        found = []
        for step in plan.machine.steps:
            if step.launch is None:
                raise PlanCorruptError(f"{plan.name}: step '{step.name}' has no GPU launch; build the plan again")
            found.append(gpu.function(module, step.symbol, step.launch.shared_bytes))
    except CudaCodeError:       # drivers may validate code lazily
        gpu.unload(module)
        raise
    held.add(partial(gpu.unload, module))
    return found


def _driver(gpu: GpuDriver) -> str:
    return "the NVIDIA driver here, of CUDA {}.{},".format(*gpu.cuda_version())


def _needed(code: bytes) -> str:
    found = re.search(rb"^\.version (\d+\.\d+)", code, re.M)
    version = found[1].decode() if found else ""
    if version not in CUDA_OF_PTX:
        return ""
    return f"; PTX {version} needs a driver of CUDA {CUDA_OF_PTX[version]} or later"
