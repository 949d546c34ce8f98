"""Record of a model's calibration search: the errors of each trial on the search's items and on unseen ones."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infer_server.calibration.accuracy.comparison import Errors
from infer_server.calibration.open_data import CalibrationData, Feed, open_calibration_data
from infer_server.calibration.run import CalibrationRun
from infer_server.calibration.table import CalibrationTable
from infer_server.calibration.trials.judge import FloatRuns, Judge, float_engines, judged_tensors
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.compiler.subject import Subject, read_subject

CALIBRATION = 64        # calibration items of a draw


@dataclass(frozen=True)
class Trial:
    """Errors of one trial.

    seen    by the search's own measure: {"peak_db", "sqnr_db", "cosine", "top1", ...}
    unseen  on items that are not in the calibration; None for a single range that the search did not keep
    """
    stage: str
    label: str
    seen: dict[str, Any]
    unseen: dict[str, Any] | None


@dataclass(frozen=True)
class SearchRun:
    """Search of one model on one draw of calibration items. final: errors of its result on unseen items."""
    model: str
    draw: int
    trials: tuple[Trial, ...]
    final: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(record: dict[str, Any]) -> SearchRun:
        """Return the run of its JSON."""
        return SearchRun(**{**record, "trials": tuple(Trial(**trial) for trial in record["trials"])})


class _Recorder:
    """Collector of trials. A single range is measured on unseen items only if it improves on those before."""

    def __init__(self, unseen: Judge) -> None:
        self.trials: list[Trial] = []
        self._unseen, self._best = unseen, -np.inf

    def __call__(self, stage: str, label: str, table: CalibrationTable, errors: Errors) -> None:
        is_range = stage == "range"
        if is_range and errors.peak_db <= self._best:
            self.trials.append(Trial(stage, label, vars(errors), None))
            return
        self._best = max(self._best, errors.peak_db) if stage in ("calibrator", "range") else self._best
        self.trials.append(Trial(stage, label, vars(errors), vars(self._unseen.errors(table.recipe))))


def record(model: Path, items: Path, draw: int, most_unseen: int) -> SearchRun:
    """Search with CALIBRATION items of a file and measure each trial on others.

    draw: 0 takes the first items for calibration; others take a random selection by this seed.
    """
    builder = Builder(BuildConfig(precision="int8", timing=False))
    subject = read_subject(builder, str(model), lambda inputs: next(iter(open_calibration_data(str(items), inputs))))
    feeds = list(open_calibration_data(str(items), subject.inputs))
    order = np.random.default_rng(draw).permutation(len(feeds)) if draw else range(len(feeds))
    calibration, others = ([feeds[i] for i in part] for part in (order[:CALIBRATION], order[CALIBRATION:]))
    unseen = _judge(subject, others[:most_unseen])
    recorder = _Recorder(unseen)
    table, _ = CalibrationRun(subject, _data(calibration, subject), "", None, lambda text: None,
                              lambda *step: None, recorder).table()
    return SearchRun(model.stem, draw, tuple(recorder.trials), vars(unseen.errors(table.recipe)))


def _data(feeds: Sequence[Feed], subject: Subject) -> CalibrationData:
    return open_calibration_data(lambda: feeds, subject.inputs)


def _judge(subject: Subject, feeds: Sequence[Feed]) -> Judge:
    """Return an evaluator of recipes on these items."""
    floats = FloatRuns(subject.graph, len(feeds))
    engines = float_engines(subject, judged_tensors(subject.graph))
    for feed in _data(feeds, subject).batches(1):
        floats.run(engines, feed, 1, lambda name, array: None)
    return Judge(subject, floats)
