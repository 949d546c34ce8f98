"""Inference against OpenVINO and ONNX Runtime, each by its fastest build of the model (benchmarks/runtimes/builds.py).

    python -m benchmarks.peers mobilenet_v2 resnet50                    # of benchmarks/zoo: INT8, batch 1, one thread
    python -m benchmarks.peers m.onnx --calib photos/ --batch 1,8 --threads 1,2 --precision int8,bf16,fp32 --write
    python -m benchmarks.peers a.onnx b.onnx --calib a=a.npz --calib b=calib.py:items --cache built --prepare

All runtimes take turns in one process: one thread is measured in user-mode cycles where the machine counts them, else
in CPU time; several threads in wall time. Every build's outputs are compared with ONNX Runtime's in
float32. An option with MODEL= is for the model of that name (its file's, without .onnx), one without for all. Needs the
extra "bench".
"""
from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks import peaks
from benchmarks.measure.accuracy import MIN_COSINE, load_judge
from benchmarks.measure.cases import Bench
from benchmarks.measure.cycles import Counter
from benchmarks.measure.results import Case, write_results
from benchmarks.models import Model, random_pictures, source_of
from benchmarks.reports.chart import write_chart
from benchmarks.reports.document import PAGES, write_section
from benchmarks.reports.picture import write_summary
from benchmarks.reports.report import every_build, overview, report
from benchmarks.runtimes.builds import Workshop

PRECISIONS = tuple(MIN_COSINE)
FOLDERS = re.compile(r"[^\s=]*/")       # folders of paths in the command, removed as they mean nothing elsewhere


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def precisions(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(PRECISIONS):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(PRECISIONS)}")
        return text.split(",")

    parser = argparse.ArgumentParser("benchmarks.peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name of benchmarks/zoo, or an ONNX file")
    parser.add_argument("--precision", type=precisions, default=["int8"], metavar="P,...", help=", ".join(PRECISIONS))
    parser.add_argument("--batch", type=numbers, default=[1], metavar="N,...")
    parser.add_argument("--threads", type=numbers, default=[1], metavar="N,...")
    for option, value, text in (
            ("--calib", "PATH", "as build-engine's, and what is timed; without it, random pictures"),
            ("--preprocess", "FILE|PRESET", "as build-engine's"), ("--shape", "NAME:1x3x224x224", "as build-engine's"),
            ("--accuracy", "FILE.py", "a script with evaluation() and metric(): see benchmarks/measure/accuracy.py")):
        parser.add_argument(option, metavar=f"[MODEL=]{value}", help=text, action="append", default=[])
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keeps what was built; else a temporary folder")
    parser.add_argument("--prepare", action="store_true", help="build into --cache, measure nothing")
    parser.add_argument("--seconds", type=float, default=10.0, help="of taking turns, for each case")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="add to these results, report them all")
    parser.add_argument("--write", nargs="?", const="peers", metavar="NAME",
                        help="the report into docs/benchmarks/one-inference.md as a section of that name, with "
                             "a chart NAME.png, every build into NAME-builds.md, the ratios into results/NAME.json; "
                             "peers-OTHER for another machine's")
    options = parser.parse_args(arguments)
    if options.prepare and not options.cache:
        parser.error("--prepare needs --cache: what is built into a temporary folder goes with it")
    return options


def chosen(values: Sequence[str], model: str) -> list[str]:
    """Return the values of [MODEL=]VALUE options for a model: its own if there are any, else those for all models."""
    own = [value.removeprefix(f"{model}=") for value in values if value.startswith(f"{model}=")]
    return own or [value for value in values if "=" not in value]


def models(options: argparse.Namespace, folder: Path) -> list[Model]:
    result = []
    for argument in options.models:
        source = source_of(argument, folder / "zoo")
        calibration, preprocess, accuracy = (
            next(iter(chosen(values, source.stem)), "")
            for values in (options.calib, options.preprocess, options.accuracy))
        result.append(Model(source, calibration or str(random_pictures(source, folder / "zoo")), preprocess,
                            tuple(chosen(options.shape, source.stem)), Path(accuracy) if accuracy else None))
    return result


def measure(options: argparse.Namespace, counter: Counter, folder: Path) -> list[Case]:
    workshop, cases = Workshop(folder, log), []
    for model in models(options, folder):
        for precision in options.precision:
            bench = Bench(model, precision, workshop.builds(model, precision), log)
            if options.prepare:
                continue
            metrics = bench.metrics(load_judge(model.accuracy)) if model.accuracy else {}
            for batch in options.batch if model.batched else [1]:
                for threads in options.threads:
                    log(f"{model.name}, {precision}, batch {batch}, threads {threads}")
                    cases.append(bench.case(batch, threads, counter, options.seconds, metrics))
    return cases


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    counter = Counter()         # before any runtime makes threads
    with nullcontext(options.cache) if options.cache else tempfile.TemporaryDirectory() as folder:
        cases = measure(options, counter, Path(folder))
    if options.prepare:
        return
    if options.results:
        cases = write_results(options.results, cases)
    text, roof = report(cases), peaks.section(counter)
    print(f"{text}\n\n{roof}")
    if options.write:
        chart = PAGES / f"{options.write}.png"
        write_chart(cases, chart)
        command = " ".join(["python -m benchmarks.peers", *(FOLDERS.sub("", argument) for argument in arguments)])
        earlier = ", and what earlier runs added to the same results" if options.results else ""
        write_section(options.write, f"`{command}`{earlier}\n\n![{chart.stem}]({chart.name})\n\n{overview(cases)}")
        write_section(f"{options.write}-builds", every_build(cases), PAGES / f"{options.write}-builds.md")
        write_summary(cases, command, PAGES / "results" / f"{options.write}.json")
        write_section(peaks.SECTION + options.write.removeprefix("peers"), roof)


if __name__ == "__main__":
    main(sys.argv[1:])
