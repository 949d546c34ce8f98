"""Benchmark of the field's workloads at full size: each is built, compared with ONNX Runtime, and timed at batch 1.

    python -m benchmarks.zoo resnet50 bert_large --int8                 # float32 and INT8
    python -m benchmarks.zoo --int8 --cache built --prepare             # all of them: build and compare, time nothing
    python -m benchmarks.zoo --int8 --cache built --write               # ... and then time the builds
    python -m benchmarks.zoo unet3d --cache built --beside OpenVINO --turns 1       # for inferences of a minute

One thread; our plan and one build of a peer take turns. In INT8 a peer runs our exported Q/DQ model and the float32
one, and the faster time counts; a row notes if that is float32, since exported recurrent layers are unrolled. Weights
and inputs are seeded random numbers, ranges those of four such inputs (minmax). Each result is stored in --cache and in
the table at once; failures, and parts that took longer than --limit, are tried again. Needs the extra "bench".
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
from benchmarks.runtimes.runtimes import versions
from benchmarks.zoo.trial import BUILDS, FLOAT, PEERS, Facts, Folder, PeerTimes
from benchmarks.zoo.workloads import WORKLOADS
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.errors import did_you_mean

PRECISIONS = tuple(BUILDS)
MIN_TURNS = 3
HEADER = ("model", "precision", "steps", "by reference, of the time", "error", "SQNR, dB", "ms", *PEERS,
          "turns", "build s")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.zoo", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--int8", action="store_true", help="in INT8, too")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keeps what was built; else a temporary folder")
    parser.add_argument("--prepare", action="store_true", help="build and compare, time nothing")
    parser.add_argument("--no-timing", action="store_true", help="choose tactics by cost: a fraction of the time")
    parser.add_argument("--beside", choices=PEERS, action="append", help="time this peer only; again for another")
    parser.add_argument("--seconds", type=float, default=3.0, help="of taking turns, for each build of a peer")
    parser.add_argument("--turns", type=int, default=MIN_TURNS, metavar="N", help="at least, whatever --seconds is")
    parser.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS",
                        help="of a build, and of timing one build of a peer")
    parser.add_argument("--write", action="store_true", help="the table into docs/benchmarks, row by row")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in WORKLOADS]:
        parser.error(f"there is no workload '{unknown[0]}'{did_you_mean(unknown[0], WORKLOADS)}")
    return options


def trial(verb: str, folder: Folder, limit: float, *arguments: object) -> str:
    """Run a part of a trial in its own process, and return the reason for a failure, or ""."""
    command = ("-m", "benchmarks.zoo.trial", verb, folder.name, folder.precision, folder.root, *arguments)
    try:
        subprocess.run([sys.executable, *map(str, command)], check=True, timeout=limit, stdout=sys.stderr)
    except subprocess.TimeoutExpired:
        return f"not {verb} within {limit:.0f} s"
    except subprocess.CalledProcessError as error:
        return f"ended with {error.returncode}"
    return ""


def build(folder: Folder, options: argparse.Namespace) -> Facts:
    """Return the facts of a plan, which is built first if there is none."""
    facts = folder.read()
    if facts is None or facts.failure:
        if why := trial("built", folder, options.limit, *["by-cost"] * options.no_timing):
            folder.write(Facts(folder.name, folder.precision, failure=why))
        facts = folder.read()
    assert facts is not None
    return facts


def time(folder: Folder, facts: Facts, options: argparse.Namespace) -> Facts:
    """Measure the missing times against the peers, and return the facts with them."""
    for peer in options.beside or PEERS:
        for kind in BUILDS[folder.precision]:
            known = facts.beside.get(peer, {}).get(kind)
            if known is None or known.failure:
                if why := trial("timed", folder, options.limit, peer, kind, options.seconds, options.turns):
                    folder.write(facts.timed(peer, kind, PeerTimes(failure=why)))
                facts = folder.read() or facts
    return facts


def row(facts: Facts) -> list[Cell]:
    if facts.failure:
        return [facts.name, facts.precision, "-", facts.failure, *["-"] * (len(HEADER) - 4)]
    reference = f"{100 * facts.reference_share:.1f} %: {', '.join(facts.operators)}" if facts.by_reference else "-"
    chosen = [fastest(facts, peer) for peer in PEERS]
    ours = [cost for times in chosen for cost in times.ours]
    spread = f"{median(ours):.3g} ({min(ours):.3g})" if ours else "-"
    turns = ", ".join(str(len(times.ours) or "-") for times in chosen) if ours else "-"
    return [facts.name, facts.precision, facts.steps, reference, f"{facts.error:.1e}", f"{facts.sqnr_db:.0f}", spread,
            *(ratio(facts, peer) for peer in PEERS), turns, f"{facts.build_seconds:.0f}{', by cost' * facts.by_cost}"]


def fastest(facts: Facts, peer: str) -> PeerTimes:
    """Return the times of the peer's build with the least median ratio to ours; empty if none was timed."""
    finished = [times for times in facts.beside.get(peer, {}).values() if times.ours]
    return min(finished, key=lambda times: median(times.ratios), default=PeerTimes())


def ratio(facts: Facts, peer: str) -> str:
    """Return the median and quartiles of the peer's time over ours in each turn, and the builds that failed."""
    builds, best = facts.beside.get(peer, {}), fastest(facts, peer)
    failures = "; ".join(f"{kind}: {times.failure}" for kind, times in builds.items() if times.failure)
    if not best.ours:
        return failures or ("not asked for" if facts.beside else "-")
    low, middle, high = quantiles(best.ratios, n=4, method="inclusive") if best.ratios[1:] else best.ratios * 3
    remarks = [f"{low:.2f} to {high:.2f}"] if best.ratios[1:] else []
    if facts.precision == "int8" and best == builds.get(FLOAT):
        remarks.append(FLOAT)
    return f"{middle:.2f}" + f" ({', '.join(remarks)})" * bool(remarks) + f"; {failures}" * bool(failures)


def report(every: Sequence[Facts]) -> str:
    unit, target = next((facts.unit for facts in every if facts.unit), "not timed"), Builder(BuildConfig()).target
    packages = ", ".join(f"{package} {number}" for package, number in versions().items())
    return (f"{machine()}, kernels for {target}; {packages}; one thread, batch 1. ms: the median of all turns (the "
            f"least), {unit}; of the peers, their time over ours, median and quartiles turn by turn, or why there is "
            "none; fp32: faster so than by our Q/DQ model; turns: beside the one peer, the other\n\n"
            + markdown_table(HEADER, [row(facts) for facts in every]))


def read_all(root: Path) -> list[Facts]:
    """Return all results in the folder, in the catalogue's order."""
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
                facts = build(files, options)
                if not options.prepare and not facts.failure:
                    facts = time(files, facts, options)
                print(*row(facts), sep=" | ", flush=True)
                if options.write:
                    write_section(f"zoo {Builder(BuildConfig()).target}",
                                  f"`python -m benchmarks.zoo --int8 --write`\n\n{report(read_all(root))}")


if __name__ == "__main__":
    main(sys.argv[1:])
