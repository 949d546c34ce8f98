"""The whole way from an ONNX file to a plan: import, calibrate, choose ranges by measured error, compile."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibration.choose import Errors, choose, compare

from calibration.collect import collect
from calibration.data import CalibrationData, Feed, open_calibration_data
from calibration.preprocess import load_preprocess
from calibration.table import CalibrationTable, load_or_make, make_table
from engines.builder import TRIAL_BATCH, BuildConfig, Builder
from engines.errors import ConfigError
from engines.ir import Array, Graph
from engines.plan import Plan
from engines.runtime import Engine

CANDIDATES = ("entropy", "percentile", "mse", "minmax")     # of a build that is free to choose
JUDGED_ITEMS = 64               # items on which the candidates are compared
Say = Callable[[str], None]


@dataclass(frozen=True)
class Calibration:
    """Where an int8 build takes its ranges from."""
    source: str = ""            # --calib
    calibrator: str = ""        # --calibrator; "" chooses by measured error
    cache: str = ""             # --calib-cache
    preprocess: str = ""        # --preprocess: a preset or a TOML file


@dataclass(frozen=True)
class Result:
    """A plan and the float graph it was made of."""
    plan: Plan
    stored: Graph               # with stored types: what --export-qdq writes
    notes: Sequence[Any] = field(default=())


def compile_model(model: str | Path, config: BuildConfig, calibration: Calibration, say: Say,
                  progress: Callable[[int, int, str], None] | None = None) -> Result:
    """Build a plan. Raises an EngineError that says what is wrong with the model, the options or the data."""
    builder = Builder(config, progress)
    graph = builder.graph(model)
    metadata: dict[str, Any] = {"model": Path(model).name}
    ranges = None
    if config.precision == "int8" or config.precision == "best" and (calibration.source or calibration.cache):
        table, report = _calibrate(builder, graph, calibration, say)
        ranges = table.ranges
        metadata |= report
    plan = builder.plan(graph, ranges, metadata)
    return Result(plan, builder.stored(graph, ranges), builder.log)


def graph_hash(graph: Graph) -> str:
    """Of all that ranges depend on: the graph's text and its weights."""
    digest = hashlib.sha256(str(graph).encode())
    for name in sorted(graph.constants):
        digest.update(name.encode() + graph.constants[name].tobytes())
    return digest.hexdigest()[:32]


def _calibrate(builder: Builder, graph: Graph, wanted: Calibration,
               say: Say) -> tuple[CalibrationTable, dict[str, Any]]:
    """The ranges, and what the plan records of where they came from."""
    report: dict[str, Any] = {}

    def make() -> CalibrationTable:
        table, found = _measure(builder, graph, wanted, say)
        report.update(found)
        return table

    if not wanted.cache and not wanted.source:
        raise ConfigError("an int8 build needs calibration: give --calib, or --calib-cache with a cache that exists")
    if not wanted.cache:
        table = make()
    else:
        if not wanted.source and not Path(wanted.cache).exists():
            raise ConfigError(f"the calibration cache {wanted.cache} does not exist; give --calib to make it from")
        cached = load_or_make(wanted.cache, graph_hash(graph), make, wanted.calibrator or None)
        table = cached.table
        say(cached.note)
    missing = [name for name in builder.edges(graph) if name not in table.ranges]
    if missing:
        say(f"no ranges for {len(missing)} tensors ({', '.join(missing[:3])}, ...): what reads them stays in float")
    return table, {"calibrator": table.calibrator, "calibration_items": table.items, **report}


def _measure(builder: Builder, graph: Graph, wanted: Calibration, say: Say) -> tuple[CalibrationTable, dict[str, Any]]:
    """Run the float model over the data, and choose among the calibrators."""
    if not wanted.source:
        raise ConfigError("the calibration cache does not fit this model; give --calib to calibrate again")
    edges = builder.edges(graph)
    watched = Engine(builder.watching(graph, edges))
    preprocess = load_preprocess(wanted.preprocess) if wanted.preprocess else None
    data = open_calibration_data(wanted.source, watched.inputs, preprocess)
    if data.note:
        say(data.note)
    batch = TRIAL_BATCH if watched.max_batch else 1
    histograms = collect(watched.run, data, edges, batch=batch)
    items = data.count or 0
    report: dict[str, Any] = {}
    if data.preprocess is not None:
        report["preprocess"] = data.preprocess.to_json()
    hash_ = graph_hash(graph)
    if wanted.calibrator:
        return make_table(wanted.calibrator, hash_, items, histograms), report

    tables = {name: make_table(name, hash_, items, histograms) for name in CANDIDATES}
    judge = Judge(builder, graph, watched, data.limit(JUDGED_ITEMS), batch)
    choice = choose(tables, judge.errors)
    say(f"calibrators by their error on {judge.items} calibration items (--calibrator forces one):\n{choice}")
    report["calibrators"] = {name: vars(errors) for name, errors in choice.errors.items()}
    return choice.table, report


class Judge:
    """Measures what ranges do to a model's outputs."""

    def __init__(self, builder: Builder, graph: Graph, floats: Engine, data: CalibrationData, batch: int) -> None:
        self._builder, self._graph = builder, graph
        self._feeds: list[Feed] = list(data.batches(batch))
        self.items = sum(data.items_in(feed) for feed in self._feeds)
        self._expected = [self._outputs(floats.run(feed)) for feed in self._feeds]

    def _outputs(self, values: Mapping[str, Array]) -> dict[str, Array]:
        return {name: values[name] for name in self._graph.outputs}

    def errors(self, table: CalibrationTable) -> Errors:
        engine = Engine(self._builder.trial(self._graph, table.ranges))
        return compare(self._expected, [engine.run(feed) for feed in self._feeds])
