"""Comparison of every kernel family on the emulated GPUs with the reference.

Each problem runs in each precision and by every tactic that the tuner may choose; integers must be equal bit for bit.

    python -m scripts.gpu_families --results families.json
    python -m scripts.gpu_families --results families.json --targets sm_70 --match attention
    python -m scripts.gpu_families --results families.json --table

Twenty minutes of a core for all of them.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial

from infer_server.engines.backends.cuda.codegen.gpu import GPUS
from scripts.gpu_checks import Check, Part, Result
from scripts.testing.gpu.cases import CASES
from scripts.testing.gpu.runner import GpuRunner, every_way
from scripts.testing.suite import check

TARGETS = ("sm_61", "sm_70", "sm_75", "sm_80", "sm_90a")


def checked(name: str, target: str) -> Result:
    """Check all tactics of a case; return the number of correct ones and the errors of the others."""
    case, tolerance = CASES[name]
    problem, inputs, constants = case()
    ways = every_way(problem, GPUS[target])
    wrong = {}
    for way in ways:
        try:
            check(way, GpuRunner(GPUS[target]), inputs, constants, tolerance)
        except Exception as error:      # from the comparison, the PTX emulator or the compiler
            wrong[str(way.tactic)] = str(error)[:600]
    return {"tactics": len(ways), "wrong": wrong}


def subjects(options: argparse.Namespace) -> Mapping[str, Part]:
    return {name: partial(checked, name) for name in CASES if options.match in name}


CHECK = Check(__doc__, TARGETS, {
    "tactics": lambda result: result["tactics"], "wrong": lambda result: ", ".join(result["wrong"])},
    lambda result: result.get("wrong") == {})


if __name__ == "__main__":
    sys.exit(CHECK.main(subjects, lambda parser: parser.add_argument(
        "--match", default="", help="only cases with this in their name")))
