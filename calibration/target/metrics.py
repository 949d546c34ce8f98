"""Metrics of a model on evaluation items, by name or as a user's function; greater is better.

    agreement       share of items with the float model's largest class
    top1            share of items whose largest class is the label
    cosine          mean cosine of the outputs with the float model's, of the worst output of each item
    script.py:f     f(inputs, outputs, labels) of lists with one entry an item; it returns a number
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer_server.calibration.accuracy.measures import cosine
from infer_server.calibration.data.items import CalibrationData
from infer_server.calibration.data.sources.script import function_of, is_script
from infer_server.engines.errors import CalibrationError, ConfigError, did_you_mean
from infer_server.engines.ir.graph import Array

AGREEMENT, TOP1, COSINE = "agreement", "top1", "cosine"
NAMES = (AGREEMENT, TOP1, COSINE)
MIN_CLASSES = 3         # an output [items, classes] with at least so many classes is taken for a classifier's

Outputs = Mapping[str, Array]


@dataclass(frozen=True)
class Items:
    """Evaluation items with the float model's outputs of each, and the labels if there are any."""
    data: CalibrationData
    expected: Sequence[Outputs]
    labels: Sequence[int] | None = None


@dataclass(frozen=True)
class Metric:
    """A named function from the items and a model's outputs of each to a score."""
    name: str
    score: Callable[[Items, Sequence[Outputs]], float]


def check_metric(name: str, has_labels: bool) -> None:
    """Raise ConfigError if there is no such metric, or it lacks labels."""
    if name and name not in NAMES and not is_script(name):
        raise ConfigError(f"unknown metric '{name}'{did_you_mean(name, NAMES)}; choose one of {', '.join(NAMES)}, or "
                          "give a function, script.py:function")
    if name == TOP1 and not has_labels:
        raise ConfigError("metric 'top1' needs labels: give a file of them, or 'folders' for a folder per class")


def metric_of(name: str, items: Items) -> Metric:
    """Return the metric of a name; "" chooses by the labels and the outputs. Raises ConfigError, CalibrationError."""
    if is_script(name):
        return Metric(name, _user_function(name))
    if not name:
        classified = _class_output(items.expected[0]) is not None
        name = (TOP1 if items.labels is not None else AGREEMENT) if classified else COSINE
    if name == COSINE:
        return Metric(COSINE, _cosine)
    output = _class_output(items.expected[0])
    if output is None:
        raise ConfigError(f"metric '{name}' is for classifiers: no output has the shape [items, classes]; choose "
                          f"'{COSINE}', or give a function, script.py:function")
    return Metric(name, _top1(output) if name == TOP1 else _agreement(output))


def _class_output(outputs: Outputs) -> str | None:
    """Return the first output with one row of classes an item, or None."""
    return next((name for name, array in outputs.items()
                 if array.dtype.kind == "f" and array.ndim == 2 and array.shape[1] >= MIN_CLASSES), None)


def _agreement(output: str) -> Callable[[Items, Sequence[Outputs]], float]:
    def score(items: Items, outputs: Sequence[Outputs]) -> float:
        return _share(np.argmax(expected[output]) == np.argmax(came[output])
                      for expected, came in zip(items.expected, outputs, strict=True))
    return score


def _top1(output: str) -> Callable[[Items, Sequence[Outputs]], float]:
    def score(items: Items, outputs: Sequence[Outputs]) -> float:
        assert items.labels is not None
        return _share(np.argmax(came[output]) == label for label, came in zip(items.labels, outputs, strict=True))
    return score


def _share(hits: Iterable[Any]) -> float:
    return float(np.mean([bool(hit) for hit in hits]))


def _cosine(items: Items, outputs: Sequence[Outputs]) -> float:
    values = [min((cosine(expected[name], came[name]) for name in expected if expected[name].dtype.kind == "f"),
                  default=1.0) for expected, came in zip(items.expected, outputs, strict=True)]
    return float(np.mean(values))


def _user_function(source: str) -> Callable[[Items, Sequence[Outputs]], float]:
    function = function_of(source)

    def score(items: Items, outputs: Sequence[Outputs]) -> float:
        try:
            value = float(function(list(items.data.batches(1)), list(outputs), items.labels))
        except Exception as error:      # whatever the user's code raises
            raise CalibrationError(f"metric {source} failed: {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise CalibrationError(f"metric {source} returned {value}; it must be a finite number")
        return value
    return score
