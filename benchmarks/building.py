"""Benchmark of builds and plans: build time with an empty and a full timing cache, plan size, loading, memory.

    python -m benchmarks.building resnet50 mobilenet_v2                 # of the zoo, INT8
    python -m benchmarks.building m.onnx --precision bf16 --write       # also into docs/benchmarks

Times exclude calibration: the ranges are determined first, and the measured builds read them from the cache. Each
build and each load runs in its own process. CPU time, which depends less on other load, is listed with the wall time.
"""
from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.models import random_pictures, run, source_of
from benchmarks.reports.document import Cell, machine, markdown_table, write_section
from infer_server.engines.plan.arena import plan_memory
from infer_server.engines.plan.file import read_plan
from infer_server.engines.plan.plan import Plan

HEADER = ("model", "build, empty cache s", "full cache s", "plan MB", "per weight byte", "load ms", "first load ms",
          "import ms", "context MB", "per live byte")


def timed(source: Path, plan: Path, *options: object) -> str:
    """Run build-engine and return its times as "seconds (CPU seconds)"."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run("infer_server.cli.build_engine", source, "-o", plan, *options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{time.perf_counter() - start:.1f} ({cpu:.1f})"


def weight_bytes(plan: Plan) -> int:
    """Return the bytes of the graph's weights in the plan's precision."""
    size = {"fp32": 4, "bf16": 2, "fp16": 2}.get(plan.precision, 1)
    return sum(array.size * size for array in plan.weights.values() if array.ndim > 1)


def live_bytes(plan: Plan) -> int:
    """Return the maximum over steps of the bytes of live buffers."""
    machine = plan.machine
    return max(sum(b.bytes for b in machine.buffers if b.first <= step <= b.last) for step in range(len(machine.steps)))


def measure(model: str, precision: str, max_batch: int, folder: Path) -> list[Cell]:
    """Build and load a model, and return its row of the table."""
    source = source_of(model, folder)
    plan, times = folder / f"{source.stem}.plan", folder / f"{source.stem}.times"
    options: list[object] = [f"--{precision}", "--max-batch", max_batch, "--timing-cache", times, "-q",
                             "--no-cache"]
    if precision == "int8":
        ranges = folder / f"{source.stem}.ranges"
        run("infer_server.cli.build_engine", source, "-o", plan, "--int8", "--no-timing", "--no-cache",
            "--calibrator", "percentile", "--calib", random_pictures(source, folder), "--calib-cache", ranges, "-q")
        options += ["--calib-cache", ranges]
    empty, full = timed(source, plan, *options), timed(source, plan, *options)
    loaded = json.loads(subprocess.run([sys.executable, "-m", "benchmarks.loading", plan], check=True,
                                       capture_output=True).stdout)
    built, size = read_plan(plan), plan.stat().st_size
    memory = plan_memory(built.machine.buffers, built.machine.fills).total
    return [source.stem, empty, full, size / 1e6, size / weight_bytes(built), loaded["load_ms"],
            loaded["first_load_ms"], loaded["import_ms"], memory / 1e6, memory / live_bytes(built)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a model of the zoo, or an ONNX file")
    parser.add_argument("--precision", default="int8", choices=("int8", "bf16", "fp16", "fp32"))
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="also write the table to docs/benchmarks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(model, options.precision, options.max_batch, Path(folder)) for model in options.models]
    text = (f"{machine()}; {options.precision}, batches up to {options.max_batch}; "
            f"in brackets, seconds of processors\n\n{markdown_table(HEADER, rows)}")
    print(text)
    if options.write:
        write_section(f"building {options.precision}", text)


if __name__ == "__main__":
    main()
