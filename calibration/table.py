"""Calibration table, {tensor: range}, and its cache files in our format and TensorRT's.

Our format is JSON: strict, versioned, bound to a model by its hash. TensorRT's (up to version 10) is text, which begins
with the version that reads it:

    TRT-8510-EntropyCalibration2
    input: 3c010a14                 the bits of the float32 scale, most significant first; range = scale * [-127, 127]
"""
from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infer_server.calibration.calibrators import Range, make_calibrator
from infer_server.calibration.histogram import Histogram, histogram_of, histogram_to_json
from infer_server.engines.errors import CalibrationError
from infer_server.engines.ir.recipe import Recipe

FORMAT = "infer-server calibration table"
VERSION = 5
TENSORRT_LEVEL = 127            # int8 value of the threshold


@dataclass(frozen=True)
class CalibrationTable:
    """Result of a calibration.

    ranges      (low, high) of each tensor in real values, low <= 0 <= high, after smoothing
    means       mean at each index of a tensor's last axis if biases are to be corrected by them, else empty
    smoothing   divisor at each index of a tensor's last axis (smoothing.py)
    unsmoothed  range of each smoothed tensor before smoothing, for other runtimes
    rounding    steps that int8 weights lie above the nearest ones, by output of the contraction (rounding.py)
    scaled_rows tensors that products read with a scale for each row, computed at run time
    model_hash  hash of the model; "" from a TensorRT cache
    items       number of calibration items; 0 from a TensorRT cache
    notes       warnings about the data
    fault       why the quantised model is too inexact; "" if it is not, or if this is unknown
    histograms  histogram of each tensor, to merge partial calibrations (merging.py); {} from a search
    """
    calibrator: str
    model_hash: str
    items: int
    ranges: Mapping[str, Range]
    means: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    smoothing: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    unsmoothed: Mapping[str, Range] = field(default_factory=dict)
    rounding: Mapping[str, str] = field(default_factory=dict)
    scaled_rows: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fault: str = ""
    histograms: Mapping[str, Histogram] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for tensor, (low, high) in (*self.ranges.items(), *self.unsmoothed.items()):
            if not (math.isfinite(low) and math.isfinite(high) and low <= 0.0 <= high):
                raise CalibrationError(f"'{tensor}': the range ({low}, {high}) must be finite and hold zero")
        for name in ("ranges", "means", "smoothing", "unsmoothed", "rounding"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def recipe(self) -> Recipe:
        """Recipe for the compiler."""
        return Recipe(self.ranges, self.means, self.smoothing, self.rounding, self.scaled_rows)


def make_table(calibrator: str, model_hash: str, items: int, histograms: Mapping[str, Histogram]) -> CalibrationTable:
    """Return the table of the ranges that a calibrator derives from histograms of `items` items."""
    rule = make_calibrator(calibrator)
    return CalibrationTable(calibrator, model_hash, items, {name: rule.range(h) for name, h in histograms.items()})


# ---- files
def write_table(table: CalibrationTable, path: str | Path) -> None:
    """Write a table in our format. Raises CalibrationError if the file cannot be written."""
    document = {"format": FORMAT, "version": VERSION, "calibrator": table.calibrator, "model_hash": table.model_hash,
                "items": table.items, "ranges": {tensor: list(range_) for tensor, range_ in table.ranges.items()},
                "means": {tensor: list(means) for tensor, means in table.means.items()},
                "smoothing": {tensor: list(factors) for tensor, factors in table.smoothing.items()},
                "unsmoothed": {tensor: list(range_) for tensor, range_ in table.unsmoothed.items()},
                "rounding": dict(table.rounding), "scaled_rows": list(table.scaled_rows),
                "notes": list(table.notes), "fault": table.fault}
    if table.histograms:
        document["histograms"] = {tensor: histogram_to_json(one) for tensor, one in table.histograms.items()}
    try:
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CalibrationError(f"cannot write the calibration cache {path}: {error.strerror}") from error


def write_tensorrt(table: CalibrationTable, path: str | Path, version: tuple[int, int, int]) -> list[str]:
    """Write a table as a calibration cache of a TensorRT version; return the tensors that are omitted.

    Tensors that are always zero are omitted, and smoothed ones whose range before smoothing is unknown; TensorRT runs
    their consumers in float. Scales are symmetric: the larger side of a range counts. Raises CalibrationError if the
    file cannot be written.
    """
    major, minor, patch = version
    number = major * (1000 if major < 10 else 10000) + minor * 100 + patch      # NV_TENSORRT_VERSION
    ranges = {tensor: range_ for tensor, range_ in table.ranges.items() if tensor not in table.smoothing}
    scales = {tensor: max(-low, high) / TENSORRT_LEVEL for tensor, (low, high) in {**ranges, **table.unsmoothed}.items()
              if low < high}
    lines = [f"TRT-{number}-EntropyCalibration2",
             *(f"{tensor}: {struct.pack('>f', scale).hex()}" for tensor, scale in scales.items())]
    try:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise CalibrationError(f"cannot write the calibration cache {path}: {error.strerror}") from error
    return [tensor for tensor in table.ranges if tensor not in scales]


def read_table(path: str | Path) -> CalibrationTable:
    """Read a cache file of either format, detected by its first characters.

    Raises CalibrationError, naming the file and the line or field, if it is unreadable or malformed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot read the calibration cache {path}: {error}") from error
    try:
        if text.startswith("TRT-"):
            return _parse_tensorrt(text)
        if text.lstrip().startswith("{"):
            return _parse_ours(text)
    except CalibrationError as error:
        raise CalibrationError(f"calibration cache {path}: {error}") from error
    raise CalibrationError(f"{path} is no calibration cache: it begins neither with '{{' (ours) nor with 'TRT-' "
                           "(TensorRT's)")


def _parse_ours(text: str) -> CalibrationTable:
    try:
        document: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise CalibrationError(f"not JSON: {error}; delete it to calibrate again") from error
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise CalibrationError(f"format {document.get('format')!r} version {document.get('version')!r}, expected "
                               f"{FORMAT!r} version {VERSION}; delete it to calibrate again")
    expected = {"format", "version", "calibrator", "model_hash", "items", "ranges", "means", "smoothing", "unsmoothed",
              "rounding"}
    if document.keys() - {"scaled_rows", "notes", "fault", "histograms"} != expected:
        raise CalibrationError(f"its fields are {sorted(document)}, expected {sorted(expected)}")
    try:
        ranges, unsmoothed = ({str(tensor): (float(low), float(high)) for tensor, (low, high) in document[key].items()}
                              for key in ("ranges", "unsmoothed"))
        means, smoothing = ({str(tensor): tuple(map(float, values)) for tensor, values in document[key].items()}
                            for key in ("means", "smoothing"))
        return CalibrationTable(str(document["calibrator"]), str(document["model_hash"]), int(document["items"]),
                                ranges, means, smoothing, unsmoothed,
                                {str(output): str(steps) for output, steps in document["rounding"].items()},
                                tuple(map(str, document.get("scaled_rows", ()))),
                                tuple(map(str, document.get("notes", ()))), str(document.get("fault", "")),
                                {str(tensor): histogram_of(histogram)
                                 for tensor, histogram in document.get("histograms", {}).items()})
    except (AttributeError, TypeError, ValueError) as error:
        raise CalibrationError(f"a field of the wrong type: {error}") from error


def _parse_tensorrt(text: str) -> CalibrationTable:
    header, *lines = text.splitlines()
    ranges: dict[str, Range] = {}
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        tensor, *bits = line.rsplit(": ", 1)        # tensor names may hold ": " themselves
        try:
            scale, = struct.unpack(">f", bytes.fromhex(bits[0].strip()))
        except (IndexError, ValueError, struct.error) as error:
            raise CalibrationError(f"line {number}: expected 'tensor: eight hex digits', found {line!r}") from error
        ranges[tensor] = (-scale * TENSORRT_LEVEL, scale * TENSORRT_LEVEL)
    return CalibrationTable(header, "", 0, ranges)


# ---- partial calibrations
def merged_table(files: Sequence[str | Path], model_hash: str, calibrator: str = "") -> CalibrationTable:
    """Return the table of all data from the caches of its parts.

    Parameters
    ----------
    files : sequence of path
        Caches that a named calibrator wrote.
    model_hash : str
        Hash of the model.
    calibrator : str
        Name of the calibrator; "" takes that of the caches.

    Raises
    ------
    CalibrationError
        A file is no such cache, is of another model, or the calibrators differ and none is named.
    """
    tables = [_readable(file, model_hash) for file in files]
    names = tuple(dict.fromkeys(table.calibrator for table in tables))
    if not calibrator and len(names) > 1:
        raise CalibrationError(f"the calibration caches are of {' and '.join(names)}: name one, --calibrator")
    histograms: dict[str, Histogram] = {}
    for tensor in dict.fromkeys(name for table in tables for name in table.histograms):
        parts = [table.histograms[tensor] for table in tables if tensor in table.histograms]
        histograms[tensor] = reduce(Histogram.merged, parts)
    merged = make_table(calibrator or names[0], model_hash, sum(table.items for table in tables), histograms)
    notes = tuple(dict.fromkeys(note for table in tables for note in table.notes))
    return replace(merged, histograms=histograms, notes=notes)


def _readable(file: str | Path, model_hash: str) -> CalibrationTable:
    table = read_table(file)
    if table.model_hash != model_hash:
        raise CalibrationError(f"calibration cache {file} is of another model")
    if not table.histograms:
        raise CalibrationError(f"calibration cache {file} has no histograms, so it cannot be merged: write it with "
                               "--calibrator NAME (a search keeps none, and neither does TensorRT)")
    return table


# ---- --calib-cache FILE
@dataclass(frozen=True)
class CachedTable:
    """A table, and what the user should know about where it came from."""
    table: CalibrationTable
    note: str


def load_or_make(path: str | Path, model_hash: str, make: Callable[[], CalibrationTable],
                 calibrator: str | None = None, tensors: Collection[str] = ()) -> CachedTable:
    """Return the table in the cache file if it fits, else the result of `make`, which is written to the file.

    A table fits if it is for this model and calibrator (None: any) and has ranges for all of `tensors`. If only ranges
    are missing, because other input shapes have other tensors, the new table is merged with the ranges of the file.
    TensorRT's caches do not name their model: they are used as they are and never overwritten.

    Raises CalibrationError on a broken file.
    """
    kept: Mapping[str, Range] = {}
    if not Path(path).exists():
        reason = "there was none"
    else:
        table = read_table(path)
        if not table.model_hash:
            return CachedTable(table, f"ranges of {len(table.ranges)} tensors taken from the TensorRT cache {path}")
        if table.model_hash != model_hash:
            reason = "it was of another model"
        elif calibrator not in (None, table.calibrator):
            reason = f"its calibrator is {table.calibrator}, and {calibrator} is requested"
        elif lacking := [name for name in tensors if name not in table.ranges]:
            reason, kept = f"it had no ranges for {len(lacking)} tensors of these shapes", table.ranges
        else:
            return CachedTable(table, f"ranges taken from the calibration cache {path} "
                                 f"({table.calibrator}, {table.items} items)")
    table = make()
    table = replace(table, ranges={**kept, **table.ranges})
    write_table(table, path)
    return CachedTable(table, f"calibration cache {path} written: {reason}")
