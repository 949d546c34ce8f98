"""Calibration from data to ranges: watch the float model, correct biases, choose ranges, each by measured error."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from calibration.bias_correction import ChannelMeans
from calibration.calibrators import make_calibrator
from calibration.collect import collect
from calibration.histogram import Histogram
from calibration.open_data import CalibrationData, Feed, Source, digest_of_data, open_calibration_data
from calibration.search import CANDIDATES, Errors, compare, search
from calibration.smoothing import ALPHAS, ChannelPeaks, smoothing_factors
from calibration.table import CalibrationTable, load_or_make, make_table
from engines.backends.device import Show
from engines.capacity import bytes_of
from engines.compiler.engine_cache import sources_digest
from engines.compiler.ranges import Calibrated, Notify, Progress
from engines.compiler.subject import KEPT, Subject
from engines.errors import ConfigError
from engines.ir.graph import Array, Graph
from engines.passes.quantization.recipe import prepared
from engines.passes.quantization.smoothing import smoothable, smoothed
from engines.plan.plan import IoTensor, Plan
from engines.preprocess import Preprocess, load_preprocess
from engines.runtime.engine import Engine
from engines.runtime.fallback import to_real

# What the search may spend, in multiply-accumulates, so that it does not depend on the machine: about 25 s of AVX2.
BUDGET_MACS = 1.5e12
MACS_A_WEIGHT = 2600        # of quantising and packing again in a trial: an estimate from how long VGG-16 took
MOST_ITEMS, FEWEST_ITEMS, MOST_TRIALS = 64, 8, 32
FEW_CANDIDATES = ("percentile", "percentile:99.9999")       # where the budget is too small for all
WIDEST = "percentile:99.9999"       # under which smoothing is judged: outliers are what it evens out
WATCHED_BYTES = 2 << 30     # of the tensors that a pass over the data looks at, of all items of a batch


@dataclass(frozen=True)
class Calibration:
    """Where an INT8 build takes its ranges from: what build_engine's `calibration` is.

    data        a folder, a file or script.py:function (see calibration.open_data); or feeds, {input: array of one item
                or of many}: in an iterable, or yielded by a function that is called for each pass over the data. What
                can be iterated only once, a generator for instance, is kept in memory. None: the cache has the ranges
    calibrator  its name; "" chooses by measured error
    cache       a file of ranges: read if it exists and fits, else written
    preprocess  how images become inputs: a preset's name, a TOML file, or a Preprocess; "" is a preset by the input
    """
    data: str | Path | Callable[[], Iterable[Any]] | Iterable[Any] | None = None
    calibrator: str = ""
    cache: str | Path = ""
    preprocess: str | Path | Preprocess = ""

    def __post_init__(self) -> None:
        if self.data is None and not self.cache:
            raise ConfigError("calibration needs data, or a cache that exists")
        if not (self.data is None or callable(self.data) or isinstance(self.data, str | Path | Iterable)):
            raise ConfigError(f"calibration data are a path, feeds {{input: array}}, or a function that yields feeds; "
                              f"this is a {type(self.data).__name__}")
        if self.calibrator:
            make_calibrator(self.calibrator)
        self._declared      # noqa: B018  (what is wrong with either is said now, and not after minutes)

    @cached_property
    def _declared(self) -> Preprocess | None:
        if isinstance(self.preprocess, Preprocess):
            return self.preprocess
        return load_preprocess(self.preprocess) if self.preprocess else None

    @cached_property
    def _source(self) -> Source:
        """The data as paths, or as a function."""
        data = self.data
        assert data is not None
        if isinstance(data, str | Path) or callable(data):
            return data
        kept = [data] if isinstance(data, Mapping) else list(data) if isinstance(data, Iterator) else data
        return lambda: kept

    def open(self, inputs: Sequence[IoTensor], pixels: bool = False) -> CalibrationData:
        """The items. pixels: the engine takes images as they are, and normalises them itself.

        Raises EngineErrors about the data.
        """
        declared = self._declared
        return open_calibration_data(self._source, inputs, declared.of_pixels if declared and pixels else declared)

    def facts(self) -> dict[str, Any]:
        """All that changes the ranges, beside the model and what is in the cache."""
        return {"calibrator": self.calibrator, "preprocess": self._declared, "cached": bool(self.cache),
                "data": None if self.data is None else digest_of_data(self._source),
                "code": sources_digest(Path(__file__).parent)}

    def first(self, inputs: Sequence[IoTensor], pixels: bool) -> Feed | None:
        """The first item; None: there are no data, only a cache."""
        if self.data is None:
            return None
        first, *_ = self.open(inputs, pixels).limit(1)
        return first

    def items(self, inputs: Sequence[IoTensor], most: int) -> list[Feed]:
        """The first items; none if there is only a cache."""
        return [] if self.data is None else list(self.open(inputs).limit(most).batches(1))

    def of(self, feeds: Sequence[Feed]) -> Calibration:
        """The same for other data, which are not in the cache."""
        return Calibration(list(feeds), self.calibrator)

    def calibrate(self, subject: Subject, notify: Notify, progress: Progress) -> Calibrated:
        """Ranges from the cache, if one fits, else from the data. Raises EngineErrors about options, data and cache."""
        builder, graph = subject.builder, subject.graph
        report: dict[str, Any] = {}

        def make() -> CalibrationTable:
            if self.data is None:
                state = "is of another model or calibrator" if Path(self.cache).exists() else "does not exist"
                raise ConfigError(f"the calibration cache {self.cache} {state}; give --calib to calibrate")
            table, found = _from_data(subject, self, notify, progress)
            report.update(found)
            return table

        if self.cache:
            wanted = builder.edges(graph) if self.data is not None else ()
            cached = load_or_make(self.cache, model_hash(subject), make, self.calibrator or None, wanted)
            table = cached.table
            notify(cached.note)
        else:
            table = make()
        missing = [name for name in builder.edges(graph) if name not in table.ranges]
        if missing:
            notify(f"no ranges for {len(missing)} tensors ({', '.join(missing[:3])}, ...): what reads them stays in "
                   "float")
        report |= {"calibrator": table.calibrator, "calibration_items": table.items,
                   "biases_corrected": bool(table.means), "tensors_smoothed": len(table.smoothing)}
        return Calibrated(table.recipe, report)


def model_hash(subject: Subject) -> str:
    """Of what the numbers in a model depend on, whatever the shapes that it is built for: ranges of one build serve the
    others of the same model."""
    pixels = subject.builder.config.pixels
    digest = hashlib.sha256(repr(pixels and vars(pixels)).encode())
    digest.update(subject.source.document())
    for name, array in sorted(subject.source.weights.items()):
        digest.update(name.encode())
        digest.update(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())      # object: text
    return digest.hexdigest()[:32]


class _Engines:
    """Of a model's float graphs: an engine for each set of extents that data have, made when it is met."""

    def __init__(self, subject: Subject, plan: Callable[[Graph], Plan]) -> None:
        self._subject, self._plan = subject, plan
        self._engines: dict[tuple[Any, ...], Engine] = {}
        self.usual = self._engine(tuple(subject.usual.values()))

    def show(self, feed: Feed, show: Show) -> None:
        """Run a feed; show the outputs."""
        extents = self._subject.extents_of(feed)
        known = self._subject.deciding
        read = {name: array for name, array in feed.items() if name not in known}
        self._engine(tuple(extents.values())).show(read, show)

    def _engine(self, extents: tuple[Any, ...]) -> Engine:
        if extents not in self._engines:
            if len(self._engines) > KEPT:       # the usual one stays
                del self._engines[list(self._engines)[1]]
            graph = self._subject.at(dict(zip(self._subject.usual, extents, strict=True)))
            self._engines[extents] = Engine(self._plan(graph))
        return self._engines[extents]


@dataclass
class _Watched:
    """The float model's outputs and edges, over the calibration data."""
    engines: _Engines
    data: CalibrationData
    batch: int
    progress: Callable[[int, int], None]
    items: int = 0
    histograms: dict[str, Histogram] = field(default_factory=dict)
    means: dict[str, Any] = field(default_factory=dict)
    peaks: dict[str, Any] = field(default_factory=dict)

    def watch(self, edges: tuple[str, ...], peaking: tuple[str, ...] = ()) -> None:
        """One pass over the data. peaking: the tensors whose channels' peaks are wanted."""
        means, peaks = ChannelMeans(edges), ChannelPeaks(peaking)
        self.items = 0

        def run(feed: Feed, count: Show) -> None:
            def observe(tensor: str, values: Array) -> None:
                for look in (means.observe, peaks.observe, count):
                    look(tensor, values)

            self.engines.show(feed, observe)
            self.items += self.data.items_in(feed)

        self.histograms = collect(run, self.data, edges, batch=self.batch, progress=self.progress)
        self.means, self.peaks = means.result(), peaks.result()

    @property
    def macs(self) -> int:
        return sum(step.macs for step in self.engines.usual.plan.machine.steps)


def _watching(subject: Subject, tensors: Iterable[str], factors: Mapping[str, Iterable[float]] = {}     # noqa: B006
              ) -> _Engines:
    """The float model, smoothed by these factors, which shows the tensors, as far as its graphs have them."""
    def plan(graph: Graph) -> Plan:
        able = set(smoothable(graph)) if factors else ()
        graph = smoothed(graph, {name: values for name, values in factors.items() if name in able})
        return subject.builder.watching(graph, [name for name in tensors if name in graph.types])
    return _Engines(subject, plan)


def _from_data(subject: Subject, wanted: Calibration, notify: Notify,
               progress: Progress) -> tuple[CalibrationTable, dict[str, Any]]:
    """Run the float model over the data; correct biases and search for ranges, each if it lowers the error."""
    builder, graph = subject.builder, subject.graph
    edges, uneven = builder.edges(graph), smoothable(graph)
    engines = _watching(subject, tuple(dict.fromkeys((*edges, *uneven))))
    engine = engines.usual
    data = wanted.open(subject.inputs, builder.config.pixels is not None)
    if data.note:
        notify(data.note)
    batch = engine.plan.batch_slots if not engine.dependence else 1
    batch = max(min(batch, WATCHED_BYTES // max(sum(bytes_of(graph.types[name]) for name in edges), 1)), 1)
    watched = _Watched(engines, data, batch, lambda done, of: progress("calibrating", done, of, ""))
    watched.watch(edges, uneven)
    report: dict[str, Any] = {"preprocess": data.preprocess.to_json()} if data.preprocess is not None else {}
    hash_, items = model_hash(subject), watched.items
    if wanted.calibrator:
        return make_table(wanted.calibrator, hash_, items, watched.histograms), report

    judged, trials = _budget(watched.macs, sum(constant.size for constant in graph.constants.values()))
    judge = Judge(subject, engines, data.limit(judged), watched.batch)
    factors: dict[str, tuple[float, ...]] = {}
    if uneven:
        watched, factors = _smoothing(subject, judge, watched, notify)
        trials -= 1 + len(ALPHAS)
    usual = replace(make_table("percentile", hash_, items, watched.histograms), smoothing=factors)
    spare = trials - len(CANDIDATES) - 2        # 2: with biases corrected, and without
    if spare < 0:
        notify("a model of this size leaves the search few trials: biases are not corrected, and of the calibrators "
               f"only {' and '.join(FEW_CANDIDATES)} are compared")
    with_means = _bias_correction(judge, usual, watched.means, notify) if spare >= 0 else {}
    found = search(watched.histograms, hash_, items,
                   lambda table: judge.errors(replace(table, means=with_means, smoothing=factors)),
                   min(max(spare, 0), MOST_TRIALS), CANDIDATES if spare >= 0 else FEW_CANDIDATES)
    notify(f"calibrators by their error on {judge.items} calibration items (--calibrator forces one):\n{found}")
    report["calibrators"] = {name: vars(errors) for name, errors in found.choice.errors.items()}
    return replace(found.table, means=with_means, smoothing=factors), report


def _budget(macs: int, weights: int) -> tuple[int, int]:
    """(items on which ranges are judged, trials in all) for a model of so many multiply-accumulates and weights."""
    items = int(min(max(BUDGET_MACS / max(macs, 1) // 20, FEWEST_ITEMS), MOST_ITEMS))
    return items, int(BUDGET_MACS / (items * macs + MACS_A_WEIGHT * weights + 1))


def _smoothing(subject: Subject, judge: Judge, plain: _Watched,
               notify: Notify) -> tuple[_Watched, dict[str, tuple[float, ...]]]:
    """What was watched, and the factors, if channels smoothed by them lower the error; else `plain` and none."""
    edges = tuple(plain.histograms)
    before = judge.errors(make_table(WIDEST, "", 0, plain.histograms)).sqnr_db
    best, kept, measured = before, "left out", [f"{before:.2f} dB without"]
    found: tuple[_Watched, dict[str, tuple[float, ...]]] = (plain, {})
    for alpha in ALPHAS:
        found_factors = smoothing_factors(subject.graph, plain.peaks, alpha)
        factors = {name: tuple(map(float, s)) for name, s in found_factors.items()}
        even = replace(plain, engines=_watching(subject, edges, factors))
        even.watch(edges)
        after = judge.errors(replace(make_table(WIDEST, "", 0, even.histograms), smoothing=factors)).sqnr_db
        measured.append(f"{after:.2f} dB with alpha {alpha}")
        if after > best:
            best, kept, found = after, f"kept with alpha {alpha}", (even, factors)
    notify(f"smoothing of {len(plain.peaks)} tensors {kept}: {', '.join(measured)}")
    return found


def _bias_correction(judge: Judge, table: CalibrationTable, means: Mapping[str, Any], notify: Notify) -> dict[str, Any]:
    """The means, if biases corrected by them lower the error; else none."""
    plain_means = {name: tuple(map(float, values)) for name, values in means.items()}
    before, after = judge.errors(table), judge.errors(replace(table, means=plain_means))
    better = after.sqnr_db > before.sqnr_db
    notify(f"bias correction {'kept' if better else 'left out'}: "
           f"{before.sqnr_db:.2f} dB without, {after.sqnr_db:.2f} dB with")
    return plain_means if better else {}


class Judge:
    """Measures what a table does to a model's outputs."""

    def __init__(self, subject: Subject, floats: _Engines, data: CalibrationData, batch: int) -> None:
        self._subject = subject
        self._feeds: list[Feed] = list(data.batches(batch))
        self.items = sum(data.items_in(feed) for feed in self._feeds)
        self._expected = [self._outputs(floats, feed) for feed in self._feeds]

    def _outputs(self, engines: _Engines, feed: Feed) -> dict[str, Array]:
        """The model's, as real numbers: bfloat16 comes as its bits."""
        graph, outputs = self._subject.graph, {}

        def keep(tensor: str, values: Array) -> None:
            if tensor in graph.outputs:
                outputs[tensor] = to_real(values, None, str(graph.types[tensor].dtype))

        engines.show(feed, keep)
        return {name: outputs[name] for name in graph.outputs}

    def errors(self, table: CalibrationTable) -> Errors:
        builder = self._subject.builder
        engines = _Engines(self._subject, lambda graph: builder.trial(
            prepared(graph, table.recipe, builder.config.keep_float), table.ranges))
        return compare(self._expected, [self._outputs(engines, feed) for feed in self._feeds])
