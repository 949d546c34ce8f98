"""run-engine: run a plan on random or given data and print throughput and latency."""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np

from infer_server.backend import is_open
from infer_server.cli.common import guarded, parse_shapes, positive, seconds
from infer_server.cli.profile import as_json, header, profile, slowest
from infer_server.engines import load_engine
from infer_server.engines.errors import ConfigError, InputError
from infer_server.engines.ir.dtypes import BITS, as_in_memory, dtype_named
from infer_server.engines.ir.graph import Array
from infer_server.engines.machine.cpu import allowed_cpus
from infer_server.engines.plan.file import read_plan
from infer_server.engines.plan.plan import IoTensor
from infer_server.engines.runtime.contexts import AnyContext
from infer_server.engines.runtime.engine import Engine

WARM_UP_SECONDS = 0.2


def random_feed(inputs: Sequence[IoTensor], batch: int, seed: int = 0) -> dict[str, Array]:
    """Return random inputs: standard normal floats, integers 0 and 1; symbolic extents become the batch."""
    random = np.random.default_rng(seed)
    feed: dict[str, Array] = {}
    for tensor in inputs:
        shape = [batch if isinstance(extent, str) else extent for extent in tensor.shape]
        if tensor.dtype in BITS:
            real = random.standard_normal(shape, np.float32)
            feed[tensor.name] = as_in_memory(real.astype(dtype_named(tensor.dtype)))
            continue
        dtype = np.dtype(tensor.dtype)
        numbers = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 2, shape)
        feed[tensor.name] = numbers.astype(dtype)
    return feed


def read_feed(path: str, engine: Engine, batch: int) -> dict[str, Array]:
    """Read the first `batch` items of an .npz file with an array for each input. Raises InputError."""
    arrays = _arrays(path, engine)
    items = engine.items(arrays)
    if engine.max_batch and items < batch:
        raise InputError(f"'{path}' has {items} items; --batch {batch} needs as many")
    return {t.name: arrays[t.name][:batch] if t.batched else arrays[t.name] for t in engine.inputs}


def _arrays(path: str, engine: Engine) -> dict[str, Array]:
    """Read the inputs from an .npz file. Raises InputError if it cannot be read or lacks one."""
    try:
        with open(path, "rb") as file:
            if not is_zipfile(file):
                raise InputError(f"'{path}' is not an .npz file; write one with numpy.savez(path, NAME=array, ...)")
            file.seek(0)
            archive = np.load(file)
            if missing := [t.name for t in engine.inputs if t.name not in archive]:
                raise InputError(f"'{path}' has no array for {missing}; it has {sorted(archive)}")
            return {t.name: archive[t.name] for t in engine.inputs}
    except (ValueError, EOFError, BadZipFile) as error:
        raise InputError(f"'{path}' cannot be read as an .npz file: {error}") from error


def ready_context(engine: Engine, batch: int, data: str | None = None,
                  shapes: Mapping[str, tuple[int | None, ...]] | None = None) -> AnyContext:
    """Return a context whose inputs hold `batch` items, from an .npz file or random.

    Parameters
    ----------
    engine : Engine
    batch : int
        Number of items.
    data : str, optional
        Path of the .npz file.
    shapes : mapping of str to tuple, optional
        Shapes of random inputs with open extents.

    Raises
    ------
    InputError
        The batch, the data or the shapes do not match the plan.
    """
    if engine.max_batch and batch > engine.max_batch:
        raise InputError(f"--batch {batch}: the plan was built for batches of up to {engine.max_batch}; build it with "
                         f"--max-batch {batch}")
    if not engine.max_batch and batch > 1:
        raise InputError(f"--batch {batch}: the model has no batch axis, it takes exactly the shape it declares")
    if shapes and not is_open(engine):
        raise InputError("--shapes: the plan has no open extents; it takes the shapes that inspect-engine shows")
    requested = {name: tuple(extent or batch for extent in shape) for name, shape in (shapes or {}).items()}
    if data:
        feed = read_feed(data, engine, batch)
        input_shapes = {name: array.shape for name, array in feed.items()}
    else:
        input_shapes = {**engine.usual_shapes(batch), **requested}
        engine.check(input_shapes)
        # Deciding inputs keep the values that the plan was built for.
        feed = random_feed([replace(io, shape=input_shapes[io.name]) for io in engine.inputs
                            if io.name not in engine.deciding], batch)
    context = engine.create_context().at(input_shapes)
    for name, array in feed.items():
        context.input(name, batch)[...] = array
    return context


def measure(context: AnyContext, batch: int, seconds: float) -> np.ndarray[Any, Any]:
    """Return the time of each run in seconds, for at least `seconds` and at least ten runs."""
    end = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < end:
        context.execute(batch)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 10 or time.perf_counter() < end:
        begin = time.perf_counter()
        context.execute(batch)
        times.append(time.perf_counter() - begin)
    return np.array(times)


def report(engine: Engine, batch: int, times: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the JSON object that --json prints; throughput is in items per second."""
    milliseconds = 1e3 * times
    p50, p90, p95, p99 = (float(np.percentile(milliseconds, q)) for q in (50, 90, 95, 99))
    return {"throughput": batch * len(times) / float(times.sum()),
            "batch": batch, "threads": engine.threads, "runs": len(times),
            "latency_ms": {"mean": float(milliseconds.mean()), "min": float(milliseconds.min()),
                           "p50": p50, "p90": p90, "p95": p95, "p99": p99},
            "target": engine.plan.machine.target, "precision": engine.plan.precision}


def pinned(threads: int) -> list[int]:
    """Return the first CPUs that this process may use, one for each thread. Raises ConfigError if there are too few."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--pin: this system does not let a thread choose its CPU")
    cpus = allowed_cpus()
    if threads > len(cpus):
        raise ConfigError(f"--pin: {threads} threads, but this process may use {len(cpus)} CPUs; lower --threads")
    return cpus[:threads]


def _command(options: argparse.Namespace) -> int:
    threads = options.threads or int(read_plan(options.plan).metadata.get("threads", 1))
    cpus = pinned(threads) if options.pin else None
    engine = load_engine(options.plan, threads, cpus=cpus, specialise="off" if options.no_specialise else "wait",
                         gpu=options.gpu, retune=options.retune)
    context = ready_context(engine, options.batch, options.data, dict(options.shapes or ()))
    if cpus:        # after the worker threads were started, which inherit the affinity of this thread
        os.sched_setaffinity(0, {cpus[0]})
    if options.profile:
        profiled = profile(engine, context, options.batch)
        print(json.dumps(as_json(profiled), indent=1) if options.json else f"{header(profiled)}\n\n{slowest(profiled)}")
        return 0
    result = report(engine, options.batch, measure(context, options.batch, options.seconds))
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        latency = result["latency_ms"]
        print(f"{engine.plan.name} ({engine.plan.precision}, {engine.plan.machine.target}), batch {options.batch}, "
              f"{threads} thread{'s' if threads > 1 else ''}: {result['throughput']:.1f} items/s")
        print("  ".join(f"{key} {latency[key]:.3f} ms" for key in latency))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("run-engine", description=__doc__)
    parser.add_argument("plan", help="plan file written by build-engine")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="batch size (default 1)")
    parser.add_argument("--threads", type=positive, metavar="N",
                        help="number of threads (default: what the plan was built for)")
    parser.add_argument("--pin", action="store_true", help="pin each thread to its own CPU")
    parser.add_argument("--data", metavar="X.npz", help="file with an array for each input (default: random numbers)")
    parser.add_argument("--shapes", type=parse_shapes, metavar="X:1x77,...",
                        help="shapes of random inputs of a plan with open extents (default: those it was built for)")
    parser.add_argument("--no-specialise", action="store_true",
                        help="run the symbolic plan of a plan with open extents at shapes that it was not built for")
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="number of the GPU, for a GPU plan (default 0)")
    parser.add_argument("--retune", action="store_true",
                        help="time the tactics of a plan that was built without timing, and keep it in the engine "
                             "cache")
    parser.add_argument("--seconds", type=seconds, default=2.0, metavar="S",
                        help="duration of the measurement (default 2)")
    parser.add_argument("--profile", action="store_true",
                        help="print the time of each kernel, compared with this core's measured peaks")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(_command, make_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
