"""relower-plan: compile the graph in a plan again for this machine; infer-server runs it for a plan made elsewhere."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from engines.compiler.specialise import relower
from engines.plan.file import read_plan, write_plan
from infer_server.cli.common import guarded


def _command(options: argparse.Namespace) -> int:
    write_plan(relower(read_plan(options.plan)), options.output)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("relower-plan", description=__doc__)
    parser.add_argument("plan", help="a plan file, made for any machine")
    parser.add_argument("-o", "--output", required=True, metavar="OUT.plan", help="the plan file to write")
    return guarded(_command, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
