"""One inference against OpenVINO and ONNX Runtime, one thread each, by the work that it takes.

    python -m benchmarks.peers                                        # ResNet-50, INT8, batch 1
    python -m benchmarks.peers --model mobilenet_v2 --precision fp32 --batch 8 --write

For INT8 the peers run the Q/DQ model that build-engine exports: the same weights, the same ranges. The runtimes take
turns in one process, and each is judged by its best one, in user-mode cycles (benchmarks/cycles.py). It needs the
extra "bench".
"""
from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.cycles import Counter, interleaved
from benchmarks.document import Cell, machine, markdown_table, write_section
from benchmarks.models import build, source_of
from engines import load_engine
from engines.ir import Array

OURS = "infer-server"


def ours(plan: Path, x: Array) -> Callable[[], object]:
    engine = load_engine(plan)
    context = engine.create_context()
    context.input(engine.inputs[0].name, len(x))[...] = x
    return lambda: context.execute(len(x))


def onnx_runtime(model: Path, x: Array) -> Callable[[], object]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x}
    return lambda: session.run(None, feed)


def openvino(model: Path, x: Array, precision: str) -> Callable[[], object]:
    import openvino as ov

    core = ov.Core()
    hints: dict[str, object] = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    if precision == "fp32":
        hints["INFERENCE_PRECISION_HINT"] = "f32"       # else it takes bf16 where the CPU has it
    network = core.read_model(model)
    network.reshape({network.inputs[0].any_name: list(x.shape)})
    request = core.compile_model(network, "CPU", hints).create_infer_request()
    request.set_input_tensor(ov.Tensor(np.ascontiguousarray(x)))
    return lambda: request.infer()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", metavar="NAME|FILE", help="of tests/zoo, or an ONNX file")
    parser.add_argument("--precision", default="int8", choices=("int8", "fp32"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="of taking turns")
    parser.add_argument("--repeats", type=int, default=3, help="of the whole measurement, for its spread")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args(arguments)
    options.arguments = arguments
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    counter = Counter()            # before any runtime makes threads
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source, plan = source_of(options.model, folder), folder / "model.plan"
        int8 = options.precision == "int8"
        model = folder / "qdq.onnx" if int8 else source
        build(source, plan, options.precision, options.batch, *(("--export-qdq", model) if int8 else ()))
        tensor = load_engine(plan).inputs[0]
        shape = [options.batch if isinstance(extent, str) else extent for extent in tensor.shape]
        x = np.random.default_rng(0).standard_normal(shape).astype(tensor.dtype)
        calls = {OURS: ours(plan, x), "OpenVINO": openvino(model, x, options.precision),
                 "ONNX Runtime": onnx_runtime(model, x)}
        rounds = [interleaved(counter, calls, options.seconds / options.repeats) for _ in range(options.repeats)]
    text = section(rounds, counter.unit, options)
    print(text)
    if options.write:
        write_section(f"peers {Path(options.model).stem} {options.precision} batch {options.batch}", text)


def section(rounds: list[dict[str, int]], unit: str, options: argparse.Namespace) -> str:
    """The result as a section of docs/benchmarks.md: the best of all rounds, and the spread of the rounds' ratios."""
    rows: list[list[Cell]] = []
    for name in rounds[0]:
        ratios = sorted(counts[name] / counts[OURS] for counts in rounds)
        rows.append([name, min(counts[name] for counts in rounds) / 1e6, f"{ratios[0]:.2f} to {ratios[-1]:.2f}"])
    command = " ".join(["python -m benchmarks.peers", *options.arguments])
    return (f"## One inference: {Path(options.model).stem}, {options.precision}, batch {options.batch}, one thread\n\n"
            f"`{command}`\n\nOn {machine()}; {options.repeats} rounds.\n\n"
            + markdown_table(["runtime", f"million {unit}", f"times {OURS}"], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
