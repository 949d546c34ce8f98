"""Constants of the search that data can choose: their values, and what each would have given on recorded trials.

A value is judged by the SQNR in dB of its choice on unseen items. For each model, the value of the best mean over the
other models is compared on that model with the value that the search has.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.search.trials import SearchRun, Trial
from infer_server.calibration.run import MOST_TRIALS
from infer_server.calibration.search import CANDIDATES, TIE_DB

Apply = Callable[[SearchRun], float | None]      # SQNR in dB on unseen items; None if the model has no such step


@dataclass(frozen=True)
class Constant:
    """Constant with the candidates of its value, by name, and the name of the search's own value."""
    name: str
    own: str
    values: Mapping[str, Apply]


@dataclass(frozen=True)
class LeftOut:
    """Result for one constant and one model that was left out: the value that the others choose, and the loss in dB.

    loss and own_loss are how far the chosen value and the search's own lie below the best value on the model.
    """
    constant: str
    model: str
    chosen: str
    loss: float
    own_loss: float


def leave_one_out(runs: Sequence[SearchRun], constants: Iterable[Constant]) -> list[LeftOut]:
    """Choose each constant without one model, and measure the choice on that model."""
    results = []
    for constant in constants:
        losses = {model: found for model in dict.fromkeys(run.model for run in runs)
                  if (found := _losses([run for run in runs if run.model == model], constant))}
        for model, own in losses.items():
            others = [found for other, found in losses.items() if other != model]
            if not others:
                continue
            chosen = min(constant.values, key=lambda value: fmean(found[value] for found in others))
            results.append(LeftOut(constant.name, model, chosen, own[chosen], own[constant.own]))
    return results


def _losses(runs: Sequence[SearchRun], constant: Constant) -> dict[str, float]:
    """Return by value the mean over the draws of the dB below the best value; empty if the step is missing."""
    rows: list[dict[str, float]] = []
    for run in runs:
        unseen = {value: db for value, apply in constant.values.items() if (db := apply(run)) is not None}
        if len(unseen) == len(constant.values):
            best = max(unseen.values())
            rows.append({value: best - db for value, db in unseen.items()})
    return {value: fmean(row[value] for row in rows) for value in constant.values} if rows else {}


# ---- values
def _db(trial: Trial) -> float:
    assert trial.unseen is not None, trial
    return float(trial.unseen["sqnr_db"])


def _stage(run: SearchRun, stage: str) -> list[Trial]:
    return [trial for trial in run.trials if trial.stage == stage]


def _calibrator(key: str, tie_db: float) -> Apply:
    """Choose the calibrator of the largest `key` on the search's items; ties within tie_db go by top-1 and order."""
    def apply(run: SearchRun) -> float | None:
        trials = _stage(run, "calibrator")[:len(CANDIDATES)]
        if not trials:
            return None
        best = max(trial.seen[key] for trial in trials)
        equals = [trial for trial in trials if trial.seen[key] >= best - tie_db]
        return _db(max(equals, key=lambda trial: trial.seen["top1"] or 0.0))
    return apply


def _fixed(name: str) -> Apply:
    return lambda run: next((_db(trial) for trial in _stage(run, "calibrator") if trial.label == name), None)


def _step(stage: str, rule: str) -> Apply:
    """Take a step always, never, or if it raises the SQNR on the search's items."""
    def apply(run: SearchRun) -> float | None:
        trials = _stage(run, stage)
        if len(trials) < 2:
            return None
        without, with_step = trials[0], trials[1]
        is_better = with_step.seen["sqnr_db"] > without.seen["sqnr_db"]
        return _db(with_step if rule == "always" or (rule == "by trial" and is_better) else without)
    return apply


def _ranges(most: int) -> Apply:
    """Change single ranges by the first `most` trials."""
    def apply(run: SearchRun) -> float | None:
        start = _calibrator("peak_db", TIE_DB)(run)
        measured = [trial for trial in _stage(run, "range")[:most] if trial.unseen is not None]
        return _db(measured[-1]) if measured else start
    return apply


CONSTANTS = (
    Constant("criterion of the calibrator", "peak SNR", {
        "peak SNR": _calibrator("peak_db", TIE_DB), "SQNR": _calibrator("sqnr_db", TIE_DB),
        "cosine": _calibrator("cosine", 0.0)}),
    Constant("TIE_DB", f"{TIE_DB:g}", {f"{tie:g}": _calibrator("peak_db", tie) for tie in (0.0, TIE_DB, 0.3, 1.0)}),
    Constant("calibrator", "by trial", {"by trial": _calibrator("peak_db", TIE_DB),
                                        **{name: _fixed(name) for name in CANDIDATES}}),
    Constant("bias correction", "by trial", {rule: _step("bias correction", rule)
                                             for rule in ("by trial", "always", "never")}),
    Constant("rounding", "by trial", {rule: _step("rounding", rule) for rule in ("by trial", "always", "never")}),
    Constant("MOST_TRIALS", str(MOST_TRIALS), {str(most): _ranges(most) for most in (0, 8, 16, MOST_TRIALS)}),
)
