"""The commands as one program, and completion of their options in a shell.

    python -m infer_server --help                       the commands, with an example of each
    python -m infer_server build-engine --help          as build-engine --help
    python -m infer_server completion bash              a script that completes the commands in bash
"""
from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from infer_server.process import imported


@dataclass(frozen=True)
class Command:
    """An installed command: what runs it and what makes its parser, as "module:function", and its line of help."""
    main: str
    parser: str
    summary: str
    example: str


COMMANDS = {
    "build-engine": Command(
        "infer_server.cli.build_engine:main", "infer_server.cli.build_engine:make_parser",
        "compile an ONNX model into an engine plan for this machine",
        "build-engine resnet50.onnx --int8 --calib photos/ -o models/resnet50/1/model.plan"),
    "inspect-engine": Command(
        "infer_server.cli.inspect_engine:main", "infer_server.cli.inspect_engine:make_parser",
        "show the kernels of a plan, with their times",
        "inspect-engine models/resnet50/1/model.plan --profile"),
    "run-engine": Command(
        "infer_server.cli.run_engine:main", "infer_server.cli.run_engine:make_parser",
        "measure the throughput and the latency of a plan",
        "run-engine models/resnet50/1/model.plan --batch 8 --threads 2"),
    "compare-engine": Command(
        "infer_server.comparing.cli:main", "infer_server.comparing.cli:make_parser",
        "compare a plan or an ONNX file with another, output by output and layer by layer",
        "compare-engine int8.plan fp32.plan --data photos/"),
    "reduce-model": Command(
        "infer_server.reducing.cli:main", "infer_server.reducing.cli:make_parser",
        "cut a failing model to the smallest part that still fails",
        "reduce-model model.onnx -o reduced.onnx --precision fp16"),
    "infer-server": Command(
        "infer_server.cli.serve:main", "infer_server.cli.serve:_parser",
        "serve a folder of models over gRPC and HTTP",
        "infer-server --model-repository models"),
    "load-test": Command(
        "infer_server.clients.load.cli:main", "infer_server.clients.load.arguments:make_parser",
        "measure how fast a server answers",
        "load-test -m resnet50 -u localhost:8001 --concurrency 1,4,16"),
    "score": Command(
        "infer_server.batch.cli:main", "infer_server.batch.cli:make_parser",
        "run a plan on a folder of images, arrays or Parquet files",
        "score models/resnet50/1/model.plan photos/ -o scores/ --top-k 5"),
    "plan-capacity": Command(
        "infer_server.fleet.cli:main", "infer_server.fleet.cli:make_parser",
        "find how many servers hold a rate and a latency",
        "plan-capacity models/resnet50/1/model.plan --rate 2000 --p99 100 --plot capacity.png")}
SHELLS = ("bash", "zsh", "fish")
# Metavariables of options that take a path.
_FILE, _FOLDER = re.compile(r"FILE|PATH|\.plan|\.npz"), re.compile(r"DIR|FOLDER")


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return a new parser of a command."""
    make: Callable[[], argparse.ArgumentParser] = resolve_name(COMMANDS[command].parser)
    return make()


def completion(shell: str) -> str:
    """Return a script that completes all commands in a shell. Raises SystemExit if shtab is not installed."""
    try:
        import shtab
    except ImportError:
        raise SystemExit("completion needs shtab: pip install 'infer-server[completion]'") from None
    parsers = list(map(parser_of, COMMANDS))
    for action in (action for parser in parsers for action in parser._actions):
        metavar = action.metavar[0] if isinstance(action.metavar, tuple) else action.metavar or ""
        if not action.option_strings or _FILE.search(metavar):
            action.complete = shtab.FILE            # type: ignore[attr-defined]
        elif _FOLDER.search(metavar):
            action.complete = shtab.DIRECTORY       # type: ignore[attr-defined]
    return "\n".join(shtab.complete(parser, shell) for parser in parsers)


def make_parser() -> argparse.ArgumentParser:
    from infer_server.protos.version import VERSION
    lines = [f"  {name:16}{command.summary}\n      {command.example}" for name, command in COMMANDS.items()]
    lines.append("  completion      print a script that completes these commands in a shell\n"
                 "      python -m infer_server completion bash > ~/.infer-server-completion")
    parser = argparse.ArgumentParser(
        "python -m infer_server", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compile ONNX models into engines, and serve them.",
        epilog="commands, each with an example; COMMAND --help has its options:\n\n" + "\n".join(lines))
    parser.add_argument("--version", action="version", version=f"infer-server {VERSION}")
    parser.add_argument("command", choices=(*COMMANDS, "completion"), metavar="COMMAND", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments of the command")
    return parser


def main(arguments: Sequence[str] | None = None, find: Callable[[str], Any] = resolve_name) -> int:
    """Run a command. find: imports its function, "module:function"."""
    options = make_parser().parse_args(arguments)
    if options.command != "completion":
        run: Callable[[list[str]], int] = find(COMMANDS[options.command].main)
        return run(options.arguments)
    parser = argparse.ArgumentParser("python -m infer_server completion")
    parser.add_argument("shell", choices=SHELLS)
    print(completion(parser.parse_args(options.arguments).shell))
    return 0


if __name__ == "__main__":
    sys.exit(main(find=imported))
