"""reduce-model: cut a failing ONNX model to the smallest part that still fails, with inputs and a command to show it.

    reduce-model model.onnx -o reduced.onnx --precision fp16        the fp16 engine differs from ONNX Runtime
    reduce-model model.onnx -o reduced.onnx --check build-fails     the model cannot be built
    reduce-model model.onnx -o reduced.onnx --check check.py:fails  fails(model, inputs) returns True

A smaller model fails alike if the kind of the failure is the same: the outputs differ, the build ends with the same
message apart from names and numbers, the process crashes, the check takes too long, or the function returns True.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tqdm import tqdm

from infer_server.cli.common import ABOVE_0, guarded, number_type, positive
from infer_server.engines.errors import ConfigError
from infer_server.reducing.checks import DIFFERS, NAMES, Check
from infer_server.reducing.reduction import MAX_CHECKS, TIMEOUT, check_model, reduce_model

FAILS = 1               # exit code of --check-only if the model fails
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
seconds = number_type("a number of seconds", low=ABOVE_0)


def _command(options: argparse.Namespace) -> int:
    check = Check(options.check, options.precision, options.tolerance)
    arguments = {"data": options.data, "preprocess": options.preprocess or "", "timeout": options.timeout}
    if options.check_only:
        verdict = check_model(options.model, check, **arguments)
        print(f"{options.model}: {f'fails: {verdict.text}' if verdict.kind else 'passes'}")
        return FAILS if verdict.kind else 0
    if not options.output:
        raise ConfigError("give the file of the reduced model, -o, or --check-only")
    with tqdm(desc="checking", unit="check", leave=False, disable=True if options.quiet else None) as bar:
        def stage(name: str, nodes: int) -> None:
            bar.set_description(f"{name or bar.desc.partition(':')[0]}: {nodes} nodes left")
            bar.update(not name)

        print(reduce_model(options.model, options.output, check, max_checks=options.max_checks, stage=stage,
                           **arguments))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("reduce-model", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL.onnx", help="model that fails")
    parser.add_argument("-o", "--output", metavar="FILE.onnx",
                        help="the reduced model; its inputs are written beside it, with the suffix .npz")
    check = parser.add_argument_group("check")
    check.add_argument("--check", default=DIFFERS, metavar="CHECK",
                       help=f"{', '.join(NAMES)}, or script.py:function(model, inputs), which gets a path and arrays "
                            f"by name, and returns True or a text if the model fails (default {DIFFERS})")
    check.add_argument("--precision", choices=PRECISIONS, default="fp32",
                       help="precision of the engine; int8 is calibrated on the item (default fp32)")
    check.add_argument("--tolerance", type=number_type("a share such as 1e-3", low=0.0), metavar="SHARE",
                       help="largest error, as a share of the output's range, that passes (default: the limits of "
                            "build-engine --verify)")
    check.add_argument("--timeout", type=seconds, default=TIMEOUT, metavar="S",
                       help=f"seconds after which a check is ended (default {TIMEOUT:g})")
    check.add_argument("--check-only", action="store_true",
                       help=f"run the check on the model, reduce nothing, and exit with {FAILS} if it fails")
    data = parser.add_argument_group("items")
    data.add_argument("--data", metavar="PATH", help="items in the forms of build-engine --calib, of which the first "
                                                     "is taken (default: a generated one)")
    data.add_argument("--preprocess", metavar="FILE|PRESET", help="preprocessing of images (default: a preset by the "
                                                                  "input's channels)")
    parser.add_argument("--max-checks", type=positive, default=MAX_CHECKS, metavar="N",
                        help=f"checks after which the smallest model so far is written (default {MAX_CHECKS})")
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(_command, make_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
