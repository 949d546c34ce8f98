"""DeepBench's inference problems (benchmarks/deepbench.py) against OpenVINO and ONNX Runtime, on one thread.

    python -m benchmarks.ops --results ops.json --write                 # all of them, fp32 and INT8: hours
    python -m benchmarks.ops --results ops.json --write                 # again: resumes where it was interrupted
    python -m benchmarks.ops --class recurrent --match lstm --precision int8 --minutes 20

Each problem is a model of one node. Its builds are those of benchmarks.peers; the fastest of each runtime counts,
and they take turns in one process. Their outputs are compared with ONNX Runtime's in float32. Problems with the least
work come first, so that --minutes measures as many as possible. --results stores every case when it is measured;
stored cases are not measured again. Needs the extra "bench".
"""
from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.deepbench import CLASSES, Problem, problems
from benchmarks.measure.accuracy import MIN_COSINE
from benchmarks.measure.cases import Bench
from benchmarks.measure.cycles import Counter
from benchmarks.measure.results import Case, read_results, write_results
from benchmarks.models import Model
from benchmarks.reports.document import PAGES, write_section
from benchmarks.reports.ops_report import every_case, report, worklist
from benchmarks.runtimes.builds import Workshop

MIN_TURNS = 3           # since a call may take many seconds
EVERY_CASE = PAGES / "operators.md"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    def choice(*known: str) -> Callable[[str], list[str]]:
        def chosen(text: str) -> list[str]:
            if unknown := set(text.split(",")) - set(known):
                raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")
            return text.split(",")
        return chosen

    parser = argparse.ArgumentParser("benchmarks.ops", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--class", dest="classes", type=choice(*CLASSES), default=list(CLASSES), metavar="C,...",
                        help=", ".join(CLASSES))
    parser.add_argument("--precision", type=choice(*MIN_COSINE), default=["fp32", "int8"], metavar="P,...",
                        help=", ".join(MIN_COSINE))
    parser.add_argument("--match", default="", metavar="TEXT", help="only problems with this in their name")
    parser.add_argument("--seconds", type=float, default=2.0, help="of taking turns, for each case, at least")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no case is begun")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="add to these results, skip what they have")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keeps what was built, some 80 GB of all problems")
    parser.add_argument("--list", action="store_true", help="the names of the chosen problems, nothing else")
    parser.add_argument("--write", action="store_true", help="the report into docs/benchmarks")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[tuple[Problem, str]]:
    """Return the problems and precisions that the options select, least effort first."""
    return [(problem, precision) for problem in problems() for precision in options.precision
            if problem.kind in options.classes and options.match in problem.name]


def measured(problem: Problem, precision: str, folder: Path, counter: Counter, seconds: float) -> Case:
    source, data = problem.write(folder)
    model = Model(source, str(data))
    bench = Bench(model, precision, Workshop(folder, log).builds(model, precision), log)
    return bench.case(1, 1, counter, seconds, {}, MIN_TURNS, screened=True)


def measure(options: argparse.Namespace, counter: Counter, known: Sequence[Case]) -> Iterator[Case]:
    """Measure the selected cases that are not in `known`, until the time limit."""
    have = {(case.model, case.precision) for case in known}
    missing = [pair for pair in chosen(options) if (pair[0].name, pair[1]) not in have]
    end = time.monotonic() + 60 * options.minutes
    for i, (problem, precision) in enumerate(missing):
        if time.monotonic() >= end:
            log(f"the time is over: {len(missing) - i} of {len(missing)} cases are left")
            return
        log(f"{i + 1} of {len(missing)}: {problem.name}, {precision}")
        with tempfile.TemporaryDirectory() as folder:
            yield measured(problem, precision, options.cache or Path(folder), counter, options.seconds)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    if options.list:
        print(*(f"{problem.name}, {precision}" for problem, precision in chosen(options)), sep="\n")
        return
    counter = Counter()         # before any runtime makes threads
    cases = read_results(options.results) if options.results and options.results.exists() else []
    for case in measure(options, counter, cases):
        cases.append(case)
        if options.results:
            cases = write_results(options.results, cases)
    text = report(cases)
    print(text)
    if options.write:
        write_section("ops", f"`python -m benchmarks.ops --write`\n\n{text}")
        write_section("slower", worklist(cases), EVERY_CASE)
        write_section("ops-cases", every_case(cases), EVERY_CASE)


if __name__ == "__main__":
    main(sys.argv[1:])
