"""Shared parts of the commands: error handling, argument types, tables."""
from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from infer_server.engines.debug import debugging
from infer_server.engines.errors import CompilerFault, ConfigError, EngineError, NoKernelError
from infer_server.engines.faults import summary
from infer_server.engines.machine.plan_store import PlanStore, read_secret
from infer_server.errors import NotBuiltError
from infer_server.protos.version import VERSION

USER_ERROR = 2              # exit code of errors that the user can correct
FAULT = 70                  # exit code of internal errors: EX_SOFTWARE of sysexits.h
NOT_VERIFIED = 1            # exit code of build-engine --verify if the plan, which is written, fails
Cell = str | int | float
ABOVE_0 = math.ulp(0.0)      # lower bound of number_type() that excludes 0


def guarded(command: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser,
            arguments: Sequence[str] | None) -> int:
    """Parse the arguments and run a command; print an error as one line on stderr and return its exit code."""
    add_version(parser)
    options = parser.parse_args(arguments)
    try:
        code = command(options)
        sys.stdout.flush()      # raises BrokenPipeError here rather than at exit
        return code
    except BrokenPipeError:     # the reader, such as `head`, has closed the pipe
        # Python flushes again at exit: https://docs.python.org/3/library/signal.html#note-on-sigpipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if debugging("traceback"):
            traceback.print_exc()
        print(f"{parser.prog}: {_error_line(parser.prog, error)}", file=sys.stderr)
        return _code_of(error)


def parse_or_raise(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line for a program: unlike parse_args(), raise ValueError instead of exiting."""
    known = {option for action in parser._actions for option in action.option_strings}
    unknown = [each for each in arguments if each.startswith("--") and each.partition("=")[0] not in known]
    parser.exit_on_error = False
    try:
        parsed, rest = parser.parse_known_args([] if unknown else list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    if unknown or rest:
        raise ValueError(f"unknown options: {', '.join(unknown or rest)}")
    return parsed


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add the option --version, which prints the version of infer-server."""
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")


def add_plan_store(parser: argparse.ArgumentParser) -> None:
    """Add the options of the plan store."""
    parser.add_argument("--plan-store", metavar="URL", default="",
                        help="folder of plans that machines share, behind the engine cache: s3://, gs://, az://, a "
                             "path or another address that fsspec supports; plans are read from there before they are "
                             "built, and put there afterwards")
    parser.add_argument("--plan-store-key", metavar="FILE", default="",
                        help="file with a secret that signs the plans of --plan-store; only plans signed with it are "
                             "read (default: plans are not signed, and whoever may write to the store is trusted)")


def plan_store_of(options: argparse.Namespace) -> PlanStore | None:
    """Return the plan store that the options name. Raises ConfigError, OSError."""
    if options.plan_store_key and not options.plan_store:
        raise ConfigError("--plan-store-key needs --plan-store")
    return PlanStore(options.plan_store, read_secret(options.plan_store_key) if options.plan_store_key else b""
                     ) if options.plan_store else None


@contextmanager
def plan_store_log() -> Iterator[None]:
    """Print what the plan store logs on stderr, with the level, which infer-server reads from a build's output."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger = logging.getLogger(PlanStore.__module__)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def _code_of(error: Exception) -> int:
    if isinstance(error, NoKernelError):
        return NotBuiltError.STATUS
    return USER_ERROR if _is_users(error) else FAULT


def _is_users(error: Exception) -> bool:
    """Return True for errors that the user can correct: those raised on purpose, and operating system errors."""
    return isinstance(error, EngineError | OSError) and not isinstance(error, CompilerFault)


def _error_line(prog: str, error: Exception) -> str:
    if _is_users(error):
        return f"error: {message_of(error)}"
    return str(error) if isinstance(error, CompilerFault) else f"a fault of {prog}: {summary(error)}"


def message_of(error: Exception) -> str:
    """Return the message of an error for users: the file before the system's message, without the error number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def table(rows: Sequence[Sequence[Cell]], header: Sequence[str]) -> str:
    """Format a table with aligned columns: text to the left, numbers to the right, floats with three digits."""
    text = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *text]) for i in range(len(header))]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(cells, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, text)])


def positive(text: str) -> int:
    """Parse a whole number of at least 1, as an argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def up_to(most: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from 1 to `most`."""
    def read(text: str) -> int:
        number = positive(text)
        if number > most:
            raise argparse.ArgumentTypeError(f"{number} is more than the limit of {most}")
        return number
    return read


def natural(text: str) -> int:
    """Parse a whole number of at least 0, as an argparse type."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 0")
    return int(text)


def parse_shape(text: str) -> tuple[str, tuple[int | None, ...]]:
    """Parse "input:1x3x224x224" to ("input", (1, 3, 224, 224)) and "ids:batchx128" to ("ids", (None, 128))."""
    name, colon, extents = text.rpartition(":")
    first, *others = extents.lower().split("x")
    sizes = [*[first] * (first != "batch"), *others]
    if not colon or not all(part.isdecimal() and int(part) for part in sizes):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME:1x3x224x224 or NAME:batchx3x224x224")
    return name, (*[None] * (first == "batch"), *map(int, sizes))


def parse_shapes(text: str) -> dict[str, tuple[int | None, ...]]:
    """Parse "ids:1x128,mask:1x128" to shapes by input, in the format of trtexec."""
    return dict(map(parse_shape, text.split(",")))


def number_type(kind: str, low: float = -math.inf, high: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type for finite numbers from `low` to `high`; its error says that a text is not `kind`."""
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            raise argparse.ArgumentTypeError(f"'{text}' is not {kind}")
        return value
    return parse


seconds = number_type("a number of seconds, 0 or more", low=0.0)
gibibytes = number_type("a number of GiB, 0 or more", low=0.0)


def boolean(text: str) -> bool:
    """Parse true or false in the spellings of Triton's options, as an argparse type."""
    values = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"'{text}' is neither true nor false")
    return values[text.lower()]
