"""Assemble plans for NVIDIA GPUs without a GPU, and check their machine code.

No kernel may spill registers, and each architecture's own matrix instructions must occur.

    python -m scripts.gpu_cubins --results cubins.json PLAN...              # plans of any machine, with their graphs
    python -m scripts.gpu_cubins --results cubins.json PLAN... --targets sm_61,sm_80
    python -m scripts.gpu_cubins --results cubins.json --table              # results so far

The script needs the extra `cuda`.
"""
from __future__ import annotations

import re
import subprocess
import sys

from infer_server.engines.backends.cuda.codegen.assemble import classes, report_of, sass_of
from infer_server.engines.backends.cuda.codegen.gpu import gpu_named
from infer_server.engines.compiler.specialise import relower
from infer_server.engines.plan.plan import Plan
from scripts.gpu_checks import Check, Result

TARGETS = ("sm_61", "sm_70", "sm_75", "sm_80", "sm_90", "sm_90a", "sm_120")
PRODUCTS = ("IDP", "IMMA", "HMMA", "IGMMA", "HGMMA", "FFMA", "LDL", "STL")


def result_of(plan: Plan, target: str) -> Result:
    """Assemble a plan's kernels; report registers, spills and, if they can be disassembled, instruction counts."""
    ptx = [code for one in relower(plan, target).within() for code in one.machine.code[-1:]]
    cubins, reports = zip(*(report_of(code.decode(), gpu_named(target)) for code in ptx), strict=True)
    spills = [int(number) for report in reports for pair in
              re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report) for number in pair]
    result: Result = {"kernels": len(spills) // 2, "spilled": sum(spills), "bytes": sum(map(len, cubins)),
                             "most registers": max(int(n) for report in reports
                                                   for n in re.findall(r"Used (\d+) registers", report))}
    try:
        every = [classes(sass_of(cubin)) for cubin in cubins]
        result |= {name: sum(one.get(name, 0) for one in every) for name in ("all", *PRODUCTS)}
    except subprocess.CalledProcessError:       # the disassembler does not know so old an architecture
        pass
    return result


def products_of(result: Result) -> str:
    return ", ".join(f"{kind} {result[kind]:,}" for kind in PRODUCTS[:5] if result.get(kind))


CHECK = Check(__doc__, TARGETS, {
    "kernels": lambda result: result["kernels"], "bytes spilled": lambda result: result["spilled"],
    "most registers": lambda result: result["most registers"], "instructions": lambda result: result.get("all", ""),
    "of these products": products_of}, lambda result: result.get("spilled") == 0)


if __name__ == "__main__":
    sys.exit(CHECK.main_of_plans(result_of))
