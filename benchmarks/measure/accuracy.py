"""Accuracy of a build, compared with float32 outputs and by a model's own metric.

A metric comes from a Python file with two functions:

    def evaluation():                   # feeds {input name: array}, of one item each, none of them in the calibration
        ...
    def metric(reference, outputs):     # both: for each feed, the list of outputs; -> {name: value}
        ...
"""
from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.runtimes.runtimes import Feed, Session
from infer_server.engines.ir.graph import Array

# Minimum cosine of any output with the float32 reference, by precision. INT8's excludes broken networks only; the
# model's own metric measures its accuracy.
MIN_COSINE = {"fp32": 0.99999, "bf16": 0.99, "int8": 0.9}

Outputs = Sequence[Array]


@dataclass(frozen=True)
class Agreement:
    cosine: float       # the minimum of all outputs
    error: float        # max |difference| / max |reference|, the maximum of all outputs


def compare(reference: Outputs, outputs: Outputs) -> Agreement:
    """Return the cosine and the error of outputs. Raises ValueError if they differ in number or shape."""
    pairs = list(zip(reference, outputs, strict=True))
    for expected, actual in pairs:
        if expected.shape != actual.shape:
            raise ValueError(f"an output has shape {actual.shape}, the reference {expected.shape}")
    doubles = [(a.astype(np.float64).ravel(), b.astype(np.float64).ravel()) for a, b in pairs]
    return Agreement(min(_cosine(a, b) for a, b in doubles), max(_error(a, b) for a, b in doubles))


def _cosine(a: Array, b: Array) -> float:
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size else float(np.array_equal(a, b))


def _error(expected: Array, actual: Array) -> float:
    size = float(np.abs(expected).max(initial=0.0))
    difference = float(np.abs(expected - actual).max(initial=0.0))
    return difference / size if size else (math.inf if difference else 0.0)


@dataclass(frozen=True)
class Judge:
    """Model's own metric with its evaluation feeds."""
    feeds: Sequence[Feed]
    metric: Callable[[Sequence[Outputs], Sequence[Outputs]], Mapping[str, float]]

    def outputs(self, session: Session) -> list[Outputs]:
        """Return the outputs of a session, which is loaded for one item, for all evaluation feeds."""
        results: list[Outputs] = []
        for feed in self.feeds:
            session.set_inputs(feed)
            session.infer()
            results.append(session.outputs())
        return results


def load_judge(path: Path) -> Judge:
    """Run the script; raise its exceptions, or AttributeError if one of the two functions is missing."""
    spec = importlib.util.spec_from_file_location(f"accuracy_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return Judge(list(script.evaluation()), script.metric)
