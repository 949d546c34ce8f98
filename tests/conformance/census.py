"""Counts of ONNX's own tests of tensors that pass, and that run without a step by reference.

    python -m tests.conformance.census                          # counts, and what runs by reference, by operator
    python -m tests.conformance.census --match "test_reduce*"
    python -m tests.conformance.census --write                  # the counts into docs/benchmarks/operators.md
    python -m tests.conformance.census --target sm_80           # on the emulated GPU, where nothing runs by reference
"""
import argparse
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from benchmarks.reports.document import markdown_table, write_section
from infer_server.engines.errors import CompilerFault, EngineError
from scripts.testing.gpu.emulated import EmulatedGpu, install
from tests.conformance.cases import cases, close, is_about_tensors, listed, model_of, run

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "operators.md"
COMPILED, REFERENCE, RANDOM, REFUSED, WRONG = (
    "compiled whole", "with steps by reference", "random: right in type and shape", "refused", "wrong")
PASSING = (COMPILED, REFERENCE, RANDOM)


@dataclass(frozen=True)
class Verdict:
    """Result of a test. by_reference: (operator, reason) of each step without a kernel; reason: why it fails."""
    outcome: str
    by_reference: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    reason: str = ""


def judged(name: str, target: str = "") -> Verdict:
    """Return the verdict of a test. target: an architecture of GPUs, or "" for this machine."""
    entry = listed(name)
    random = entry is not None and entry.outcome == "random"
    try:
        with pytest.MonkeyPatch.context() as patch:
            if target:
                install(patch, EmulatedGpu(target))
            made = run(name, (lambda *_: None) if random else close, target=target)
    except (CompilerFault, AssertionError) as error:
        if entry is not None and entry.outcome == "runtimes" and isinstance(error, AssertionError):
            return Verdict(REFUSED, reason=entry.reason)
        return Verdict(WRONG, reason=f"{type(error).__name__}: {error}".strip().splitlines()[0])
    except EngineError as error:
        return Verdict(REFUSED, reason=entry.reason if entry else str(error))
    plans = [one for plan in made for one in plan.within()]
    steps = frozenset((str(step.fallback.node["op"]), step.reason) for plan in plans
                      for step in plan.machine.steps if step.fallback)
    steps |= {(op, "the host evaluates it") for plan in plans if plan.program
              for op in plan.program.main.host_operators()}
    return Verdict(RANDOM if random else REFERENCE if steps else COMPILED, steps)


def census(match: str = "*", target: str = "") -> dict[str, Verdict]:
    """Return the verdicts by name of the test."""
    return {name: judged(name, target) for name, case in cases().items()
            if fnmatchcase(name, match) and is_about_tensors(model_of(case))}


def counts(verdicts: dict[str, Verdict]) -> str:
    """Return the section of docs/benchmarks/operators.md: the counts, and the families that do not pass."""
    found, total = Counter(verdict.outcome for verdict in verdicts.values()), len(verdicts)
    passing = sum(found[outcome] for outcome in PASSING)
    rows = [("pass", passing), *((f"... {outcome}", found[outcome]) for outcome in PASSING),
            ("all tests of tensors", total)]
    refused = Counter(verdict.reason for name, verdict in verdicts.items()
                      if verdict.outcome not in PASSING and listed(name))
    return "\n\n".join((
        markdown_table(("tests", "number", "share"),
                       [(what, count, f"{100 * count / max(total, 1):.1f} %") for what, count in rows]),
        markdown_table(("why others do not pass", "number"), refused.most_common())))


def by_operator(verdicts: dict[str, Verdict]) -> str:
    """List the operators that run by reference with the reason, the number of tests, and two of the tests."""
    tests: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, verdict in verdicts.items():
        for step in verdict.by_reference:
            tests[step].append(name)
    return "\n".join(f"{len(names):4} {op}: {reason} ({', '.join(names[:2])})"
                     for (op, reason), names in sorted(tests.items(), key=lambda item: (-len(item[1]), item[0])))


def main() -> None:
    parser = argparse.ArgumentParser("tests.conformance.census", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="*", metavar="PATTERN", help="only tests of such names")
    parser.add_argument("--target", default="", metavar="SM", help="an architecture of GPUs, which is emulated")
    parser.add_argument("--write", action="store_true", help="the counts into docs/benchmarks/operators.md")
    options = parser.parse_args()
    verdicts = census(options.match, options.target)
    print(counts(verdicts), by_operator(verdicts), sep="\n\n")
    for name, verdict in verdicts.items():
        if verdict.outcome == WRONG or verdict.outcome == REFUSED and not listed(name):
            print(f"{name}: {verdict.reason}")
    if options.write:
        write_section("conformance", counts(verdicts), DOCUMENT)


if __name__ == "__main__":
    main()
