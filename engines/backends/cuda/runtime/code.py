"""What of a plan's code a driver takes: the machine code if it is this GPU's own, else the PTX.

Machine code of a later CUDA than the driver's may be refused; PTX is written in the lowest version that has what is
used, and the driver compiles it, at each start.
"""
from __future__ import annotations

import re
from functools import partial
from typing import Any

from engines.backends.cuda.runtime.driver import ELF, GpuDriver
from engines.backends.cuda.runtime.holdings import Holdings
from engines.backends.cuda.runtime.library import CudaCodeError
from engines.errors import PlanCorruptError, PlanTargetError
from engines.plan.plan import Plan

# The first CUDA whose driver takes a version of PTX that the oldest driver does not: NVIDIA's "PTX ISA", release notes.
CUDA_OF_PTX = {"7.8": "11.8", "8.4": "12.4", "8.6": "12.7", "8.7": "12.8"}


def functions_of(plan: Plan, gpu: GpuDriver, held: Holdings) -> list[Any]:
    """The kernel of each step, in a module that is held. Raises PlanCorruptError; PlanTargetError: the driver takes
    none of the code; CudaError."""
    own = gpu.takes_cubins and gpu.architecture == plan.machine.target.rstrip("a")
    forms = [code for code in plan.machine.code if own or code[:4] != ELF]      # the machine code comes first
    if not forms:
        raise PlanCorruptError(f"{plan.name}: there is no code for {gpu.architecture} in it")
    for code in forms[:-1]:
        try:
            return _functions(plan, code, gpu, held)
        except CudaCodeError as refusal:
            import logging  # a plan that is taken at once needs none
            logging.getLogger(__name__).warning("%s: %s does not take its machine code (%s), and compiles the PTX",
                                                plan.name, _driver(gpu), refusal)
    try:
        return _functions(plan, forms[-1], gpu, held)
    except CudaCodeError as refusal:
        raise PlanTargetError(f"{plan.name}: {_driver(gpu)} does not take its kernels: {refusal}"
                              f"{_needed(forms[-1])}") from refusal


def _functions(plan: Plan, code: bytes, gpu: GpuDriver, held: Holdings) -> list[Any]:
    """Raises CudaCodeError, after which nothing of it is held."""
    module = gpu.load(code)
    try:
        found = []
        for step in plan.machine.steps:
            if step.launch is None:
                raise PlanCorruptError(f"{plan.name}: step '{step.name}' is none of a GPU's")
            found.append(gpu.function(module, step.symbol, step.launch.shared_bytes))
    except CudaCodeError:       # a driver may look at the code no sooner than a kernel of it is asked for
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
    return f"; they are PTX {version}, which a driver of CUDA {CUDA_OF_PTX[version]} or later takes"
