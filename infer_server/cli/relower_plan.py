"""relower-plan: compile the graph of a plan again for this machine, or time its tactics on a GPU.

infer-server runs this command for plans that were built on another machine.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from infer_server.cli.common import guarded
from infer_server.engines.compiler.engine_cache import EngineCache
from infer_server.engines.compiler.specialise import relower, retuned
from infer_server.engines.plan.file import read_plan, write_plan


def _command(options: argparse.Namespace) -> int:
    plan = read_plan(options.plan)
    if options.retune is None:
        result = relower(plan)
    else:
        result = retuned(plan, EngineCache(options.cache_dir or ""), options.retune)
    write_plan(result, options.output)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("relower-plan", description=__doc__)
    parser.add_argument("plan", help="plan file for any machine")
    parser.add_argument("-o", "--output", required=True, metavar="OUT.plan", help="plan file to write")
    parser.add_argument("--retune", type=int, metavar="GPU",
                        help="time the tactics of a GPU plan that was built without a GPU on this GPU")
    parser.add_argument("--cache-dir", metavar="DIR", help="folder of the engine cache, which keeps the times of "
                                                           "--retune")
    return guarded(_command, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
