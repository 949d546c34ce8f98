"""Benchmark of a GPU in one command: correctness, speed, chosen tactics, and comparison with other runtimes.

    python -m benchmarks.gpu --results gpu.json                             # everything, in the order of STEPS
    python -m benchmarks.gpu --results gpu.json --minutes 9                 # again: resumes where it was interrupted
    python -m benchmarks.gpu --steps right,networks --models resnet50
    python -m benchmarks.gpu --emulated sm_80 --models trial --batches 1,2  # without a GPU: test this command

A failure is recorded in the results, and the next part runs; results are written as they are found. After a kernel
fault a process cannot use the GPU any more, and a kernel that hangs blocks its thread. Therefore each problem of a
family runs in a process of its own, and this process restarts after such a failure, or when a part exceeds
--part-seconds, with the next part. To follow up by hand: compute-sanitizer on `--steps right --match NAME`, and ncu on
the slowest steps.

The machine needs this tree, the driver, Python 3.11 or later, and as wheels, if it has no network: numpy, onnx,
ml_dtypes, llvmlite (0.45 or later), protobuf, onnxruntime (for the statistics of random networks), pytest, and the
extra `cuda` to make machine code at the build; without it the driver compiles PTX, which is checked and timed as well.
Peers are measured if they are installed: TensorRT, TensorRT-RTX; torch with torchvision and transformers.
"""
from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx

from benchmarks.measure.findings import Findings
from benchmarks.runtimes.gpu_peers import peers
from benchmarks.zoo import TINY, ZOO, Net, Tensor, architecture
from benchmarks.zoo.pictures import feeds_for
from benchmarks.zoo.sequences.bert import bert
from benchmarks.zoo.sequences.speech import deep_speech2
from benchmarks.zoo.sequences.transformers import recogniser, vit
from infer_server.engines.backends.cuda.backend import BACKEND
from infer_server.engines.backends.cuda.codegen.gpu import GPUS
from infer_server.engines.backends.cuda.cost import CARDS
from infer_server.engines.backends.cuda.kernels.kernel import kernel_for
from infer_server.engines.backends.cuda.runtime.device import DEVICE
from infer_server.engines.backends.cuda.runtime.driver import GpuDriver
from infer_server.engines.backends.cuda.runtime.execution import CudaExecution
from infer_server.engines.backends.cuda.runtime.holdings import ScopedResources
from infer_server.engines.backends.cuda.runtime.library import CudaError
from infer_server.engines.backends.cuda.session import CudaSession
from infer_server.engines.backends.cuda.tuner import GpuTuner, TuningRequest
from infer_server.engines.backends.tensorrt.runtime.library import TARGETS, LibraryMissing, library
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.ir.graph import Graph
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.view import dense_view
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.engine import Engine

RANGE = (-4.0, 6.0)         # range of each tensor's values; times do not depend on it
RELATIVE = 2e-2             # error of FP16 against the CPU's plan, relative to the largest output
CHECKED, TUNED_FOR = 3, (1, 128)        # items; batches that tactics are timed for
AT_ONCE = 8                 # problems that are checked concurrently, each in a process
REPEATS, SLOWEST = 20, 25
COPIED, SIDE = 1 << 30, 4096            # for the measured peaks: bytes copied; M, N and K of the product


@architecture(size=8)
def trial(net: Net, x: Tensor) -> Tensor:
    """Build a network of two layers, for an emulated GPU."""
    return net.classify(net.conv_bn_act(x, 16, 3, name="stem"))


minilm = partial(bert, layers=6, features=384, heads=12, length=128)
MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "resnet50": ZOO["resnet50"], "mobilenet_v2": ZOO["mobilenet_v2"], "minilm": minilm,
    "trial": partial(trial, classes=4)}
SMALL: Mapping[str, Callable[[], onnx.ModelProto]] = {
    **MODELS, **{name: TINY[name] for name in ("resnet50", "mobilenet_v2")}, "minilm": partial(minilm, length=16),
    "recogniser": partial(recogniser, classes=20), "vit": partial(vit, classes=10),
    "gru": partial(deep_speech2, steps=24, bands=41, hidden=48, layers=2)}


@dataclass(frozen=True)
class Bench:
    """GPU with the options and results of the benchmark."""
    options: argparse.Namespace
    results: Findings
    device: GpuDriver
    target: str

    @cached_property
    def cache(self) -> TimingCache:
        return TimingCache(self.options.timing_cache or None)

    def graph(self, model: onnx.ModelProto, precision: str) -> Graph:
        """Return a model's graph with stored dtypes decided."""
        builder = Builder(BuildConfig(precision=precision, timing=False))
        graph = builder.graph(model)
        return builder.stored(graph, dict.fromkeys(builder.edges(graph), RANGE))

    def plan(self, name: str, precision: str, target: str, opt_batch: int = 0, small: bool = False) -> Plan:
        """Build a plan. opt_batch: batch for which tactics are timed; 0: the cost model chooses them."""
        model = (SMALL if small else MODELS)[name]()
        most = CHECKED if small else max(self.options.batches)
        builder = Builder(BuildConfig(
            precision=precision, target=target, max_batch=most, opt_batch=min(opt_batch or most, most),
            timing=opt_batch > 0, timing_cache=self.options.timing_cache))
        graph = builder.graph(model)
        return builder.plan(graph, dict.fromkeys(builder.edges(graph), RANGE))

    def part(self, key: str) -> AbstractContextManager[None]:
        return self.results.part(key, self.options.part_seconds)

    def each(self, also: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
        for name in (*self.options.models, *also):
            for precision in self.options.precisions:
                yield name, precision


# ---- correctness
def right(bench: Bench) -> None:
    """Check a few problems of every family against their references, each in a process of its own."""
    from scripts.testing.gpu.cases import CASES
    names = [name for name in CASES if bench.options.match in name and bench.results.is_due(f"right: {name}")]
    if bench.options.emulated:
        for name in names:
            bench.results(f"right: {name}", checked(name, bench.options.emulated, bench.options.tactics))
        return
    with ThreadPoolExecutor(AT_ONCE) as threads:
        alone = partial(_alone, bench.options.tactics, bench.options.part_seconds)
        for name, result in zip(names, threads.map(alone, names), strict=True):
            bench.results(f"right: {name}", result)


def _alone(most: int | None, seconds: float, name: str) -> str:
    """Return the result of `checked` in a process of its own, or a description of how that process ended."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, name, most))
    process.start()
    sender.close()      # so that this process reads an end of file when the child ends
    try:
        if not receiver.poll(seconds):
            process.kill()
            return f"NO: no end after {seconds:g} s"
        return str(receiver.recv())
    except EOFError:
        process.join()
        return f"NO: its process ended with {process.exitcode}"
    finally:
        process.join()


def _answer(to: Connection, name: str, most: int | None) -> None:
    to.send(checked(name, "", most))


def checked(name: str, emulated: str, most: int | None) -> str:
    """Return "yes", or the reason why a problem's result is wrong.

    emulated: architecture of an emulated GPU, or "" for this machine's GPU. most: maximum number of tactics, or None
    for all.
    """
    from scripts.testing.gpu.cases import CASES
    from scripts.testing.gpu.runner import GpuRunner, Way, at_hand
    from scripts.testing.suite import check
    runner: Any = GpuRunner(GPUS[emulated]) if emulated else at_hand()
    case, tolerance = CASES[name]
    problem, inputs, constants = case()
    kernel = kernel_for(problem, runner.gpu, (256,) * len((*problem.inputs, *problem.outputs)))
    if kernel is None or kernel.refusal:
        return f"no kernel: {kernel and kernel.refusal}"
    tactics = list(kernel.tactics())[:most]
    for tactic in tactics:
        try:
            check(Way(kernel, tactic), runner, inputs, constants, tolerance)
        except Exception as error:      # from the comparison with the reference, or from the driver
            return f"NO, by {tactic}: {str(error)[:600]}"
    return f"yes, by {len(tactics)} tactics"


def networks(bench: Bench) -> None:
    """Check small networks against a plan for the CPU; integers must be byte-equal."""
    for name, precision in bench.each(bench.options.checked):
        if not bench.results.is_due(key := f"network: {name} {precision}"):
            continue
        with bench.part(key):
            model = SMALL[name]()
            feeds = feeds_for(model, CHECKED)
            theirs = Engine(bench.plan(name, precision, "", small=True)).run(feeds)
            outputs = Engine(bench.plan(name, precision, bench.target, small=True)).run(feeds)
            equal = all(np.array_equal(outputs[output], value) for output, value in theirs.items())
            error = max(np.abs(outputs[output] - value).max() / np.abs(value).max() for output, value in theirs.items())
            fine = equal if precision == "int8" else error < RELATIVE
            bench.results(key, f"{'yes' if fine else 'NO'}: bytes equal {equal}, largest error {error:.2e}")


# ---- speed
def peaks(bench: Bench) -> None:
    """Measure the card's peak rates of memory and products with our kernels, and list the cost model's assumptions."""
    device, card = bench.device, CARDS[bench.target]
    copied, side = (COPIED, SIDE) if not bench.options.emulated else (1 << 10, 64)
    with ScopedResources(device) as resources:
        a, b, stream = resources.allocate(copied), resources.allocate(copied), device.stream()
        resources.add(stream.close)
        copy = partial(stream.copy_rows, a, copied, b, copied, copied, 1)
        seconds = min(stream.seconds(copy) for _ in range(REPEATS))
        bench.results("peak: memory, TB/s", [round(2 * copied / max(seconds, 1e-9) / 1e12, 2), card.memory / 1e12])
    tuner = GpuTuner(device, GPUS[bench.target], bench.cache)
    for precision, stored in (("int8", "uint8"), ("fp16", "float16")):
        view = dense_view(stored, (1, side, side))
        problem = Contraction(view, view, (), EpilogueProgram(), precision, (1, 1))
        kernel = kernel_for(problem, GPUS[bench.target], (256, 256))
        assert kernel
        weights = np.zeros((side, side, 1, 1), np.int8 if precision == "int8" else np.float32)
        (tactic, seconds), = tuner.choose([TuningRequest(kernel, {"weights": weights, "program": []}, 1)], card)
        assumed = card.products[precision] * card.multiprocessors * card.hertz * card.grouped
        bench.results(f"peak: {precision}, TOP/s", [round(2 * side ** 3 / seconds / 1e12), round(2 * assumed / 1e12),
                                                   str(tactic)])


def speed(bench: Bench) -> None:
    """Measure items per second by batch, with tactics from the cost model and from timing, on the GPU and the host."""
    for name, precision in bench.each():
        for tuned in (0, *TUNED_FOR):
            how = f"tuned for {tuned}" if tuned else "by the model"
            if not bench.results.is_due(key := f"speed: {name} {precision} {how}"):
                continue
            with bench.part(key):
                plan = bench.plan(name, precision, bench.target, tuned)
                context = Engine(plan).create_context()
                for batch in bench.options.batches:
                    bench.results(f"{key}, batch {batch}", _speed(bench, context, batch))
                bench.results(key, plan.machine.cpu["expected"])
                context.close()


def _speed(bench: Bench, context: Any, batch: int) -> dict[str, float]:
    execution = context.execution
    assert isinstance(execution, CudaExecution)
    tensors = (*context.plan.inputs, *context.plan.outputs)
    with_copies = median(execution.seconds(batch) for _ in range(REPEATS))
    with ScopedResources(bench.device) as resources:
        for io in tensors:
            context.bind(io.name, _GpuBuffer(resources, io.shape_of(batch), io.dtype))
        alone = median(execution.seconds(batch) for _ in range(REPEATS))
        for io in tensors:
            context.bind(io.name, None)
    host = []
    for _ in range(1 if bench.options.emulated else REPEATS):
        begin = time.perf_counter()
        context.execute(batch)
        host.append(time.perf_counter() - begin)
    return {"items/s": round(batch / alone), "ms": round(alone * 1e3, 4), "ms with copies": round(with_copies * 1e3, 4),
            "ms for the host": round(median(host) * 1e3, 4)}


class _GpuBuffer:
    """Array of zeros on the GPU."""

    def __init__(self, resources: ScopedResources, shape: Sequence[int], dtype: str) -> None:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        self.__cuda_array_interface__ = {"shape": tuple(shape), "typestr": np.dtype(dtype).str, "strides": None,
                                         "data": (resources.allocate(size), False), "version": 3}


def steps(bench: Bench) -> None:
    """Report each step at the largest tuned batch: measured and estimated time, and shares of the assumed peaks."""
    batch = min(TUNED_FOR[-1], max(bench.options.batches))
    for name, precision in bench.each():
        if not bench.results.is_due(key := f"steps: {name} {precision}"):
            continue
        with bench.part(key):
            plan = bench.plan(name, precision, bench.target)
            session = CudaSession(bench.target, TimingCache())
            graph = bench.graph(MODELS[name](), precision)
            guesses = [node.time_us * batch for node in session.choose(graph, plan.max_batch, batch).times()]
            context = Engine(bench.plan(name, precision, bench.target, batch)).create_context()
            measured = [(step, seconds * 1e6) for step, seconds in context.profile(batch, 5)]
            rows = [[step.name, step.tactic, round(us, 1), round(guess, 1), _shares(bench, step, batch, us)]
                    for (step, us), guess in zip(measured, guesses, strict=True)]
            bench.results(key, {"sum, ms": round(sum(us for _, us in measured) / 1e3, 3),
                                "estimated": round(sum(guesses) / 1e3, 3),
                                "slowest": sorted(rows, key=lambda row: -row[2])[:SLOWEST]})
            context.close()


def _shares(bench: Bench, step: Any, batch: int, us: float) -> str:
    """Return the shares of the cost model's peak rates that a step reaches, as text."""
    card = CARDS[bench.target]
    macs = card.products.get(step.precision, 1) * card.multiprocessors * card.hertz
    return (f"{100 * step.macs * batch / macs / us * 1e6:.0f} % of mma, "
            f"{100 * step.bytes * batch / card.memory / us * 1e6:.0f} % of memory")


def measure_peers(bench: Bench) -> None:
    """Measure other runtimes on the same GPU."""
    if bench.options.emulated:
        return
    for target in TARGETS:
        tensorrt(bench, target)
    peers(bench.results, bench.options.models, bench.options.batches)


def tensorrt(bench: Bench, target: str) -> None:
    """Measure TensorRT on the same graphs, including copies from and to the host."""
    try:
        library(target)
    except LibraryMissing as missing:
        bench.results(target, str(missing))
        return
    for name, precision in bench.each():
        if not bench.results.is_due(key := f"{target}: {name} {precision}"):
            continue
        with bench.part(key):
            context = Engine(bench.plan(name, precision, target)).create_context()
            for batch in bench.options.batches:
                seconds = max(sum(each for _, each in context.profile(batch, REPEATS)), 1e-9)
                bench.results(f"{key}, batch {batch}", {"items/s": round(batch / seconds),
                                                        "ms with copies": round(seconds * 1e3, 4)})
            bench.results(key, context.plan.machine.cpu["model"])
            context.close()


STEPS: Mapping[str, Callable[[Bench], None]] = {
    "right": right, "networks": networks, "peaks": peaks, "speed": speed, "steps": steps, "beside": measure_peers}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return list(filter(None, text.split(",")))

    parser = argparse.ArgumentParser("benchmarks.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=names, default=list(STEPS), metavar="S,...", help=", ".join(STEPS))
    parser.add_argument("--models", type=names, default=["resnet50", "mobilenet_v2", "minilm"], metavar="M,...")
    parser.add_argument("--checked", type=names, default=["recogniser", "vit", "gru"], metavar="M,...",
                        help="networks that are compared with a CPU's beside those of --models, and not timed")
    parser.add_argument("--precisions", type=names, default=["int8", "fp16"], metavar="P,...")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")],
                        default=[1, 8, 32, 128, 256], metavar="N,...")
    parser.add_argument("--match", default="", help="of `right`, only cases with this in their name")
    parser.add_argument("--tactics", type=int, metavar="N", help="of `right`, so many of each kernel's; default: all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which nothing is begun")
    parser.add_argument("--part-seconds", type=float, default=300, metavar="S", help="after which a part is given up")
    parser.add_argument("--results", type=Path, metavar="FILE.json")
    parser.add_argument("--timing-cache", default="", metavar="FILE")
    parser.add_argument("--emulated", default="", metavar="sm_80", help="the GPU that the PTX machine plays")
    return parser.parse_args(arguments)


def lost(device: GpuDriver) -> bool:
    try:
        device.memory()
    except CudaError:
        return True
    return False


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    results = Findings(options.results, options.minutes)
    if options.emulated:
        from scripts.testing.gpu.emulated import EmulatedGpu, machine_with
        vars(DEVICE).update(machine_with(EmulatedGpu(options.emulated)))
    target = options.emulated or BACKEND.session("cuda", TimingCache(), timing=False).target
    bench = Bench(options, results, DEVICE.gpu, target)
    results("gpu", [bench.device.name, bench.device.architecture, target, bench.device.memory(), sys.version])
    results.lost = partial(lost, bench.device)
    for name in options.steps:
        with results.part(name):
            STEPS[name](bench)


if __name__ == "__main__":
    main()
