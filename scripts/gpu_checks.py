"""Command line shared by the long checks of GPU kernels.

A check consists of parts, one for each subject and architecture. Each result is written at once, and parts with a
result are not run again: a check can be stopped and resumed.
"""
from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from infer_server.engines.errors import ConfigError
from infer_server.engines.plan.file import read_plan
from infer_server.engines.plan.plan import Plan

Result = dict[str, Any]         # results of a check; "refused": why no kernel runs it there; "failed": the error
Part = Callable[[str], Result]  # function that checks an architecture


@dataclass(frozen=True)
class Check:
    """Check of emulated GPUs with a command line, JSON results and a Markdown table.

    what: help text of the command. columns: functions from a result to each column of the table. right: returns True
    if a result is as expected.
    """
    what: str
    targets: Sequence[str]
    columns: Mapping[str, Callable[[Result], object]]
    right: Callable[[Result], bool]

    def main(self, subjects: Callable[[argparse.Namespace], Mapping[str, Part]],
             add_options: Callable[[argparse.ArgumentParser], object]) -> int:
        """Run the checks that have no result.

        subjects: returns the checks by name, from the options that `add_options` adds to the parser.
        """
        parser = argparse.ArgumentParser(description=self.what, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_options(parser)
        parser.add_argument("--results", type=Path, required=True, metavar="FILE.json")
        parser.add_argument("--targets", type=lambda text: text.split(","), default=self.targets, metavar="SM,...")
        parser.add_argument("--minutes", type=float, default=math.inf, help="after which nothing is begun")
        parser.add_argument("--table", action="store_true", help="what has been found so far, in Markdown")
        options = parser.parse_args()
        end, results = time.monotonic() + 60 * options.minutes, {}
        if options.results.exists():
            results = json.loads(options.results.read_text())
        checks = {f"{name} {target}": partial(part, target) for name, part in subjects(options).items()
                  for target in options.targets}
        for key in [key for key in checks if key not in results]:
            if time.monotonic() >= end:
                break
            results[key] = result_of(checks[key])
            print(f"{len(results.keys() & checks.keys())} of {len(checks)}: {key}: {results[key]}", flush=True)
            options.results.write_text(json.dumps(results, indent=1))
        if options.table:
            print(self.table(results))
        missing = len(checks.keys() - results.keys())
        wrong = [key for key, one in results.items() if not self.right(one)]
        print(f"{len(results)} done, {missing} to do; {len(wrong)} not right{': ' * bool(wrong)}{', '.join(wrong)}")
        return int(bool(wrong))

    def table(self, results: Mapping[str, Result]) -> str:
        """Return the results in Markdown, with the reason in place of a result that is missing."""
        rows = [["of", "target", *self.columns], ["---"] * (len(self.columns) + 2)]
        for key, one in results.items():
            name, _, target = key.rpartition(" ")
            reason = one.get("refused") or one.get("failed", "").strip().rpartition("\n")[2]
            rows.append([name, f"`{target}`", *([reason] if reason else
                                                [str(read(one)) for read in self.columns.values()])])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def main_of_plans(self, check_plan: Callable[[Plan, str], Result]) -> int:
        """Run the check on plans with graphs, compiled for any target."""
        def subjects(options: argparse.Namespace) -> Mapping[str, Part]:
            return {path.stem: partial(_check_plan, check_plan, path) for path in options.plans}

        return self.main(subjects, lambda parser: parser.add_argument("plans", nargs="*", type=Path, metavar="PLAN"))


def result_of(part: Callable[[], Result]) -> Result:
    """Run a part and return its result and seconds; an exception becomes a result, too."""
    begin = time.monotonic()
    try:
        result = part()
    except ConfigError as error:        # a node that no kernel runs
        result = {"refused": str(error)}
    except Exception:
        result = {"failed": traceback.format_exc()}
    return {**result, "seconds": round(time.monotonic() - begin, 1)}


def _check_plan(check_plan: Callable[[Plan, str], Result], path: Path, target: str) -> Result:
    return check_plan(read_plan(path), target)
