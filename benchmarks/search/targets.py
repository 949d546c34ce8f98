"""Accuracy and time of INT8 builds to a target: ours, and OpenVINO's by NNCF's accuracy control.

    python -m benchmarks.search.targets MODEL.onnx model.plan --calib calib.npz --eval eval.npz --test test.npz
        --metric agreement --max-drop 0.5%

model.plan is what `build-engine --max-drop` made of the same files. NNCF calibrates on --calib and returns layers to
float32 until the metric is within the target on --eval, as build-engine does. All are scored on --test, on which
nothing was chosen, against ONNX Runtime's float32 outputs, and timed in turns with one item and one thread. `nncf` is
OpenVINO's INT8 build without a target.
"""
from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.measure.cycles import Counter
from benchmarks.measure.measuring import WorkClock, interleaved
from benchmarks.runtimes.quantisers import QUANTISERS
from benchmarks.runtimes.runtimes import LOADERS, OPENVINO, ORT, OURS, Feed, Session, versions
from infer_server.calibration.data.items import CalibrationData
from infer_server.calibration.open_data import open_calibration_data
from infer_server.calibration.target.metrics import Items, Metric, Outputs, metric_of
from infer_server.cli.verifying import parse_drop
from infer_server.engines import load_engine


class Scorer:
    """Metric of the outputs of sessions on items, relative to ONNX Runtime's float32 outputs."""

    def __init__(self, model: Path, data: CalibrationData, metric: str) -> None:
        import onnx
        self._names = [output.name for output in onnx.load(model, load_external_data=False).graph.output]
        self._items, self.data = Items(data), data
        expected = list(self._outputs(LOADERS[ORT](model, self.feed, "fp32", 1)))
        self.metric: Metric = metric_of(metric, expected[0], has_labels=False)
        self._items.expected += [self.metric.keep(outputs) for outputs in expected]
        self.reference = self.metric.score(self._items, iter(expected))

    @property
    def feed(self) -> Feed:
        return next(iter(self.data.batches(1)))

    def score(self, session: Session) -> float:
        return self.metric.score(self._items, self._outputs(session))

    def score_compiled(self, compiled: Any, _: object) -> float:
        """Return the score of a model compiled by OpenVINO, as NNCF's accuracy control calls it."""
        return self.metric.score(self._items, (
            {name: compiled(dict(feed))[name] for name in self._names} for feed in self.data.batches(1)))

    def _outputs(self, session: Session) -> Iterator[Outputs]:
        for feed in self.data.batches(1):
            session.set_inputs(feed)
            session.infer()
            yield dict(zip(self._names, session.outputs(), strict=True))


def controlled(model: Path, plan: Path, options: argparse.Namespace, output: Path) -> None:
    """Write OpenVINO's INT8 model by NNCF's accuracy control with its defaults (docs.openvino.ai)."""
    import nncf
    import openvino as ov

    inputs = load_engine(plan).inputs
    scorer = Scorer(model, open_calibration_data(options.eval_data, inputs), options.metric)
    items = list(open_calibration_data(options.calib, inputs).batches(1))
    quantised = nncf.quantize_with_accuracy_control(
        ov.Core().read_model(model), nncf.Dataset([dict(item) for item in items]),
        nncf.Dataset(list(scorer.data.batches(1))), scorer.score_compiled, max_drop=options.max_drop,
        drop_type=nncf.DropType.ABSOLUTE, subset_size=len(items),
        model_type=nncf.ModelType.TRANSFORMER if options.transformer else None)
    ov.save_model(quantised, output, compress_to_fp16=False)


def uncontrolled(model: Path, plan: Path, options: argparse.Namespace, output: Path) -> None:
    items = list(open_calibration_data(options.calib, load_engine(plan).inputs).batches(1))
    QUANTISERS["nncf-transformer" if options.transformer else "nncf"].make(model, items, output)


def apart(function: Callable[..., None], *arguments: Any) -> float:
    """Run a function in a process of its own, whose threads would slow the turns; return its seconds."""
    begin = time.perf_counter()
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{function.__name__} ended with {process.exitcode}; its message is above")
    return time.perf_counter() - begin


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("benchmarks.search.targets", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--calib", required=True)
    parser.add_argument("--eval", dest="eval_data", required=True, help="items that choose the layers")
    parser.add_argument("--test", required=True, help="items of the reported score")
    parser.add_argument("--metric", required=True)
    parser.add_argument("--max-drop", type=parse_drop, required=True)
    parser.add_argument("--transformer", action="store_true", help="NNCF's mode for transformers")
    parser.add_argument("--seconds", type=float, default=10.0, help="of taking turns")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.xml" for name in ("nncf", "nncf to the target")}
        seconds = {name: apart(make, options.model, options.plan, options, file)
                   for make, (name, file) in zip((uncontrolled, controlled), files.items(), strict=True)}
        compare(options, files, seconds)


def compare(options: argparse.Namespace, files: Mapping[str, Path], seconds: Mapping[str, float]) -> None:
    """Print a table of scores and times."""
    scorer = Scorer(options.model, open_calibration_data(options.test, load_engine(options.plan).inputs),
                    options.metric)
    sessions = {"ours": LOADERS[OURS](options.plan, scorer.feed, "int8", 1)} | {
        name: LOADERS[OPENVINO](file, scorer.feed, "int8", 1) for name, file in files.items()}
    scores = {name: scorer.score(session) for name, session in sessions.items()}
    for session in sessions.values():
        session.set_inputs(scorer.feed)
    clock = WorkClock(Counter())
    costs = interleaved(clock, {name: partial(session.infer) for name, session in sessions.items()}, options.seconds)
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    print(f"| build | {scorer.metric.name}, float32 {scorer.reference:.4f} | {clock.unit} | over ours: median "
          "(quartiles) | build, s |\n| --- | --- | --- | --- | --- |")
    for name, cost in costs.items():
        low, middle, high = quantiles([theirs / ours for theirs, ours in zip(cost, costs["ours"], strict=True)], n=4)
        print(f"| {name} | {scores[name]:.4f} | {median(cost):.4g} | {middle:.2f} ({low:.2f} to {high:.2f}) | "
              f"{f'{seconds[name]:.0f}' if name in seconds else ''} |")


if __name__ == "__main__":
    main(sys.argv[1:])
