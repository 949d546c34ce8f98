"""The field's workloads at full size: each built, compared with ONNX Runtime, and timed beside its peers at batch 1.

    python -m benchmarks.zoo resnet50 bert_large --int8                 # float32 and INT8
    python -m benchmarks.zoo --int8 --cache built --prepare             # all of them: build and compare, time nothing
    python -m benchmarks.zoo --int8 --cache built --write               # ... and then time what was built

One thread, each runtime in turn. In INT8 a peer runs our exported Q/DQ model, or the float32 one (and the row says so)
where that is faster: recurrent layers are unfolded in the former. Weights and inputs are seeded random
numbers, ranges those of four such inputs (minmax). Whatever is finished is kept in --cache, and in the table at once.
Needs the extra "bench".
"""
from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median, quantiles

from benchmarks.reports.document import Cell, machine, markdown_table, write_section
from benchmarks.runtimes.builds import sources_digest
from benchmarks.runtimes.runtimes import OPENVINO, ORT, OURS, versions
from benchmarks.zoo.trial import Facts, Folder
from benchmarks.zoo.workloads import WORKLOADS
from engines.errors import did_you_mean

PRECISIONS = ("fp32", "int8")
HEADER = ("model", "precision", "steps", "by reference, of the time", "error", "SQNR, dB", "ms", "ONNX Runtime",
          "OpenVINO", "turns", "build s")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.zoo", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--int8", action="store_true", help="in INT8, too")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keeps what was built; else a temporary folder")
    parser.add_argument("--prepare", action="store_true", help="build and compare, time nothing")
    parser.add_argument("--no-timing", action="store_true", help="choose tactics by cost: a fraction of the time")
    parser.add_argument("--seconds", type=float, default=6.0, help="of taking turns, for each row")
    parser.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS", help="of a build, at most")
    parser.add_argument("--write", action="store_true", help="the table into docs/benchmarks.md, row by row")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in WORKLOADS]:
        parser.error(f"there is no workload '{unknown[0]}'{did_you_mean(unknown[0], WORKLOADS)}")
    return options


def trial(verb: str, folder: Folder, name: str, precision: str, root: Path, limit: float, *more: object) -> None:
    """A part of a trial, in a process of its own; what ends it is a fact like others."""
    command = [sys.executable, "-m", "benchmarks.zoo.trial", verb, name, precision, root, *more]
    try:
        subprocess.run([*map(str, command)], check=True, timeout=limit, stdout=sys.stderr)
    except subprocess.TimeoutExpired:
        folder.write(Facts(name, precision, failure=f"not {verb}ed within {limit:.0f} s"))
    except subprocess.CalledProcessError as error:
        folder.write(Facts(name, precision, failure=f"{verb} ended with {error.returncode}"))


def row(facts: Facts) -> list[Cell]:
    if facts.failure:
        return [facts.name, facts.precision, "-", facts.failure, *["-"] * 7]
    reference = f"{100 * facts.reference_share:.1f} %: {', '.join(facts.operators)}" if facts.by_reference else "-"
    ours = facts.turns.get(OURS)
    spread = f"{median(ours):.3g} ({min(ours):.3g})" if ours else "-"
    return [facts.name, facts.precision, facts.steps, reference, f"{facts.error:.1e}", f"{facts.sqnr_db:.0f}", spread,
            *(ratio(facts, peer) for peer in (ORT, OPENVINO)), len(ours or ()) or "-",
            f"{facts.build_seconds:.0f}{', by cost' * facts.by_cost}"]


def ratio(facts: Facts, peer: str) -> str:
    """The peer's time over ours, turn by turn: the median and the quartiles."""
    if OURS not in facts.turns or peer not in facts.turns:
        return "failed" if peer in facts.notes else "-"
    kind = ", fp32" if (facts.precision, facts.notes.get(peer)) == ("int8", "fp32") else ""
    ratios = [a / b for a, b in zip(facts.turns[peer], facts.turns[OURS], strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f}{kind})"


def report(every: Sequence[Facts]) -> str:
    unit = next((facts.unit for facts in every if facts.unit), "")
    packages = ", ".join(f"{package} {number}" for package, number in versions().items())
    return (f"{machine()}; {packages}; one thread, batch 1. ms: the median of all turns (the least), "
            f"{unit or 'not timed'}; of the peers, their time over ours, median and quartiles turn by turn; "
            "fp32: faster so than by our Q/DQ model\n\n"
            + markdown_table(HEADER, [row(facts) for facts in every]))


def found(root: Path) -> list[Facts]:
    """All that the folder has, in the catalogue's order."""
    every = (Folder(root, name, precision).read() for name in WORKLOADS for precision in PRECISIONS)
    return [facts for facts in every if facts]


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    with nullcontext(options.cache) if options.cache else tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / sources_digest()
        root.mkdir(parents=True, exist_ok=True)
        for name in options.names or WORKLOADS:
            for precision in PRECISIONS[:1 + options.int8]:
                files = Folder(root, name, precision)
                if files.read() is None:
                    trial("build", files, name, precision, root, options.limit, *["by-cost"] * options.no_timing)
                known = files.read()
                if not options.prepare and known and not known.failure and not known.turns:
                    trial("time", files, name, precision, root, options.limit, options.seconds)
                if (known := files.read()):
                    print(*row(known), sep=" | ", flush=True)
                if options.write:
                    write_section("zoo", f"`python -m benchmarks.zoo --int8 --write`\n\n{report(found(root))}")


if __name__ == "__main__":
    main(sys.argv[1:])
