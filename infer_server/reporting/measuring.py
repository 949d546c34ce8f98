"""Measurements for a report: times of a plan's kernels on this machine, and errors of its layers against the model."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from infer_server.calibration.open_data import Source
from infer_server.cli.profile import Profile, profile
from infer_server.cli.run_engine import ready_context
from infer_server.comparing.comparison import Comparison, Progress, compare
from infer_server.engines.backends import device_of
from infer_server.engines.errors import EngineError
from infer_server.engines.loading import load_engine
from infer_server.engines.plan.plan import Plan
from infer_server.reporting.data import Measured

ITEMS = 8           # items of the comparison


def profiled(plan: Plan, path: str | Path) -> tuple[Profile | None, str]:
    """Return the profile of a plan's file on this machine with one item, or the reason why there is none."""
    if plan.program is not None:
        return None, "this plan is a program, whose kernels are not profiled"
    if elsewhere := device_of(plan.machine.backend).mismatch(plan):
        return None, f"the plan does not run here: {elsewhere}"
    try:
        engine = load_engine(path)
        return profile(engine, ready_context(engine, 1), 1), ""
    except (EngineError, ImportError, OSError) as error:
        return None, f"the plan could not be profiled: {error}"


def compared(path: str | Path, model: str | Path, data: Source | None, preprocess: Any = "",
             progress: Progress = lambda feeds, count: feeds) -> tuple[Comparison | None, str]:
    """Return the errors of a plan's layers against its model, or the reason why there are none."""
    try:
        return compare(path, model, data, items=ITEMS, preprocess=preprocess, progress=progress), ""
    except (EngineError, ImportError, OSError) as error:
        return None, f"the plan could not be compared with {Path(model).name}: {error}"


def measured(plan: Plan, path: str | Path, timing: bool = True, model: str | Path = "", data: Source | None = None,
             preprocess: Any = "", progress: Progress = lambda feeds, count: feeds) -> Measured:
    """Measure a plan for a report.

    Parameters
    ----------
    plan : Plan
    path : path
        File of the plan.
    timing : bool
        False leaves the times out.
    model : path
        ONNX file to compare the layers with; "" leaves that out.
    data : path or callable, optional
        Items of the comparison (infer_server.calibration.open_data); None generates them.
    preprocess : str, Path or Preprocess
        Preprocessing of images among the items.
    progress : callable
        See `infer_server.comparing.comparison.compare`.
    """
    times, no_times = profiled(plan, path) if timing else (None, "the build was asked for no timing")
    if not model:
        return Measured(times, None, no_times, "the model's file was not given, and plans do not keep these errors")
    errors, no_errors = compared(path, model, data, preprocess, progress)
    return Measured(times, errors, no_times, no_errors)
