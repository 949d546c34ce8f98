"""compare-engine: compare a plan or an ONNX file with another, output by output and layer by layer.

    compare-engine int8.plan fp32.plan --data photos/       which layers of the INT8 plan are inexact
    compare-engine model.plan model.onnx                    a plan against ONNX Runtime, or the NumPy reference
    compare-engine quantised.onnx model.onnx --min-sqnr 20  two ONNX files; status 1 below 20 dB

B is the reference. Tensors are matched by their names: those that one side fuses away or renames are counted and left
out.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from infer_server.calibration.data.items import Feed
from infer_server.cli.common import guarded, number_type, positive, up_to
from infer_server.comparing.comparison import ITEMS, MAX_BYTES, THRESHOLD_DB, WORST, compare

TOO_FAR = 1             # exit code if an output is below --min-sqnr
MAX_ITEMS = 100_000
decibels = number_type("a number of dB")


def _command(options: argparse.Namespace) -> int:
    def progress(feeds: Iterable[Feed], count: int) -> Iterable[Feed]:
        return tqdm(feeds, desc="comparing", unit="item", total=min(count, options.items) or None, leave=False,
                    disable=True if options.quiet else None)

    result = compare(options.a, options.b, options.data, items=options.items, preprocess=options.preprocess or "",
                     threshold=options.threshold, progress=progress)
    if options.json:
        Path(options.json).write_text(json.dumps(result.as_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(result.text(len(result.layers) if options.all else options.worst))
    if options.min_sqnr is None or result.min_sqnr_db >= options.min_sqnr:
        return 0
    low = ", ".join(errors.name for errors in result.outputs if not errors.sqnr_db >= options.min_sqnr)
    print(f"compare-engine: below --min-sqnr {options.min_sqnr:g}: {low}", file=sys.stderr)
    return TOO_FAR


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("compare-engine", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A", help="plan, or ONNX file by the suffix .onnx, which is compared")
    parser.add_argument("b", metavar="B", help="plan or ONNX file that is the reference")
    data = parser.add_argument_group("items")
    data.add_argument("--data", metavar="PATH", help="items, in the forms of build-engine --calib (default: generated "
                                                     "inputs, the same in every run)")
    data.add_argument("--preprocess", metavar="FILE|PRESET",
                      help="preprocessing of images (default: what a plan of the two was calibrated with, or a preset "
                           "by the input's channels)")
    data.add_argument("--items", type=up_to(MAX_ITEMS), default=ITEMS, metavar="N",
                      help=f"the most items that are run, each alone (default {ITEMS}). Inner tensors of one item are "
                           f"held at a time, up to {MAX_BYTES >> 20} MiB; a larger model is run in several passes")
    report = parser.add_argument_group("report")
    report.add_argument("--threshold", type=decibels, default=THRESHOLD_DB, metavar="DB",
                        help=f"SQNR below which a layer diverges (default {THRESHOLD_DB:g}: errors of a tenth of the "
                             "signal)")
    report.add_argument("--min-sqnr", type=decibels, metavar="DB",
                        help=f"exit with {TOO_FAR} if an output's SQNR is below")
    listed = report.add_mutually_exclusive_group()
    listed.add_argument("--worst", type=positive, default=WORST, metavar="N",
                        help=f"layers that are listed: those of the least SQNR (default {WORST})")
    listed.add_argument("--all", action="store_true", help="list all layers")
    report.add_argument("--json", metavar="FILE", help="also write all outputs and layers to this JSON file")
    report.add_argument("-q", "--quiet", action="store_true", help="show no progress")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(_command, make_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
