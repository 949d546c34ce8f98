"""Run of one calibration: observe the float model on the data, then choose biases and ranges by measured error."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from infer_server.calibration.accuracy.comparison import Errors
from infer_server.calibration.bias_correction import ChannelMeans
from infer_server.calibration.collect import collect, histograms_of
from infer_server.calibration.data.checks import DataCheck, dead_channels
from infer_server.calibration.data.items import CalibrationData, Feed
from infer_server.calibration.data.padding import MASK, Padding
from infer_server.calibration.growth import Growth
from infer_server.calibration.histogram import Histogram
from infer_server.calibration.record import SearchRecord, histograms_json
from infer_server.calibration.rounding import MOST_ITEMS as MOMENT_ITEMS
from infer_server.calibration.rounding import SecondMoments, roundings
from infer_server.calibration.search import CANDIDATES, search
from infer_server.calibration.smoothing import ALPHAS, EQUALISING, ChannelPeaks, equalising_factors, smoothing_factors
from infer_server.calibration.table import CalibrationTable, make_table
from infer_server.calibration.trials.judge import FloatRuns, GraphEngines, Judge, float_engines, judged_tensors
from infer_server.engines.backends.device import Show
from infer_server.engines.capacity import bytes_of
from infer_server.engines.compiler.ranges import Notify, Progress
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.errors import CalibrationError
from infer_server.engines.ir.graph import Array
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.passes.quantization.quantize import contractions
from infer_server.engines.passes.quantization.recipe import prepared
from infer_server.engines.passes.quantization.scaled_rows import scalable_rows
from infer_server.engines.passes.quantization.smoothing import carried, equalisable, smoothable

# Budget of the search in multiply-accumulates, so that it is independent of the machine: about 25 s of AVX2.
BUDGET_MACS = 1.5e12
MACS_A_WEIGHT = 2600        # cost of quantising and packing a weight in a trial, estimated from VGG-16
MOST_ITEMS, FEWEST_ITEMS, MOST_TRIALS = 64, 8, 32
STEPS = 3           # trials of bias correction: with and without; of rounding: with
FEW_CANDIDATES = ("percentile", "percentile:99.9999")       # candidates if the budget is too small for all
WIDEST = "percentile:99.9999"       # calibrator with which smoothing, which reduces outliers, is evaluated
SCALING = ("llvm", "numpy")         # backends on which scaled rows are as fast as others
Factors = dict[str, tuple[float, ...]]       # by tensor, one for each channel
T = TypeVar("T")
OBSERVED_BYTES = 2 << 30    # maximum bytes of the observed tensors of a batch

Observe = Callable[[str, str, CalibrationTable, Errors], None]


def model_hash(subject: Subject) -> str:
    """Return a hash of the model and its pixel normalisation, independent of shapes.

    Builds of one model for different shapes can therefore share ranges.
    """
    pixels = subject.builder.config.pixels
    digest = hashlib.sha256(repr(pixels and vars(pixels)).encode())
    digest.update(subject.source.document())
    for name, array in sorted(subject.source.weights.items()):
        digest.update(name.encode())
        digest.update(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())      # object: text
    return digest.hexdigest()[:32]


@dataclass
class _Statistics:
    """Statistics of the float model's tensors over the calibration data."""
    engines: GraphEngines
    data: CalibrationData
    batch: int
    progress: Callable[[int, int], None]
    items: int = 0
    histograms: dict[str, Histogram] = field(default_factory=dict)
    means: dict[str, Any] = field(default_factory=dict)
    peaks: ChannelPeaks = field(default_factory=lambda: ChannelPeaks(()))
    moments: SecondMoments | None = None
    padded: int = 0                 # positions that an attention_mask pads
    growth: Growth = field(default_factory=Growth)

    def collect(self, edges: tuple[str, ...], kept: FloatRuns, peaking: tuple[str, ...] = (),
                check: DataCheck | None = None, moments: SecondMoments | None = None) -> None:
        """Run over the data once.

        Parameters
        ----------
        edges : tuple of str
            Tensors whose histograms and means are collected.
        kept : FloatRuns
            Keeps the first items and their results.
        peaking : tuple of str
            Tensors whose extremes by channel are collected.
        check : DataCheck, optional
            Checks the items.
        moments : SecondMoments, optional
            Collects second moments of the first items.
        """
        means, peaks = ChannelMeans(edges), ChannelPeaks(peaking)
        self.items, self.padded, self.growth = 0, 0, Growth()

        def run(feed: Feed, count: Show) -> None:
            items, padding = self.data.items_in(feed), Padding(feed)

            def observe(tensor: str, values: Array) -> None:
                typical = padding.without(values)
                for look in (means.observe, peaks.observe, count):
                    look(tensor, typical)
                if moments is not None and (left := MOMENT_ITEMS - self.items) > 0:
                    moments.observe(tensor, islice(padding.by_item(values, items), left))

            if check:
                check.observe(feed)
            kept.run(self.engines, feed, items, observe)
            self.items += items
            self.padded += padding.count

        self.histograms = collect(run, self.data, edges, batch=self.batch, progress=self.progress,
                                  growth=self.growth)
        self.means, self.peaks = means.result(), peaks
        self.moments = moments or self.moments

    @property
    def macs(self) -> int:
        return sum(step.macs for step in self.engines.usual.plan.machine.steps)


class CalibrationRun:
    """Run of one calibration: observes the float model on the data, then chooses biases and ranges by error."""

    def __init__(self, subject: Subject, data: CalibrationData, calibrator: str, check: DataCheck | None,
                 notify: Notify, progress: Progress,
                 observe: Observe = lambda stage, label, table, errors: None) -> None:
        """Prepare a run.

        calibrator: "" chooses by measured error. check: checks the items, if they can be checked. observe: called with
        stage, label, table and errors of each trial.
        """
        self._observe = observe
        self._subject, self._data, self._calibrator, self._check = subject, data, calibrator, check
        self._notify, self._progress = notify, progress
        self._edges, self._smoothable = subject.builder.edges(subject.graph), smoothable(subject.graph)
        self._scalable = scalable_rows(subject.graph) if subject.builder.backend in SCALING else ()
        self._convolved = tuple(name for name in equalisable(subject.graph) if name in set(self._edges))
        self._carried = tuple(self._with_carried({name: (1.0,) for name in self._convolved}))
        self._trials = self._spent = 0      # planned and finished trials of the search, for the progress display
        self._known: dict[Any, Errors] = {}     # errors of finished trials, by the contents of their tables
        self._record = SearchRecord()

    def table(self) -> tuple[CalibrationTable, dict[str, Any]]:
        """Return the ranges, and the fields for the plan's metadata."""
        if self._data.note:
            self._notify(self._data.note)
        statistics = self._statistics()
        check = self._check
        judged, trials = self._trial_budget(statistics)
        floats = FloatRuns(self._subject.graph, judged)
        has_steps = not self._calibrator and self._spare_trials(trials) >= 0
        statistics.collect(self._edges, floats, (*self._smoothable, *self._carried), check,
                           SecondMoments(self._subject.graph) if has_steps else None)
        if statistics.padded:
            self._notify(f"{statistics.padded} positions at which {MASK} is 0 are padding and left out of calibration")
        judge = Judge(self._subject, floats, self._tick)
        notes = self._notes(statistics, check) if check else ()
        preprocess = self._data.preprocess
        report: dict[str, Any] = {"preprocess": preprocess.to_json()} if preprocess is not None else {}
        if self._calibrator:
            table = make_table(self._calibrator, model_hash(self._subject), statistics.items,
                               statistics.histograms)
            errors = self._errors(judge, table)
            table = replace(table, histograms=statistics.histograms)
        else:
            statistics, table, errors = self._searched(judge, trials, statistics, report)
        report |= {"search": self._record.as_json(), "histograms": histograms_json(statistics.histograms, table.ranges)}
        return replace(table, notes=notes, fault=errors.fault if errors else ""), report

    def _notes(self, statistics: _Statistics, check: DataCheck) -> tuple[str, ...]:
        """Return warnings about the data and about what the float model makes of them."""
        read = [node.anchor.inputs[0] for node in contractions(self._subject.graph, ())]
        warnings = (self._data.corrupt.note, statistics.growth.warning(statistics.items, statistics.histograms),
                    dead_channels({name: statistics.means[name] for name in read if name in statistics.means}))
        return (*self._data.warnings, *check.warnings(), *filter(None, warnings))

    def _trial_budget(self, statistics: _Statistics) -> tuple[int, int]:
        """Return (number of items on which ranges are evaluated, number of trials)."""
        if self._calibrator:
            return FEWEST_ITEMS, 1
        return _budget(statistics.macs, sum(constant.size for constant in self._subject.graph.constants.values()))

    def _errors(self, judge: Judge, table: CalibrationTable) -> Errors | None:
        """Measure the errors of a named calibrator's ranges on few items; None if no output can be compared."""
        self._trials = 1
        try:
            return self._trial(judge, table, "calibrator", table.calibrator)
        except CalibrationError:
            return None

    def _statistics(self) -> _Statistics:
        subject, graph = self._subject, self._subject.graph
        shown = (*self._edges, *self._smoothable, *judged_tensors(graph))
        engines = float_engines(subject, tuple(dict.fromkeys(shown)))
        plan = engines.usual.plan
        batch = plan.batch_slots if not plan.dependence else 1
        batch = max(min(batch, OBSERVED_BYTES // max(sum(bytes_of(graph.types[name]) for name in self._edges), 1)), 1)
        return _Statistics(engines, self._data, batch, lambda done, of: self._progress("calibrating", done, of, ""))

    def _tick(self) -> None:
        self._progress("searching", min(self._spent, self._trials), self._trials, "")

    def _trial(self, judge: Judge, table: CalibrationTable, stage: str, label: str) -> Errors:
        key = (*(tuple(part.items()) for part in (table.ranges, table.means, table.smoothing)), bool(table.rounding),
               table.scaled_rows)
        if key not in self._known:
            self._known[key] = judge.errors(table.recipe)
        self._spent += 1
        self._tick()
        self._record.add(stage, label, self._known[key])
        self._observe(stage, label, table, self._known[key])
        return self._known[key]

    def _searched(self, judge: Judge, trials: int, statistics: _Statistics,
                  report: dict[str, Any]) -> tuple[_Statistics, CalibrationTable, Errors]:
        """Search for the ranges of least error by so many trials; also return the statistics behind them."""
        spare_trials = self._spare_trials(trials)
        alphas = EQUALISING[:max(spare_trials - 1, 0)] if self._convolved else ()
        equalising = len(alphas) + bool(alphas)
        single = min(max(spare_trials - equalising, 0), MOST_TRIALS)
        candidates = CANDIDATES if spare_trials >= 0 else FEW_CANDIDATES
        self._trials = self._first_trials + equalising + STEPS * (spare_trials >= 0) + len(candidates) + single
        factors: Factors = {}
        moments, peaks, plain = statistics.moments, statistics.peaks, statistics.histograms
        rows = self._scaled_rows(judge, statistics) if self._scalable else ()
        if self._smoothable:
            statistics, factors = self._smoothing(judge, statistics, rows)
        if alphas:
            statistics, factors = self._equalisation(judge, statistics, peaks, factors, rows, alphas)
        hash_, items = model_hash(self._subject), statistics.items
        searched = {name: one for name, one in statistics.histograms.items() if name not in rows}
        usual = replace(make_table("percentile", hash_, items, searched), smoothing=factors, scaled_rows=rows)
        if spare_trials < 0:
            self._notify("a model of this size leaves the search few trials: biases are not corrected, weights are "
                         f"rounded to the nearest, and only {' and '.join(FEW_CANDIDATES)} are compared")
        steps: dict[str, Any] = {"smoothing": factors, "scaled_rows": rows}
        if spare_trials >= 0:
            steps["means"] = self._bias_correction(judge, usual, statistics.means)
            steps["rounding"] = self._rounding(judge, replace(usual, **steps), moments)

        def evaluate(table: CalibrationTable) -> Errors:
            stage = "calibrator" if table.calibrator in candidates else "range"
            return self._trial(judge, replace(table, **steps), stage, table.calibrator)

        result = search(searched, hash_, items, evaluate, single, candidates)
        for stage, label in result.kept():
            self._record.keep(stage, label)
        self._notify(f"calibrators by their error on {judge.items} calibration items (--calibrator forces one):\n"
                     f"{result}")
        report["calibrators"] = {name: vars(errors) for name, errors in result.choice.errors.items()}
        scaled, before = ({name: histograms[name] for name in names if name in histograms} for names, histograms in (
            (rows, statistics.histograms), (factors, plain)))
        of_scaled, unsmoothed = (make_table(result.choice.name, hash_, items, one).ranges for one in (scaled, before))
        ranges = {**result.table.ranges, **of_scaled}
        return statistics, replace(result.table, **steps, ranges=ranges, unsmoothed=unsmoothed), result.errors

    @property
    def _first_trials(self) -> int:
        """Number of trials of scaled rows and smoothing."""
        return 2 * bool(self._scalable) + (1 + len(ALPHAS)) * bool(self._smoothable)

    def _spare_trials(self, trials: int) -> int:
        """Return how many trials the search has beside those of its steps; below 0 if it has too few for them.

        The trial of scaled rows takes the place of two that repeat an earlier one and cost nothing: the first of
        smoothing and the default calibrator.
        """
        repeated = (1 + bool(self._smoothable)) * bool(self._scalable)
        return trials - self._first_trials - len(CANDIDATES) - STEPS + repeated

    def _scaled_rows(self, judge: Judge, plain: _Statistics) -> tuple[str, ...]:
        """Return the tensors whose rows products read with a scale each if that raises the SQNR, else ()."""
        table = make_table(WIDEST, "", 0, plain.histograms)
        is_better = self._is_better(judge, "scaled rows", {"without": table,
                                                           "with": replace(table, scaled_rows=self._scalable)})
        return self._scalable if is_better else ()

    def _smoothing(self, judge: Judge, plain: _Statistics, rows: tuple[str, ...]) -> tuple[_Statistics, Factors]:
        """Return statistics and smoothing factors if smoothing lowers the error, else `plain` and no factors.

        rows: the tensors with scaled rows.
        """
        edges, peaks = tuple(plain.histograms), plain.peaks.result()

        def tried() -> Iterator[tuple[str, CalibrationTable, tuple[_Statistics, Factors]]]:
            table = replace(make_table(WIDEST, "", 0, plain.histograms), scaled_rows=rows)
            yield "without", table, (plain, {})
            for alpha in ALPHAS:
                factors = _plain(smoothing_factors(self._subject.graph,
                                                   {name: peaks[name] for name in self._smoothable}, alpha))
                smoothed = replace(plain, engines=float_engines(self._subject, edges, factors))
                smoothed.collect(edges, FloatRuns(self._subject.graph, 0))
                table = replace(make_table(WIDEST, "", 0, smoothed.histograms), smoothing=factors, scaled_rows=rows)
                yield f"alpha {alpha}", table, (smoothed, factors)

        return self._best(judge, "smoothing", f"smoothing of {len(self._smoothable)} tensors", tried())

    def _equalisation(self, judge: Judge, plain: _Statistics, peaks: ChannelPeaks, smoothing: Factors,
                      rows: tuple[str, ...], alphas: Sequence[float]) -> tuple[_Statistics, Factors]:
        """Return statistics and factors with those of equalisation if it lowers the error, else without them."""
        largest = {name: peak for name, peak in peaks.result().items() if name in self._convolved}
        before = replace(make_table(WIDEST, "", 0, plain.histograms), smoothing=smoothing, scaled_rows=rows)

        def tried() -> Iterator[tuple[str, CalibrationTable, Factors]]:
            yield "without", before, {}
            for alpha in alphas:
                factors = self._with_carried(equalising_factors(self._subject.graph, largest, alpha))
                yield f"alpha {alpha}", replace(before, ranges={**before.ranges, **peaks.ranges(factors)},
                                                smoothing={**smoothing, **factors}), factors

        found = self._best(judge, "equalisation", f"equalisation of {len(self._convolved)} tensors", tried())
        if not found:
            return plain, smoothing
        factors = {**smoothing, **found}
        histograms = histograms_of(float_engines(self._subject, tuple(found), factors).show, judge.feeds, found)
        for name, range_ in peaks.ranges(found).items():
            histograms[name].observe(np.array(range_))
        means = {name: plain.means[name] / s for name, s in found.items() if name in plain.means}
        return replace(plain, histograms={**plain.histograms, **histograms}, means={**plain.means, **means}), factors

    def _with_carried(self, factors: Mapping[str, Iterable[float]]) -> Factors:
        """Return the factors with those of the observed tensors that max pools and concatenations make."""
        edges = set(self._edges)
        return {name: s for name, s in _plain(carried(self._subject.graph, factors)).items() if name in edges}

    def _best(self, judge: Judge, stage: str, name: str, tried: Iterable[tuple[str, CalibrationTable, T]]) -> T:
        """Return the result of the trial of highest SQNR. Trials are (label, table, result), the first "without"."""
        best: tuple[float, str, T] | None = None
        measured: list[str] = []
        for label, table, result in tried:
            sqnr = self._trial(judge, table, stage, label).sqnr_db
            measured.append(f"{sqnr:.2f} dB {'with ' * bool(measured)}{label}")
            if best is None or sqnr > best[0]:
                best = sqnr, label, result
        assert best is not None
        _, kept, found = best
        self._record.keep(stage, kept)
        self._notify(f"{name} {'left out' if kept == 'without' else f'kept with {kept}'}: {', '.join(measured)}")
        return found

    def _bias_correction(self, judge: Judge, table: CalibrationTable, means: Mapping[str, Any]) -> dict[str, Any]:
        """Return the means if correcting biases by them raises the SQNR, else an empty dict."""
        plain_means = {name: tuple(map(float, values)) for name, values in means.items()}
        is_better = self._is_better(judge, "bias correction", {"without": table,
                                                               "with": replace(table, means=plain_means)})
        return plain_means if is_better else {}

    def _rounding(self, judge: Judge, table: CalibrationTable, moments: SecondMoments | None) -> dict[str, str]:
        """Return the rounding of weights by the error of their layers if it raises the SQNR, else an empty dict."""
        if moments is None:
            return {}
        graph = prepared(self._subject.graph, Recipe({}, smoothing=table.smoothing))
        steps = roundings(graph, moments, table.smoothing, bool(table.means), lambda done, of, node: self._progress(
            "searching", min(self._spent, self._trials), self._trials, f"rounding weights, {done} of {of} layers"))
        is_better = self._is_better(judge, "rounding", {"nearest": table,
                                                        "by layer error": replace(table, rounding=steps)},
                                    "rounding of weights by their layers' errors")
        return steps if is_better else {}

    def _is_better(self, judge: Judge, stage: str, tables: Mapping[str, CalibrationTable], name: str = "") -> bool:
        """Return True if the second of two tables, by label, has the higher SQNR; record both and tell the user."""
        before, after = (self._trial(judge, table, stage, label).sqnr_db for label, table in tables.items())
        self._record.keep(stage, [*tables][after > before])
        self._notify(f"{name or stage} {'kept' if after > before else 'left out'}: "
                     f"{before:.2f} dB without, {after:.2f} dB with")
        return after > before


def _plain(factors: Mapping[str, Any]) -> Factors:
    return {name: tuple(map(float, values)) for name, values in factors.items()}


def _budget(macs: int, weights: int) -> tuple[int, int]:
    """(items on which ranges are judged, trials in all) for a model of so many multiply-accumulates and weights."""
    items = int(min(max(BUDGET_MACS / max(macs, 1) // 20, FEWEST_ITEMS), MOST_ITEMS))
    return items, int(BUDGET_MACS / (items * macs + MACS_A_WEIGHT * weights + 1))


def judge_of(subject: Subject, data: CalibrationData, trials: int) -> Judge:
    """Return an evaluator of recipes on the first items, on as many as the budget has for so many trials."""
    graph = subject.graph
    engines = float_engines(subject, judged_tensors(graph))
    macs = sum(step.macs for step in engines.usual.plan.machine.steps)
    weights = sum(constant.size for constant in graph.constants.values())
    items = (BUDGET_MACS / max(trials, 1) - MACS_A_WEIGHT * weights) / max(macs, 1)
    count = int(min(max(items, FEWEST_ITEMS), MOST_ITEMS))
    floats = FloatRuns(graph, count)
    for feed in data.limit(count).batches(1):
        floats.run(engines, feed, 1, lambda name, array: None)
    return Judge(subject, floats)
