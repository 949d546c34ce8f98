"""Run a check of several machines: `python -m scripts.scale CHECK [options]`."""
from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

from scripts import scale


def checks() -> list[str]:
    """Return the names of the checks: modules of this package without a leading underscore."""
    return sorted(module.name for module in pkgutil.iter_modules(scale.__path__) if not module.name.startswith("_"))


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run the check that it names, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.scale", description=__doc__)
    commands = parser.add_subparsers(dest="check", required=True, metavar="CHECK")
    for name in checks():
        module = importlib.import_module(f"{scale.__name__}.{name}")
        described = commands.add_parser(name, help=(module.__doc__ or name).splitlines()[0], description=module.__doc__)
        module.add_arguments(described)
        described.set_defaults(run=module.run)
    chosen = parser.parse_args(arguments)
    return chosen.run(chosen)


if __name__ == "__main__":
    sys.exit(main())
