"""Benchmark of the symbolic plan of a plan with open extents, against ONNX Runtime at the same shapes.

    python -m benchmarks.measure.open_shapes minilm.plan minilm.onnx 1,77 8,128
    python -m benchmarks.measure.open_shapes det.plan det.onnx 1,416,352        # the batch, then each open extent

No shape is specialised. "first": CPU time of the first run at the shape. One thread each, in turns.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import onnxruntime

from benchmarks.measure.cycles import Counter
from benchmarks.measure.measuring import WorkClock, interleaved
from infer_server.engines import load_engine
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import IoTensor


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.measure.open_shapes", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("shapes", nargs="+", metavar="BATCH,EXTENT,...")
    parser.add_argument("--seconds", type=float, default=5.0, help="of taking turns, for each shape")
    options = parser.parse_args()
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(options.model, settings, providers=["CPUExecutionProvider"])
    engine, clock = load_engine(options.plan, specialise="off"), WorkClock(Counter())
    print(f"| batch, {', '.join(engine.plan.extents)} | first, s | {clock.unit} | ONNX Runtime | ours / ONNX Runtime: "
          "median (quartiles) | largest difference |\n| --- | --- | --- | --- | --- | --- |")
    for shape in options.shapes:
        batch, *extents = map(int, shape.split(","))
        feed = dict(_inputs(engine.inputs, batch, dict(zip(engine.plan.extents, extents, strict=True))))
        begin = time.process_time()
        ours = engine.run(feed)
        first = time.process_time() - begin
        theirs = session.run(list(ours), feed)
        error = max(float(np.abs(a - b).max()) for a, b in zip(ours.values(), theirs, strict=True))
        costs = interleaved(clock, {"ours": partial(engine.run, feed), "peer": partial(session.run, None, feed)},
                            options.seconds)
        low, middle, high = quantiles([a / b for a, b in zip(costs["ours"], costs["peer"], strict=True)], n=4)
        print(f"| {shape} | {first:.2f} | {median(costs['ours']):.4g} | {median(costs['peer']):.4g} | {middle:.2f} "
              f"({low:.2f} to {high:.2f}) | {error:.1e} |", flush=True)


def _inputs(inputs: Iterable[IoTensor], batch: int, extents: dict[str, int]) -> Iterable[tuple[str, Array]]:
    """Yield an array for each input: ones for masks and token types, else normal floats or random tokens."""
    random = np.random.default_rng(0)
    for io in inputs:
        shape = io.shape_of(batch, extents)
        if "mask" in io.name or "type" in io.name:
            yield io.name, np.ones(shape, io.dtype)
        else:
            yield io.name, (random.standard_normal(shape) if io.dtype.startswith("float") else
                            random.integers(1, 100, shape)).astype(io.dtype)


if __name__ == "__main__":
    main()
