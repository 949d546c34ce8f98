"""Run whole networks on the emulated GPU, and compare them with a plan for the CPU.

INT8 results must be equal; other precisions must be near the plan's floats.

    python -m scripts.gpu_networks --results networks.json PLAN... --targets sm_61,sm_80      # plans of any machine
    python -m scripts.gpu_networks --results networks.json --table                            # results so far

A network with few pixels or tokens takes a minute.
"""
from __future__ import annotations

import sys

import numpy as np

from infer_server.engines.backends.cuda.runtime.device import DEVICE
from infer_server.engines.compiler.specialise import relower
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import IoTensor, Plan
from infer_server.engines.runtime.engine import Engine
from scripts.gpu_checks import Check, Result
from scripts.testing.gpu.emulated import EmulatedGpu

TARGETS = ("sm_61", "sm_75", "sm_80", "sm_90a")
ITEMS = 2
NEAR = 1e-2         # error allowed in FP16, relative to the largest value


def inputs_of(plan: Plan) -> dict[str, Array]:
    """Return inputs: floats around 0, small integers, and ones for inputs named as masks."""
    random = np.random.default_rng(0)

    def drawn(tensor: IoTensor) -> Array:
        shape = tensor.shape_of(min(ITEMS, plan.batch_slots), plan.extents)
        if "mask" in tensor.name:
            return np.ones(shape, tensor.dtype)
        if np.dtype(tensor.dtype).kind in "iu":
            return random.integers(0, 100, shape).astype(tensor.dtype)
        return random.standard_normal(shape).astype(tensor.dtype)
    return {tensor.name: drawn(tensor) for tensor in plan.inputs}


def compared(plan: Plan, target: str) -> Result:
    """Return the error of the outputs relative to those of the CPU.

    BF16 is compared with the portable CPU target, which sums in float32 as GPUs do; vdpbf16ps rounds differently.
    """
    inputs = inputs_of(plan)
    theirs = Engine(relower(plan, "portable") if plan.precision == "bf16" else plan).run(inputs)
    there = relower(plan, target)
    size = 2 * (len(there.machine.constants) + sum(buffer.bytes for buffer in there.machine.buffers)) + (16 << 20)
    DEVICE.open_gpu = lambda number: EmulatedGpu(target, size)
    outputs = Engine(there).run(inputs)
    furthest = max(float(np.abs(outputs[name].astype(np.float64) - value).max() / np.abs(value).max())
                   for name, value in theirs.items())
    same = all(np.array_equal(outputs[name], value) for name, value in theirs.items())
    right = same if plan.precision == "int8" else furthest <= NEAR
    return {"precision": plan.precision, "steps": len(there.machine.steps), "same bytes": same, "error": furthest,
            "right": right}


CHECK = Check(__doc__, TARGETS, {
    "precision": lambda result: result["precision"], "kernels": lambda result: result["steps"],
    "of the CPU's outputs": lambda result: (
        "the same bytes" if result["same bytes"] else f"within {result['error']:.1e}")},
    lambda result: result.get("right", False))


if __name__ == "__main__":
    sys.exit(CHECK.main_of_plans(compared))
