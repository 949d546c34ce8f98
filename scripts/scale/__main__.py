"""Run a check of several machines: `python -m scripts.scale CHECK [options]`."""
from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path


def checks() -> dict[str, str]:
    """Return {name: first line of its docstring} of the modules of this package without a leading underscore."""
    summaries = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        summaries[path.stem] = (ast.get_docstring(ast.parse(path.read_text())) or path.stem).splitlines()[0]
    return summaries


def main(arguments: Sequence[str]) -> int:
    """Run the check that the first argument names, and return its exit status. Other checks need not be installed."""
    listed = "\n".join(f"  {name:12} {line}" for name, line in checks().items())
    parser = argparse.ArgumentParser(prog="python -m scripts.scale", description=f"{__doc__}\n\nchecks:\n{listed}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=checks(), metavar="CHECK")
    name = parser.parse_args(arguments[:1]).check
    check = importlib.import_module(f"scripts.scale.{name}")
    options = argparse.ArgumentParser(prog=f"python -m scripts.scale {name}", description=check.__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
    check.add_arguments(options)
    status: int = check.run(options.parse_args(arguments[1:]))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
