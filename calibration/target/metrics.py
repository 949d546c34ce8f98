"""Metrics of a model on evaluation items, by name or as a user's function; greater is better.

    agreement       share of items with the float model's largest class
    top1            share of items whose largest class is the label
    cosine          mean cosine of the outputs with the float model's, of the worst output of each item, without padding
    script.py:f     f(inputs, outputs, labels) of lists with one entry an item; it returns a number
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infer_server.calibration.accuracy.measures import cosine
from infer_server.calibration.data.items import CalibrationData
from infer_server.calibration.data.padding import Padding
from infer_server.calibration.data.sources.script import function_of, is_script
from infer_server.engines.errors import CalibrationError, ConfigError, did_you_mean
from infer_server.engines.ir.graph import Array

AGREEMENT, TOP1, COSINE = "agreement", "top1", "cosine"
NAMES = (AGREEMENT, TOP1, COSINE)
MIN_CLASSES = 3         # an output [items, classes] with at least so many classes is taken for a classifier's
MOST_BYTES = 2 << 30    # outputs and inputs of evaluation items that are held at a time

Outputs = Mapping[str, Array]


@dataclass
class Items:
    """Evaluation items.

    Attributes
    ----------
    data : CalibrationData
    labels : sequence of int, optional
    expected : list
        What the metric keeps of the float model's outputs of each item.
    """
    data: CalibrationData
    labels: Sequence[int] | None = None
    expected: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Metric:
    """Named metric.

    Attributes
    ----------
    name : str
    keep : callable
        Returns what is kept of the float model's outputs of an item.
    score : callable
        Returns the score of a model's outputs of all items, over which it iterates once.
    """
    name: str
    keep: Callable[[Outputs], Any]
    score: Callable[[Items, Iterable[Outputs]], float]


def check_metric(name: str, has_labels: bool) -> None:
    """Raise ConfigError if there is no such metric, or it lacks labels."""
    if name and name not in NAMES and not is_script(name):
        raise ConfigError(f"unknown metric '{name}'{did_you_mean(name, NAMES)}; choose one of {', '.join(NAMES)}, or "
                          "give a function, script.py:function")
    if name == TOP1 and not has_labels:
        raise ConfigError("metric 'top1' needs labels: give a file of them, or 'folders' for a folder per class")


def metric_of(name: str, first: Outputs, has_labels: bool) -> Metric:
    """Return the metric of a name; "" chooses by the labels and the outputs of the first item.

    Raises ConfigError, CalibrationError.
    """
    if is_script(name):
        return Metric(name, lambda outputs: None, _user_function(name))
    output = _class_output(first)
    if not name:
        name = COSINE if output is None else TOP1 if has_labels else AGREEMENT
    if name == COSINE:
        return Metric(COSINE, lambda outputs: {key: array for key, array in outputs.items() if array.dtype.kind == "f"},
                      _mean_cosine)
    if output is None:
        raise ConfigError(f"metric '{name}' is for classifiers: no output has the shape [items, classes]; choose "
                          f"'{COSINE}', or give a function, script.py:function")

    def largest(outputs: Outputs) -> int:
        return int(np.argmax(outputs[output]))

    if name == TOP1:
        return Metric(name, lambda outputs: None, _mean_of(lambda outputs, _, label: largest(outputs) == label))
    return Metric(name, largest, _mean_of(lambda outputs, expected, _: largest(outputs) == expected))


def _class_output(outputs: Outputs) -> str | None:
    """Return the first output with one row of classes an item, or None."""
    return next((name for name, array in outputs.items()
                 if array.dtype.kind == "f" and array.ndim == 2 and array.shape[1] >= MIN_CLASSES), None)


def _mean_of(score: Callable[[Outputs, Any, int | None], float]) -> Callable[[Items, Iterable[Outputs]], float]:
    """Return a metric that is the mean of a score of each item's outputs, so that none are held."""
    def mean(items: Items, outputs: Iterable[Outputs]) -> float:
        total, count = 0.0, 0
        for number, item_outputs in enumerate(outputs):
            label = items.labels[number] if items.labels is not None and number < len(items.labels) else None
            total += float(score(item_outputs, items.expected[number], label))
            count = number + 1
        return total / count
    return mean


def _mean_cosine(items: Items, outputs: Iterable[Outputs]) -> float:
    """Return the mean of the items' cosines of their worst outputs; padded positions do not count."""
    cosines = []
    for feed, actual, expected in zip(items.data.batches(1), outputs, items.expected, strict=True):
        real = Padding(feed).without
        cosines.append(min((cosine(real(expected[name]), real(actual[name])) for name in expected), default=1.0))
    return sum(cosines) / len(cosines)


def _user_function(source: str) -> Callable[[Items, Iterable[Outputs]], float]:
    function = function_of(source)

    def score(items: Items, outputs: Iterable[Outputs]) -> float:
        all_outputs: list[Outputs] = []
        inputs: list[Outputs] = []
        size = 0
        for feed, item_outputs in zip(items.data.batches(1), outputs, strict=True):
            size += bytes_of(feed) + bytes_of(item_outputs)
            check_bytes(size, len(all_outputs))
            inputs.append(feed)
            all_outputs.append(item_outputs)
        try:
            value = float(function(inputs, all_outputs, items.labels))
        except Exception as error:      # whatever the user's code raises
            raise CalibrationError(f"metric {source} failed: {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise CalibrationError(f"metric {source} returned {value}; it must be a finite number")
        return value
    return score


def bytes_of(arrays: Any) -> int:
    """Return the bytes of the arrays of an item."""
    return sum(array.nbytes for array in arrays.values()) if isinstance(arrays, Mapping) else 0


def check_bytes(size: int, items: int) -> None:
    """Raise CalibrationError if the items that are held exceed the limit."""
    if size > MOST_BYTES:
        raise CalibrationError(f"{items} evaluation items take more than {MOST_BYTES >> 20} MiB in memory, which this "
                               "metric holds at a time: give fewer items, --eval")
