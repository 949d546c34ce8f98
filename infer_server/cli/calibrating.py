"""Calibration as build-engine does it: watch the float model, correct biases, choose ranges, all by measured error."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from calibration.bias_correction import ChannelMeans, correct_biases
from calibration.choose import Errors, compare
from calibration.collect import collect
from calibration.data.preprocess import Preprocess, load_preprocess
from calibration.histogram import Histogram
from calibration.open_data import CalibrationData, Feed, open_calibration_data
from calibration.search import CANDIDATES, search
from calibration.smoothing import ALPHAS, ChannelPeaks, smoothable, smoothed, smoothing_factors
from calibration.table import CalibrationTable, load_or_make, make_table
from engines.compiler.builder import TRIAL_BATCH, Builder
from engines.errors import ConfigError
from engines.ir.graph import Array, Graph
from engines.runtime.engine import Engine
from engines.runtime.fallback import to_real

Say = Callable[[str], None]

# What the search may spend, in multiply-accumulates, so that it does not depend on the machine: about 25 s of AVX2.
BUDGET_MACS = 1.5e12
MACS_A_WEIGHT = 2600        # of quantising and packing again in a trial: an estimate from how long VGG-16 took
MOST_ITEMS, FEWEST_ITEMS, MOST_TRIALS = 64, 8, 32
FEW_CANDIDATES = ("percentile", "percentile:99.9999")       # where the budget is too small for all
WIDEST = "percentile:99.9999"       # under which smoothing is judged: outliers are what it evens out


@dataclass(frozen=True)
class Calibration:
    """Where an int8 build takes its ranges from."""
    source: str = ""            # --calib
    calibrator: str = ""        # --calibrator; "" chooses by measured error
    cache: str = ""             # --calib-cache
    preprocess: str = ""        # --preprocess: a preset or a TOML file
    uint8_input: bool = False   # --uint8-input: the engine does the last part of the preprocessing

    @property
    def declared(self) -> Preprocess | None:
        """What the data goes through before the engine, if that is declared."""
        if not self.preprocess:
            return None
        declared = load_preprocess(self.preprocess)
        return declared.of_pixels if self.uint8_input else declared


@dataclass(frozen=True)
class Calibrated:
    """The float graph, its biases corrected if that helps, the ranges, and what the plan records of it all."""
    graph: Graph
    table: CalibrationTable
    report: Mapping[str, Any]


def calibrate(builder: Builder, graph: Graph, wanted: Calibration, say: Say) -> Calibrated:
    """Ranges from the cache, if one fits, else from the data. Raises EngineErrors about options, data and cache."""
    report: dict[str, Any] = {}

    def make() -> CalibrationTable:
        if not wanted.source:
            state = "is of another model or calibrator" if Path(wanted.cache).exists() else "does not exist"
            raise ConfigError(f"the calibration cache {wanted.cache} {state}; give --calib to calibrate")
        table, found = _from_data(builder, graph, wanted, say)
        report.update(found)
        return table

    if not wanted.cache and not wanted.source:
        raise ConfigError("an int8 build needs calibration: give --calib, or --calib-cache with a cache that exists")
    if wanted.cache:
        cached = load_or_make(wanted.cache, graph_hash(graph), make, wanted.calibrator or None)
        table = cached.table
        say(cached.note)
    else:
        table = make()
    missing = [name for name in builder.edges(graph) if name not in table.ranges]
    if missing:
        say(f"no ranges for {len(missing)} tensors ({', '.join(missing[:3])}, ...): what reads them stays in float")
    report |= {"calibrator": table.calibrator, "calibration_items": table.items, "biases_corrected": bool(table.means),
               "tensors_smoothed": len(table.smoothing)}
    return Calibrated(prepared(builder, graph, table), table, report)


def graph_hash(graph: Graph) -> str:
    """Of all that ranges depend on: the graph's text and its weights."""
    digest = hashlib.sha256(str(graph).encode())
    for name in sorted(graph.constants):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(graph.constants[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:32]


def prepared(builder: Builder, graph: Graph, table: CalibrationTable) -> Graph:
    """The float graph as the table wants it quantised: channels smoothed, and biases that its means ask for."""
    graph = smoothed(graph, table.smoothing)
    if not table.means:
        return graph
    means = {tensor: np.asarray(values) for tensor, values in table.means.items()}
    return correct_biases(graph, builder.stored(graph, table.ranges), means).graph


@dataclass
class _Watched:
    """The float model's outputs and edges, over the calibration data."""
    engine: Engine
    data: CalibrationData
    batch: int
    histograms: dict[str, Histogram] = field(default_factory=dict)
    means: dict[str, Any] = field(default_factory=dict)
    peaks: dict[str, Any] = field(default_factory=dict)

    def watch(self, edges: tuple[str, ...], peaking: tuple[str, ...] = ()) -> None:
        """One pass over the data. peaking: the tensors whose channels' peaks are wanted."""
        means, peaks = ChannelMeans(edges), ChannelPeaks(peaking)

        def run(feed: Feed) -> Mapping[str, Array]:
            values = self.engine.run(feed)
            means.observe(values)
            peaks.observe(values)
            return values

        self.histograms = collect(run, self.data, edges, batch=self.batch)
        self.means, self.peaks = means.result(), peaks.result()

    @property
    def macs(self) -> int:
        return sum(step.macs for step in self.engine.plan.steps)


def _from_data(builder: Builder, graph: Graph, wanted: Calibration,
               say: Say) -> tuple[CalibrationTable, dict[str, Any]]:
    """Run the float model over the data; correct biases and search for ranges, each if it lowers the error."""
    edges, uneven = builder.edges(graph), smoothable(graph)
    engine = Engine(builder.watching(graph, dict.fromkeys((*edges, *uneven))))
    data = open_calibration_data(wanted.source, engine.inputs, wanted.declared)
    if data.note:
        say(data.note)
    watched = _Watched(engine, data, TRIAL_BATCH if engine.max_batch and not engine.dependence else 1)
    watched.watch(edges, uneven)
    report: dict[str, Any] = {"preprocess": data.preprocess.to_json()} if data.preprocess is not None else {}
    hash_, items = graph_hash(graph), data.count or 0
    if wanted.calibrator:
        return make_table(wanted.calibrator, hash_, items, watched.histograms), report

    judged, trials = _budget(watched.macs, sum(constant.size for constant in graph.constants.values()))
    judge = Judge(builder, graph, engine, data.limit(judged), watched.batch)
    factors: dict[str, tuple[float, ...]] = {}
    if uneven:
        watched, factors = _smoothing(builder, graph, judge, watched, say)
        trials -= 1 + len(ALPHAS)
    usual = replace(make_table("percentile", hash_, items, watched.histograms), smoothing=factors)
    spare = trials - len(CANDIDATES) - 2        # 2: with biases corrected, and without
    if spare < 0:
        say(f"a model of this size leaves the search few trials: biases are not corrected, and of the calibrators only "
            f"{' and '.join(FEW_CANDIDATES)} are compared")
    with_means = _bias_correction(judge, usual, watched.means, say) if spare >= 0 else {}
    found = search(watched.histograms, hash_, items,
                   lambda table: judge.errors(replace(table, means=with_means, smoothing=factors)),
                   min(max(spare, 0), MOST_TRIALS), CANDIDATES if spare >= 0 else FEW_CANDIDATES)
    say(f"calibrators by their error on {judge.items} calibration items (--calibrator forces one):\n{found}")
    report["calibrators"] = {name: vars(errors) for name, errors in found.choice.errors.items()}
    return replace(found.table, means=with_means, smoothing=factors), report


def _budget(macs: int, weights: int) -> tuple[int, int]:
    """(items on which ranges are judged, trials in all) for a model of so many multiply-accumulates and weights."""
    items = int(min(max(BUDGET_MACS / max(macs, 1) // 20, FEWEST_ITEMS), MOST_ITEMS))
    return items, int(BUDGET_MACS / (items * macs + MACS_A_WEIGHT * weights + 1))


def _smoothing(builder: Builder, graph: Graph, judge: Judge, plain: _Watched,
               say: Say) -> tuple[_Watched, dict[str, tuple[float, ...]]]:
    """What was watched, and the factors, if channels smoothed by them lower the error; else `plain` and none."""
    edges = tuple(plain.histograms)
    before = judge.errors(make_table(WIDEST, "", 0, plain.histograms)).sqnr_db
    best, kept, measured = before, "left out", [f"{before:.2f} dB without"]
    found: tuple[_Watched, dict[str, tuple[float, ...]]] = (plain, {})
    for alpha in ALPHAS:
        factors = {name: tuple(map(float, s)) for name, s in smoothing_factors(graph, plain.peaks, alpha).items()}
        even = replace(plain, engine=Engine(builder.watching(smoothed(graph, factors), edges)))
        even.watch(edges)
        after = judge.errors(replace(make_table(WIDEST, "", 0, even.histograms), smoothing=factors)).sqnr_db
        measured.append(f"{after:.2f} dB with alpha {alpha}")
        if after > best:
            best, kept, found = after, f"kept with alpha {alpha}", (even, factors)
    say(f"smoothing of {len(plain.peaks)} tensors {kept}: {', '.join(measured)}")
    return found


def _bias_correction(judge: Judge, table: CalibrationTable, means: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """The means, if biases corrected by them lower the error; else none."""
    plain_means = {name: tuple(map(float, values)) for name, values in means.items()}
    before, after = judge.errors(table), judge.errors(replace(table, means=plain_means))
    better = after.sqnr_db > before.sqnr_db
    say(f"bias correction {'kept' if better else 'left out'}: "
        f"{before.sqnr_db:.2f} dB without, {after.sqnr_db:.2f} dB with")
    return plain_means if better else {}


class Judge:
    """Measures what a table does to a model's outputs."""

    def __init__(self, builder: Builder, graph: Graph, floats: Engine, data: CalibrationData, batch: int) -> None:
        self._builder, self._graph = builder, graph
        self._feeds: list[Feed] = list(data.batches(batch))
        self.items = sum(data.items_in(feed) for feed in self._feeds)
        self._expected = [self._outputs(floats, feed) for feed in self._feeds]

    def _outputs(self, engine: Engine, feed: Feed) -> dict[str, Array]:
        """The model's, as real numbers: bfloat16 comes as its bits."""
        values = engine.run(feed)
        return {name: to_real(values[name], None, str(self._graph.types[name].dtype)) for name in self._graph.outputs}

    def errors(self, table: CalibrationTable) -> Errors:
        graph = prepared(self._builder, self._graph, table)
        engine = Engine(self._builder.trial(graph, table.ranges))
        return compare(self._expected, [self._outputs(engine, feed) for feed in self._feeds])
