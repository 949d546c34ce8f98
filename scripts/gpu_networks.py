"""Whole networks on the emulated GPU: INT8 gives the bytes of the plan for a CPU, other precisions are near its floats.

    python scripts/gpu_networks.py --results networks.json PLAN... --targets sm_61,sm_80      # plans of any machine
    python scripts/gpu_networks.py --results networks.json --table                            # what was found so far

A network of few pixels or tokens takes a minute. Results are written as they come; what is there is not done again.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from engines.backends.cuda.runtime.device import DEVICE
from engines.compiler.specialise import relower
from engines.errors import ConfigError
from engines.ir.graph import Array
from engines.plan.file import read_plan
from engines.plan.plan import IoTensor, Plan
from engines.runtime.engine import Engine
from tests.gpu.emulated import EmulatedGpu

TARGETS = ("sm_61", "sm_75", "sm_80", "sm_90a")
ITEMS = 2
NEAR = 1e-2         # of the largest value: what halves may differ by


def inputs_of(plan: Plan) -> dict[str, Array]:
    """Floats around 0; of integers small ones, and of masks, whose name says that they are, ones."""
    random = np.random.default_rng(0)

    def drawn(tensor: IoTensor) -> Array:
        shape = tensor.shape_of(min(ITEMS, plan.batch_slots), plan.extents)
        if "mask" in tensor.name:
            return np.ones(shape, tensor.dtype)
        if np.dtype(tensor.dtype).kind in "iu":
            return random.integers(0, 100, shape).astype(tensor.dtype)
        return random.standard_normal(shape).astype(tensor.dtype)
    return {tensor.name: drawn(tensor) for tensor in plan.inputs}


def compared(plan: Plan, target: str) -> dict[str, Any]:
    """How far the outputs are from those of the CPU."""
    begin, inputs = time.monotonic(), inputs_of(plan)
    theirs = Engine(plan).run(inputs)
    there = relower(plan, target)
    size = 2 * (len(there.machine.constants) + sum(buffer.bytes for buffer in there.machine.buffers)) + (16 << 20)
    DEVICE.open_gpu = lambda number: EmulatedGpu(target, size)
    ours = Engine(there).run(inputs)
    furthest = max(float(np.abs(ours[name].astype(np.float64) - value).max() / np.abs(value).max())
                   for name, value in theirs.items())
    same = all(np.array_equal(ours[name], value) for name, value in theirs.items())
    right = same if plan.precision == "int8" else furthest <= NEAR
    return {"precision": plan.precision, "steps": len(there.machine.steps), "same bytes": same, "error": furthest,
            "right": right, "seconds": round(time.monotonic() - begin, 1)}


def table(results: dict[str, dict[str, Any]]) -> str:
    """In Markdown."""
    rows = [["plan", "target", "kernels", "of the CPU's outputs"], ["---"] * 4]
    for key, found in results.items():
        name, target = key.split()
        said = found.get("refused") or ("the same bytes" if found["same bytes"] else f"within {found['error']:.1e}")
        rows.append([name, f"`{target}`", str(found.get("steps", "")), said])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", type=Path, metavar="PLAN")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    for path in options.plans:
        plan = read_plan(path)
        for target in options.targets.split(","):
            if (key := f"{path.stem} {target}") in results:
                continue
            try:
                results[key] = compared(plan, target)
            except ConfigError as error:        # a node that no kernel runs
                results[key] = {"refused": str(error)}
            print(key, results[key], flush=True)
            options.results.write_text(json.dumps(results, indent=1))
    if options.table:
        print(table(results))
    return int(not all(found.get("right") for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
