"""Calibration as a build's source of ranges: data or a cache, a calibrator, and perhaps an accuracy to keep."""
from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from infer_server.calibration.accuracy.overflow import overflow
from infer_server.calibration.calibrators import make_calibrator
from infer_server.calibration.data.checks import DataCheck
from infer_server.calibration.open_data import CalibrationData, Feed, Source, digest_of_data, open_calibration_data
from infer_server.calibration.run import FEWEST_ITEMS, CalibrationRun, judge_of, model_hash
from infer_server.calibration.table import CalibrationTable, load_or_make, merged_table, write_table
from infer_server.calibration.target.search import AccuracyTarget, TargetSearch
from infer_server.calibration.target.sensitivity import NoiseMeter, layers_of
from infer_server.calibration.target.sets import LayerSets, exact_nodes
from infer_server.calibration.target.split import LabelledItems, Split, for_ranges, split_of
from infer_server.calibration.target.time_limit import quietest_within
from infer_server.calibration.weight_only.gptq import GptqRounder
from infer_server.calibration.weight_only.moments import ProductMoments
from infer_server.engines.compiler.builder import BuildConfig
from infer_server.engines.compiler.ranges import Calibrated, Notify, Progress
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.errors import CalibrationError, ConfigError
from infer_server.engines.frontend.onnx_file import OnnxModel
from infer_server.engines.frontend.weight_only.layers import Layer, Rounder
from infer_server.engines.ir.graph import Graph
from infer_server.engines.plan.plan import IoTensor
from infer_server.engines.preprocess import Preprocess, load_preprocess
from infer_server.engines.version import sources_digest


@dataclass(frozen=True)
class Calibration:
    """The source of an INT8 build's ranges: `build_engine(..., calibration=Calibration(data))`.

    Attributes
    ----------
    data
        A folder, a file or "script.py:function" (see infer_server.calibration.open_data). Or feeds, {input: array of
        one item or of many}: in an iterable, or yielded by a function that is called for each pass over the data. A
        generator's feeds are kept in memory. None: the cache has the ranges.
    calibrator
        "entropy", "percentile", "minmax" or "mse"; "" chooses by measured error.
    cache
        A file of ranges: read if it exists and fits, else written.
    parts
        Caches that a named calibrator wrote for parts of the data: their histograms are merged to the ranges of all.
    preprocess
        How images become inputs: a preset's name, a TOML file, or a Preprocess; "" chooses a preset by the input.
    target
        Accuracy to keep: layers move to float until it is reached. None: all that can be is INT8.
    allow_corrupt
        Leave out files of the data that cannot be read, with a warning. False: they are an error.
    sensitivity
        Measure the noise that each layer adds, for reports: one more trial for each layer.
    max_slowdown
        How much longer than all layers in INT8 a build without a target may take, as a share: within this time the
        layers stay in float that add most noise. The target has its own limit.

    Raises
    ------
    ConfigError
        There are neither data nor a cache, or a value is unknown.
    """
    data: str | Path | Callable[[], Iterable[Any]] | Iterable[Any] | None = None
    calibrator: str = ""
    cache: str | Path = ""
    preprocess: str | Path | Preprocess = ""
    target: AccuracyTarget | None = None
    allow_corrupt: bool = False
    sensitivity: bool = False
    parts: Sequence[str | Path] = ()
    max_slowdown: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_slowdown < math.inf:
            raise ConfigError(f"max_slowdown={self.max_slowdown}: it is a share of the INT8 time, at least 0")
        if self.max_slowdown and self.target:
            raise ConfigError("the limit of time of an accuracy target is AccuracyTarget.max_slowdown")
        if self.data is None and not self.cache and not self.parts:
            raise ConfigError("calibration needs data, or a cache that exists")
        if self.data is not None and self.parts:
            raise ConfigError("partial calibrations are merged instead of a calibration on data: give one of them")
        if not (self.data is None or callable(self.data) or isinstance(self.data, str | Path | Iterable)):
            raise ConfigError(f"calibration data are a path, feeds {{input: array}}, or a function that yields feeds; "
                              f"this is a {type(self.data).__name__}")
        if self.calibrator:
            make_calibrator(self.calibrator)
        self._declared      # noqa: B018  (report errors now rather than after minutes)

    @cached_property
    def _declared(self) -> Preprocess | None:
        if isinstance(self.preprocess, Preprocess):
            return self.preprocess
        return load_preprocess(self.preprocess) if self.preprocess else None

    @cached_property
    def _source(self) -> Source:
        """Data as a path or a function."""
        assert self.data is not None
        return _source_of(self.data)

    @cached_property
    def _evaluation_source(self) -> Source | None:
        """Evaluation data of the target as a path or a function; None if there are none."""
        return None if self.target is None or self.target.data is None else _source_of(self.target.data)

    @cached_property
    def _test_source(self) -> Source | None:
        """Test data of the target as a path or a function; None if there are none."""
        return None if self.target is None or self.target.test is None else _source_of(self.target.test)

    def open(self, inputs: Sequence[IoTensor], pixels: bool = False,
             usual: Mapping[str, Any] = {}) -> CalibrationData:      # noqa: B006
        """Open the items. Raises EngineErrors about the data.

        pixels: the engine takes uint8 images and normalises them itself. usual: numbers of open extents, for images
        whose size is not declared otherwise.
        """
        return self._opened(self._source, inputs, pixels, usual, self.allow_corrupt)

    def _opened(self, source: Source, inputs: Sequence[IoTensor], pixels: bool,
                usual: Mapping[str, Any], allow_corrupt: bool) -> CalibrationData:
        declared = self._declared
        return open_calibration_data(source, inputs, declared.of_pixels if declared and pixels else declared, usual,
                                     allow_corrupt)

    def facts(self) -> dict[str, Any]:
        """Return all that affects the ranges, except the model and the content of the cache."""
        return {"calibrator": self.calibrator, "preprocess": self._declared, "cached": bool(self.cache),
                "allow_corrupt": self.allow_corrupt,
                "data": None if self.data is None else digest_of_data(self._source),
                "target": self._facts_of_target(), "sensitivity": self.sensitivity, "max_slowdown": self.max_slowdown,
                "parts": [hashlib.sha256(Path(part).read_bytes()).hexdigest() for part in self.parts
                          if Path(part).is_file()],
                "code": sources_digest(Path(__file__).parent)}

    def _facts_of_target(self) -> Mapping[str, Any] | None:
        if self.target is None:
            return None
        sources = self._evaluation_source, self._test_source
        return {**self.target.facts(), "data": [source and digest_of_data(source) for source in sources]}

    def first(self, inputs: Sequence[IoTensor], pixels: bool) -> Feed | None:
        """Return the first item, or None if there is only a cache."""
        if self.data is None:
            return None
        first, *_ = self.open(inputs, pixels).limit(1)
        return first

    def items(self, inputs: Sequence[IoTensor], most: int) -> list[Feed]:
        """Return the first items, none if there is only a cache."""
        return [] if self.data is None else list(self.open(inputs).limit(most).batches(1))

    def of(self, feeds: Sequence[Feed]) -> Calibration:
        """Return this calibration for the recorded inputs of a segment, without a cache."""
        if self.target:
            raise ConfigError("an accuracy target is for models that become one graph, and this one is a program")
        return _OfSegment(list(feeds), self.calibrator)

    def rounder(self, source: OnnxModel, config: BuildConfig, layers: Sequence[Layer], notify: Notify,
                progress: Progress) -> Rounder:
        """Return the rounding of weights by the error of each layer's output on the items.

        Raises
        ------
        ConfigError
            The calibration has options of INT8 builds, no data, or the model's products cannot be observed.
        CalibrationError
            The data cannot be read.
        """
        if self.data is None or self.cache or self.calibrator or self.target:
            raise ConfigError("a weight-only build takes calibration data, and no calibrator, cache or accuracy "
                              "target: leave --calibrator, --calib-cache, --calib-part and --max-drop out")
        pixels = config.pixels is not None

        def data(subject: Subject) -> CalibrationData:
            opened = self._items_of(self._source, subject)
            if opened.note:
                notify(opened.note)
            return opened

        tensors = {layer.data: layer.depth(source.weights) for layer in layers}
        moments = ProductMoments(source, tensors, config, lambda inputs: self.first(inputs, pixels), data, progress)
        return GptqRounder(moments.of)

    def warnings(self, inputs: Sequence[IoTensor], feeds: Sequence[Feed]) -> tuple[str, ...]:
        """Return warnings about implausible items."""
        check = DataCheck(inputs)
        for feed in feeds:
            check.observe(feed)
        return check.warnings()

    def float16_warnings(self, graph: Graph, inputs: Sequence[IoTensor], pixels: bool) -> tuple[str, ...]:
        """Return warnings about tensors of a float16 graph that exceed its range on the first items."""
        return () if self.data is None else overflow(
            graph, self.open(inputs, pixels, _extents(inputs, graph)).limit(FEWEST_ITEMS))

    def check(self, inputs: Sequence[IoTensor], data: CalibrationData) -> DataCheck | None:
        """Return the checks that detect implausible data, or None if nothing is expected of the data."""
        declared = self._declared
        if declared and data.preprocess is None and any(io.dtype == "uint8" for io in inputs):
            declared = declared.of_pixels
        return DataCheck(inputs, data.preprocess or declared)

    def calibrate(self, subject: Subject, notify: Notify, progress: Progress) -> Calibrated:
        """Return ranges from the cache if it matches, else from the data.

        Raises EngineErrors about options, data and cache.
        """
        builder, graph = subject.builder, subject.graph
        report: dict[str, Any] = {}

        def make() -> CalibrationTable:
            if self.parts:
                notify(f"ranges of {len(self.parts)} partial calibrations merged")
                return merged_table(self.parts, model_hash(subject), self.calibrator)
            if self.data is None:
                state = "is of another model or calibrator" if Path(self.cache).exists() else "does not exist"
                raise ConfigError(f"the calibration cache {self.cache} {state}; give --calib to calibrate")
            data = self._calibration_items(subject)
            table, fields = CalibrationRun(subject, data, self.calibrator, self.check(subject.inputs, data), notify,
                                          progress).table()
            report.update(fields)
            return table

        if self.cache and not self.parts:
            required = builder.edges(graph) if self.data is not None else ()
            cached = load_or_make(self.cache, model_hash(subject), make, self.calibrator or None, required)
            table = cached.table
            notify(cached.note)
        else:
            table = make()
            if self.cache:
                write_table(table, self.cache)
        missing = [name for name in builder.edges(graph) if name not in table.ranges]
        if missing:
            notify(f"no ranges for {len(missing)} tensors ({', '.join(missing[:3])}, ...): what reads them stays in "
                   "float")
        report |= {"calibrator": table.calibrator, "calibration_items": table.items,
                   "biases_corrected": bool(table.means), "tensors_smoothed": len(table.smoothing),
                   "tensors_scaled_by_row": len(table.scaled_rows)}
        lost = [f"INT8 loses what this model computes, as measured on calibration items: {table.fault}; calibrate on "
                "more and typical data, check --preprocess, or leave nodes in float with --keep-float"] if (
                    table.fault) else []
        for warning in (*table.notes, *lost):
            notify(warning)
        kept = self._kept(subject, table, report, notify, progress)
        if self.sensitivity and self.data is not None and not any(
                report.get(name, {}).get("layers") for name in ("target", "limit")):
            report["sensitivity"] = self._sensitivity(subject, table, progress)
        return Calibrated(table.recipe, report, (*table.notes, *lost), bool(table.fault), *kept)

    def _kept(self, subject: Subject, table: CalibrationTable, report: dict[str, Any], notify: Notify,
              progress: Progress) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
        """Return the nodes to keep in float, their precision, and those in float32 in any case.

        The choice is added to the report.
        """
        precision = subject.builder.config.precision
        if precision != "int8" and (self.target or self.max_slowdown):
            raise ConfigError(f"{'an accuracy target' if self.target else 'a limit of time'} is for int8; this build "
                              f"is {precision}")
        if self.target is not None:
            nodes, float_type, fp32 = self._kept_for_target(self.target, subject, table, report, notify, progress)
        elif self.max_slowdown:
            nodes, float_type, fp32 = self._kept_within_time(subject, table, report, notify, progress)
        else:
            return (), "", ()
        return (nodes, float_type, (*exact_nodes(subject.builder.config, float_type), *fp32)) if nodes else ((), "", ())

    def _kept_within_time(self, subject: Subject, table: CalibrationTable, report: dict[str, Any], notify: Notify,
                          progress: Progress) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
        """Return the nodes to keep in float within the limit of time, their precision, and those in float32."""
        if self.data is None:
            raise ConfigError("a limit of time needs calibration data: the noise of each layer is measured on them")
        sets = LayerSets(subject, table.recipe, layers_of(subject.graph, subject.builder.config.keep_float))
        mix, report["limit"] = quietest_within(self.max_slowdown, subject, table.recipe, sets, lambda trials: judge_of(
            subject, self._calibration_items(subject), trials), progress)
        names = [layer.name for layer in sets.in_order(mix.kept)]
        notify(f"{len(names)} of {len(sets.layers)} layers stay in {sets.float_type}, at "
               f"{1.0 + report['limit']['slowdown']:.2f} times the time of INT8{': ' * bool(names)}{', '.join(names)}")
        return sets.precisions(mix)

    def _items_of(self, source: Source, subject: Subject) -> CalibrationData:
        pixels = subject.builder.config.pixels is not None
        is_calibration = self.data is not None and source is self._source     # evaluation items have labels
        return self._opened(source, subject.inputs, pixels, _extents(subject.inputs, subject.graph),
                            self.allow_corrupt and is_calibration)

    def _calibration_items(self, subject: Subject) -> CalibrationData:
        """Open the items that ranges are chosen on."""
        data = self._items_of(self._source, subject)
        if self.target is None:
            return data
        return for_ranges(data, self._evaluation_source is not None, self._test_source is not None)

    def _kept_for_target(self, target: AccuracyTarget, subject: Subject, table: CalibrationTable,
                         report: dict[str, Any], notify: Notify, progress: Progress
                         ) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
        """Return the nodes to keep in float for the accuracy target, their precision, and those in float32."""
        split = self._split(target, subject)
        outcome = TargetSearch(target, subject, split, notify, progress).run(table.recipe, lambda trials: judge_of(
            subject, split.evaluation.data if self.data is None else self._calibration_items(subject), trials))
        report["target"] = {**outcome.report, "calibration_items": table.items}
        return outcome.kept, outcome.float_type, outcome.fp32

    def _split(self, target: AccuracyTarget, subject: Subject) -> Split:
        """Return the items for the choice of layers and for the reported score."""
        if self._evaluation_source is None and self.data is None:
            raise ConfigError("an accuracy target needs items: calibration data or evaluation data")
        evaluation = None if self._evaluation_source is None else LabelledItems(
            self._items_of(self._evaluation_source, subject), target.labels_of())
        test = None if self._test_source is None else LabelledItems(
            self._items_of(self._test_source, subject), target.test_labels_of())
        return split_of(lambda: self._items_of(self._source, subject), evaluation, test)

    def _sensitivity(self, subject: Subject, table: CalibrationTable, progress: Progress) -> list[dict[str, Any]]:
        """Return the noise that each layer adds to the outputs, the most first."""
        layers = layers_of(subject.graph, subject.builder.config.keep_float)
        if not layers:
            return []
        try:
            meter = NoiseMeter(subject, judge_of(subject, self._calibration_items(subject), len(layers)), table.recipe,
                               layers)
            measured = meter.sensitivities({}, lambda done, of, layer: progress("ranking", done, of, layer))
        except CalibrationError:        # no output can be compared
            return []
        return [{"layer": one.layer.name, "sqnr_db": one.sqnr_db, "noise": one.noise} for one in measured]


def _source_of(data: Any) -> Source:
    """Return data as a path or a function. A generator's feeds are kept in memory."""
    if isinstance(data, str | Path) or callable(data):
        source: Source = data
        return source
    kept = [data] if isinstance(data, Mapping) else list(data) if isinstance(data, Iterator) else data
    return lambda: kept


class _OfSegment(Calibration):
    """Calibration on the recorded inputs of a segment, which are not checked."""

    def check(self, inputs: Sequence[IoTensor], data: CalibrationData) -> DataCheck | None:
        return None


def _extents(inputs: Sequence[IoTensor], graph: Graph) -> dict[str, int]:
    """Return the numbers of the inputs' open extents in a graph."""
    return {extent: number for io in inputs if io.name in graph.inputs
            for extent, number in zip(io.shape, graph.shape(io.name), strict=True)
            if isinstance(extent, str) and isinstance(number, int)}
