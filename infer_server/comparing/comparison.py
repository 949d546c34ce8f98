"""Comparison of a plan or an ONNX file with another one, output by output and layer by layer.

    comparison = compare("int8.plan", "fp32.plan", data="photos/")
    print(comparison)
    comparison.first_divergent          # name of the first layer below the threshold
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from infer_server.calibration.data.items import CalibrationData, Feed
from infer_server.calibration.open_data import Source, open_calibration_data
from infer_server.cli.common import table
from infer_server.comparing.errors import Aligned, ErrorSums, TensorErrors
from infer_server.comparing.sides import UNKNOWN_BYTES, Generator, OnnxSide, PlanSide, Side, side_of
from infer_server.engines.errors import ConfigError, EngineError
from infer_server.engines.ir.graph import Array
from infer_server.engines.preprocess import Preprocess, load_preprocess

ITEMS = 8                   # default number of items
# Default SQNR in dB below which a layer diverges: errors of a tenth of the signal. Rounding to 8 bits leaves a layer
# about 40 dB, and usable outputs of networks have 15 to 30 (calibration.accuracy.measures.sqnr_db).
THRESHOLD_DB = 20.0
WORST = 20                  # default number of layers that are listed
MAX_BYTES = 512 << 20       # inner tensors of an item that are held at a time
Progress = Callable[[Iterable[Feed], int], Iterable[Feed]]      # called with the items and their number


@dataclass(frozen=True)
class Comparison:
    """Errors of A against B.

    Attributes
    ----------
    a, b : str
        Names of the two sides and of their runtimes. B is the reference.
    source : str
        Source of the items.
    items : int
        Number of items.
    outputs : tuple of TensorErrors
        Errors of each output.
    layers : tuple of TensorErrors
        Errors of the inner tensors that both sides have, in the order of B's graph.
    skipped : mapping of str to int
        Numbers of inner tensors that are not compared, by reason.
    threshold : float
        SQNR in dB below which a layer diverges.
    notes : tuple of str
        Limitations of the comparison, a sentence each.
    """
    a: str
    b: str
    source: str
    items: int
    outputs: tuple[TensorErrors, ...]
    layers: tuple[TensorErrors, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    threshold: float = THRESHOLD_DB
    notes: tuple[str, ...] = ()

    @property
    def min_sqnr_db(self) -> float:
        """Least SQNR of an output in dB; -inf if an output cannot be compared."""
        return min(errors.sqnr_db for errors in self.outputs)

    @property
    def first_divergent(self) -> str:
        """Name of the first layer whose SQNR is below the threshold; "" if there is none."""
        return next((errors.name for errors in self.layers if errors.sqnr_db < self.threshold), "")

    def worst(self, count: int) -> tuple[TensorErrors, ...]:
        """Return the `count` layers of the least SQNR, in the order of the graph."""
        names = {errors.name for errors in sorted(self.layers, key=lambda errors: errors.sqnr_db)[:count]}
        return tuple(errors for errors in self.layers if errors.name in names)

    def text(self, worst: int = WORST) -> str:
        """Return the tables of the outputs, of the worst layers and of the first that diverges."""
        parts = [f"A  {self.a}\nB  {self.b}, the reference\n{_counted(self.items, 'item')} of {self.source}",
                 _table("output", self.outputs, "")]
        if self.layers:
            first, least = self.first_divergent, {errors.name for errors in self.worst(worst)}
            listed = [errors for errors in self.layers if errors.name in {*least, first}]
            heading = _counted(len(self.layers), "layer")
            if len(listed) < len(self.layers):
                heading = (f"the worst {len(least)} of {heading}"
                           + " and the first that diverges" * (len(listed) > len(least)))
            parts += [f"{heading}, in the order of the graph:\n{_table('layer', listed, first)}",
                      f"diverges first: {first}" if first else f"no layer is below {self.threshold:g} dB"]
        if counts := [f"{count} {why}" for why, count in self.skipped.items() if count]:
            parts.append(f"inner tensors that are not compared: {', '.join(counts)}")
        return "\n\n".join([*parts, *self.notes])

    def __str__(self) -> str:
        return self.text()

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as the JSON object that --json writes."""
        return {"a": self.a, "b": self.b, "source": self.source, "items": self.items,
                "outputs": [errors.as_json() for errors in self.outputs],
                "layers": [errors.as_json() for errors in self.layers], "skipped": dict(self.skipped),
                "threshold_db": self.threshold, "first_divergent": self.first_divergent or None,
                "notes": list(self.notes)}


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str], data: Source | None = None, *, items: int = ITEMS,
            preprocess: str | Path | Preprocess = "", threshold: float = THRESHOLD_DB,
            progress: Progress = lambda feeds, count: feeds) -> Comparison:
    """Compare a plan or an ONNX file with another one, the reference, by their outputs and their inner tensors.

    Each item is run alone. An ONNX file runs on ONNX Runtime if that is installed, else on the NumPy reference. The
    outputs come from the plans as they are; inner tensors of a plan come from its graph, which is compiled again for
    this machine with these tensors shown in float.

    Parameters
    ----------
    a, b : path
        Plan files, or ONNX files by the suffix .onnx.
    data : path or callable, optional
        Items, in the forms of `infer_server.calibration.open_data`. None generates them with a seed.
    items : int
        The most items that are run.
    preprocess : str, Path or Preprocess
        Preprocessing of images. "": what a plan of the two was calibrated with, or a preset by the input's channels.
    threshold : float
        SQNR in dB below which a layer diverges.
    progress : callable, optional
        Called with the items and their number, for each pass over them; yields the items.

    Returns
    -------
    Comparison

    Raises
    ------
    ConfigError
        The inputs or the outputs of the two differ, `items` is less than 1, or there is a preprocessing without data.
    EngineError
        A file cannot be read or run, or the data do not fit.
    OSError
    """
    if items < 1:
        raise ConfigError(f"items={items}: at least 1 item is needed")
    sides = side_of(os.fspath(a)), side_of(os.fspath(b))
    _check(*sides)
    opened = _open(sides, data, items, preprocess)
    return _Run(*sides, opened, threshold, progress).comparison(data is None)


def _check(a: Side, b: Side) -> None:
    """Check that the sides have the same inputs and outputs. Raises ConfigError."""
    optional = {name for side in (a, b) if isinstance(side, OnnxSide) for name in side.optional}
    inputs, others = ({name: dtype for name, dtype in side.inputs.items() if name not in optional} for side in (a, b))
    for kind, left, right in (("inputs", inputs, others), ("outputs", set(a.outputs), set(b.outputs))):
        if left != right:
            options = "; a plan of --uint8-input or --constant is compared with another one" * (kind == "inputs")
            raise ConfigError(f"the {kind} differ, so these are not two forms of one model: {a.name} has "
                              f"{_listed(left)}, and {b.name} has {_listed(right)}{options}")


def _listed(names: Any) -> str:
    return ", ".join(f"{name} {names[name]}" if isinstance(names, dict) else name for name in sorted(names))


def _open(sides: Sequence[Side], data: Source | None, items: int, preprocess: str | Path | Preprocess
          ) -> CalibrationData:
    """Open the data, or generate inputs by the first side that can. Raises EngineError."""
    # Plans first: they know their inputs without being imported; those without a graph generate only likely inputs.
    ordered = sorted(sides, key=lambda side: (side.reason != "", isinstance(side, OnnxSide)))
    generator = _first(ordered)
    if data is None:
        if preprocess:
            raise ConfigError("--preprocess is for the images of --data, and no data are given")
        return generator.items(items)
    declared = load_preprocess(preprocess) if isinstance(preprocess, str | Path) and preprocess else preprocess or None
    recorded = next((side.recorded for side in sides if isinstance(side, PlanSide) and side.recorded), None)
    if declared is None and recorded is not None:
        declared = Preprocess.from_json(recorded)
    assert declared is None or isinstance(declared, Preprocess)
    if declared and generator.inputs[0].dtype == "uint8":       # such a plan normalises by itself
        declared = declared.of_pixels
    return open_calibration_data(data, generator.inputs, declared, generator.usual).limit(items)


def _first(sides: Sequence[Side]) -> Generator:
    fault: EngineError | None = None
    for side in sides:
        try:
            return side.generator()
        except EngineError as error:
            fault = fault or error
    assert fault is not None
    raise fault


class _Run:
    """One comparison."""

    def __init__(self, a: Side, b: Side, data: CalibrationData, threshold: float, progress: Progress) -> None:
        self._a, self._b, self._data, self._threshold, self._progress = a, b, data, threshold, progress
        self._outputs = {name: ErrorSums(name) for name in a.outputs}
        self._layers: dict[str, ErrorSums] = {}
        self._aligned = Aligned()
        self._misshapen: set[str] = set()
        self._items = self._unfit = 0
        self._notes: list[str] = []

    def comparison(self, is_generated: bool) -> Comparison:
        a, b = self._a, self._b
        self._notes += _notes((a, b), is_generated)
        names = self._common()
        self._layers = {name: ErrorSums(name) for name in names}
        seen = set[str]()
        for number, group in enumerate(_groups({name: a.tensors[name] or b.tensors[name] for name in names}) or [()]):
            self._pass(group, number == 0, seen)
        if self._unfit:
            self._notes.append(f"{self._unfit} of the items have other shapes than the plan was built for: layers are "
                               "compared on the others only")
        return Comparison(
            a.name, b.name, self._data.source, self._items, tuple(sums.errors() for sums in self._outputs.values()),
            tuple(sums.errors() for name, sums in self._layers.items() if name in seen),
            self._skipped(names, seen) if names else {}, self._threshold, tuple(dict.fromkeys(self._notes)))

    def _common(self) -> tuple[str, ...]:
        """Return the inner tensors of both sides in the order of B; () if a side has none to show."""
        reasons = [side.reason for side in (self._a, self._b) if side.reason]
        if reasons:
            self._notes.append(f"layers are not compared: {'; '.join(reasons)}")
            return ()
        common = self._a.tensors.keys() & self._b.tensors.keys()
        views = self._b.views
        return tuple(name for name in self._b.tensors if name in common and views.get(name) not in common)

    def _skipped(self, names: Sequence[str], seen: set[str]) -> dict[str, int]:
        a, b, lost = self._a.tensors.keys(), self._b.tensors.keys(), set(names) - seen
        return {"only in A": len(a - b), "only in B": len(b - a), "reshaped or transposed": len((a & b) - set(names)),
                "of another shape": len(self._misshapen & lost),
                "not of floats or not shown": len(lost - self._misshapen)}

    def _pass(self, group: tuple[str, ...], first: bool, seen: set[str]) -> None:
        """Run the items; compare these inner tensors, and on the first pass the outputs."""
        layers = self._layers_of(group) if group else None
        if layers is None and not first:
            return
        for feed in self._progress(self._data.batches(1), self._data.count or 0):
            if first:
                self._items += 1
                computed, expected = self._a.run(feed), self._b.run(feed)
                for name, sums in self._outputs.items():
                    sums.add(computed[name], expected[name])
            if layers is None:
                continue
            if self._a.fits(feed) and self._b.fits(feed):
                seen.update(self._compared(layers, feed))
            elif first:
                self._unfit += 1

    def _layers_of(self, group: tuple[str, ...]) -> tuple[Any, Any] | None:
        try:
            return self._a.layers(group), self._b.layers(group)
        except EngineError as error:
            self._notes.append(f"layers are not compared: {error}")
            return None

    def _compared(self, layers: tuple[Any, Any], feed: Feed) -> Iterator[str]:
        """Compare the inner tensors of one item and yield their names. A's are held, B's are compared as they come."""
        values: dict[str, Array] = {}
        names: list[str] = []

        def add(name: str, reference: Array) -> None:
            value = values.pop(name, None)
            if value is None or not (_is_real(value) and _is_real(reference)):
                return
            moved = self._aligned(name, value, reference)
            if moved is None:
                self._misshapen.add(name)
            else:
                self._layers[name].add(moved, reference)
                names.append(name)

        layers[0](feed, values.__setitem__)
        layers[1](feed, add)
        yield from names


def _is_real(array: Any) -> bool:
    return isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.floating)


def _notes(sides: Sequence[Side], is_generated: bool) -> Iterator[str]:
    plans = [side for side in sides if isinstance(side, PlanSide)]
    for plan in plans:
        if plan.built_for:
            yield f"{plan.name}: built for {plan.built_for}, and compiled again for this machine"
    if is_generated and any(plan.precision == "int8" for plan in plans):
        yield ("the inputs are generated, and unlike those that the INT8 plan was calibrated on: give typical ones, "
               "--data")
    selected = sorted(frozenset().union(*(side.selected for side in sides)))
    if selected:
        yield (f"{', '.join(selected)}: decided by a selection such as TopK, after which nearly equal elements may be "
               "swapped; look at the layers before it")


def _groups(sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Divide tensors, with their bytes, into groups that are held at a time."""
    groups: list[list[str]] = []
    left = 0
    for name, size in sizes.items():
        size = size or UNKNOWN_BYTES
        if size > left or not groups:
            groups.append([])
            left = MAX_BYTES
        groups[-1].append(name)
        left -= size
    return list(map(tuple, groups))


# ---- tables
def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _table(label: str, listed: Sequence[TensorErrors], first: str) -> str:
    rows = [[errors.name, *(["-"] * 4 if errors.wrong else [
        f"{errors.sqnr_db:.1f}", f"{errors.largest:.3g}", f"{errors.relative:.2e}", f"{errors.cosine:.6f}"]),
        errors.wrong or "diverges first" * (errors.name == first)] for errors in listed]
    return table(rows, (label, "SQNR dB", "largest error", "of range", "cosine", ""))
