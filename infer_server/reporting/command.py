"""Option --report of build-engine and inspect-engine."""
from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

from infer_server.calibration.data.items import Feed
from infer_server.engines.compiler.ranges import Notify
from infer_server.engines.errors import ConfigError
from infer_server.engines.plan.plan import Plan
from infer_server.reporting.measuring import ITEMS, measured
from infer_server.reporting.page import write_report


def add_report(parser: argparse._ActionsContainer, more: str = "") -> None:
    """Add the option to a parser. more: what the command measures for it."""
    parser.add_argument("--report", metavar="FILE.html",
                        help="also write a page with the model, the build's decisions, accuracy, kernels and their "
                             f"times, which opens without a network{more}; charts need matplotlib (infer-server[plot])")


def check_report(path: str) -> None:
    """Raise ConfigError if the page cannot be written."""
    if Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: name a file in a folder that exists and is yours to write")


def report_plan(report: str, path: str, plan: Plan, notify: Notify, *, timing: bool = True, model: str = "",
                data: str | None = None, preprocess: str = "", quiet: bool = False) -> None:
    """Measure the plan of a file and write its report.

    Parameters
    ----------
    report : str
        HTML file to write.
    path : str
        File of the plan.
    plan : Plan
    notify : callable
        Called with a line about each step.
    timing : bool
        False leaves the times out.
    model, data, preprocess : str
        See `infer_server.reporting.measuring.measured`.
    quiet : bool
        Show no progress.
    """
    def progress(feeds: Iterable[Feed], count: int) -> Iterable[Feed]:
        from tqdm import tqdm
        return tqdm(feeds, desc="comparing", unit="item", total=min(count, ITEMS) or None, leave=False,
                    disable=True if quiet else None)

    notify(f"{report}: measuring the plan" + " and its layers against the model" * bool(model))
    result = measured(plan, path, timing, model, data, preprocess, progress)
    write_report(report, plan, result, Path(path).stat().st_size)
    notify(f"{report}: {Path(report).stat().st_size / 1e6:.2f} MB, opens in any browser")
