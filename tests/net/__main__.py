"""Test thousands of random graphs.

    python -m tests.net [--family NAME ...] [--examples N] [--seed S] [--keep-going]

Ends with status 1 after the first family with a fault, which is shrunk and printed with its model and inputs; prints
the refusals by message at the end.
"""
from __future__ import annotations

import argparse
import faulthandler
import signal
import sys
import traceback
import warnings

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.net.check import check, seen
from tests.net.strategies import NAMES, cases

SECONDS = 60            # time limit of a case; longer means a hang


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.net", description=__doc__)
    parser.add_argument("--family", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--examples", type=int, default=500, help="of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-going", action="store_true", help="go on with the next family after a fault")
    options = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("error")
    signal.signal(signal.SIGALRM, _hangs)
    faults = 0
    for family in options.family:
        faults += not _run(family, options.examples, options.seed)
        if faults and not options.keep_going:
            break
    _report()
    return min(faults, 1)


def _run(family: str, examples: int, number: int) -> bool:
    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck),
              print_blob=False, phases=[Phase.generate, Phase.shrink])
    @given(cases(family))
    def search(case: object) -> None:
        signal.alarm(SECONDS)
        try:
            check(case)     # type: ignore[arg-type]
        finally:
            signal.alarm(0)

    before = seen["right"]
    try:
        search()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        for each in getattr(error, "exceptions", [error]):
            cause = each.__cause__ or each
            where = traceback.extract_tb(cause.__traceback__)[-1]
            print(f"{type(each).__name__}: {each}\n({type(cause).__name__} at {where.filename}:{where.lineno})",
                  *getattr(each, "__notes__", ()), sep="\n")
        print(f"FAULT in {family}: python -m tests.net --family {family} --examples {examples} --seed {number}")
        return False
    print(f"{family}: {seen['right'] - before} right")
    return True


def _hangs(signum: int, frame: object) -> None:
    raise TimeoutError(f"a case took more than {SECONDS} s")


def _report() -> None:
    for what, count in seen.most_common():
        print(f"{count:6} {what}")


if __name__ == "__main__":
    sys.exit(main())
