"""relower-plan: compile the graph of a plan again for this machine, or time its tactics on a GPU.

infer-server runs this command for plans that were built on another machine. The engine cache keeps the result.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from infer_server.cli.common import add_plan_store, guarded, plan_store_log, plan_store_of
from infer_server.engines.compiler.engine_cache import EngineCache, usual_folder
from infer_server.engines.compiler.specialise import relowered, retuned
from infer_server.engines.plan.file import read_plan, write_plan


def _command(options: argparse.Namespace) -> int:
    plan = read_plan(options.plan)
    cache = EngineCache(options.cache_dir or "", plan_store=plan_store_of(options))
    with plan_store_log():
        result = relowered(plan, cache) if options.retune is None else retuned(plan, cache, options.retune)
    write_plan(result, options.output)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("relower-plan", description=__doc__)
    parser.add_argument("plan", help="plan file for any machine")
    parser.add_argument("-o", "--output", required=True, metavar="OUT.plan", help="plan file to write")
    parser.add_argument("--retune", type=int, metavar="GPU",
                        help="time the tactics of a GPU plan that was built without a GPU on this GPU")
    parser.add_argument("--cache-dir", metavar="DIR",
                        help=f"folder of the engine cache, which keeps the result (default {usual_folder()})")
    add_plan_store(parser)
    return guarded(_command, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
