"""Assembles plans for NVIDIA GPUs without one: no kernel may spill, and each architecture's own products must be there.

    python scripts/gpu_cubins.py --results cubins.json PLAN...              # plans of any machine, with their graphs
    python scripts/gpu_cubins.py --results cubins.json PLAN... --targets sm_61,sm_80
    python scripts/gpu_cubins.py --results cubins.json --table              # what has been found so far

Results are written as they come; what is there is not done again. Needs the extra `cuda`.
"""
from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engines.backends.cuda.codegen.assemble import classes, report_of, sass_of
from engines.backends.cuda.codegen.gpu import gpu_named
from engines.compiler.specialise import relower
from engines.errors import ConfigError
from engines.plan.file import read_plan
from engines.plan.plan import Plan

TARGETS = ("sm_61", "sm_70", "sm_75", "sm_80", "sm_90", "sm_90a", "sm_120")
PRODUCTS = ("IDP", "IMMA", "HMMA", "IGMMA", "HGMMA", "FFMA", "LDL", "STL")


def found_of(plan: Plan, target: str) -> dict[str, Any]:
    """What the assembler says of its kernels, and what is in the machine code where the disassembler knows it."""
    begin = time.monotonic()
    ptx = [code for one in relower(plan, target).within() for code in one.machine.code[-1:]]
    cubins, reports = zip(*(report_of(code.decode(), gpu_named(target)) for code in ptx), strict=True)
    spills = [int(number) for report in reports for pair in
              re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report) for number in pair]
    found: dict[str, Any] = {"kernels": len(spills) // 2, "spilled": sum(spills), "bytes": sum(map(len, cubins)),
                             "most registers": max(int(n) for report in reports
                                                   for n in re.findall(r"Used (\d+) registers", report))}
    try:
        every = [classes(sass_of(cubin)) for cubin in cubins]
        found |= {name: sum(one.get(name, 0) for one in every) for name in ("all", *PRODUCTS)}
    except subprocess.CalledProcessError:       # the disassembler does not know so old an architecture
        pass
    return {**found, "seconds": round(time.monotonic() - begin, 1)}


def table(results: dict[str, dict[str, Any]]) -> str:
    """In Markdown."""
    rows = [["plan", "target", "kernels", "bytes spilled", "instructions", "of these products"], ["---"] * 6]
    for key, found in results.items():
        name, target = key.split()
        products = ", ".join(f"{kind} {found[kind]:,}" for kind in PRODUCTS[:5] if found.get(kind))
        told = found.get("kernels", ""), found.get("spilled", found.get("refused")), found.get("all", "")
        rows.append([name, f"`{target}`", *map(str, told), products])
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
                results[key] = found_of(plan, target)
            except ConfigError as error:        # a node that no kernel runs
                results[key] = {"refused": str(error)}
            print(key, results[key], flush=True)
            options.results.write_text(json.dumps(results, indent=1))
    if options.table:
        print(table(results))
    return int(any(found.get("spilled", 1) for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
