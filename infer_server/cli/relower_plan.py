"""relower-plan: compile the graph in a plan again for this machine, or with tactics that are timed on a GPU of it;
infer-server runs it for a plan made elsewhere."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from engines.compiler.engine_cache import EngineCache
from engines.compiler.specialise import relower, retuned
from engines.plan.file import read_plan, write_plan
from infer_server.cli.common import guarded


def _command(options: argparse.Namespace) -> int:
    plan = read_plan(options.plan)
    if options.retune is None:
        made = relower(plan)
    else:
        made = retuned(plan, EngineCache(options.cache_dir or ""), options.retune)
    write_plan(made, options.output)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("relower-plan", description=__doc__)
    parser.add_argument("plan", help="a plan file, made for any machine")
    parser.add_argument("-o", "--output", required=True, metavar="OUT.plan", help="the plan file to write")
    parser.add_argument("--retune", type=int, metavar="GPU",
                        help="of a plan for a GPU that was built without one: time its tactics on this one")
    parser.add_argument("--cache-dir", metavar="DIR", help="the engine cache, where what --retune finds is kept")
    return guarded(_command, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
