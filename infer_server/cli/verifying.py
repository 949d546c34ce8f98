"""Options of build-engine about accuracy: calibration, an accuracy target, and --verify."""
from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from typing import Any

from infer_server.calibration.accuracy.errors import OutputErrors
from infer_server.calibration.accuracy.verify import Verification, verify
from infer_server.calibration.calibrators import CALIBRATORS
from infer_server.calibration.data.items import Feed
from infer_server.calibration.target.metrics import NAMES as METRICS
from infer_server.calibration.target.search import MAX_SLOWDOWN, AccuracyTarget
from infer_server.calibration.target.split import FEWEST_ITEMS
from infer_server.calibration.workflow import Calibration
from infer_server.cli.common import table
from infer_server.engines.backends import device_of
from infer_server.engines.compiler.builder import BuildConfig
from infer_server.engines.compiler.ranges import Notify
from infer_server.engines.compiler.weight_only.scheme import (
    GROUP_SIZES,
    ROWS_AS_INT8,
    ROWS_AS_MODEL,
    TYPES,
    USUAL_GROUP,
    WeightOnly,
)
from infer_server.engines.errors import ConfigError
from infer_server.engines.plan.file import read_plan
from infer_server.engines.preprocess import PRESETS

TARGET_MISSED = 3           # exit code of --max-drop if the plan, which is written, misses the target
HEADER = ("output", "largest error", "of range", "item", "mean", "median", "SQNR dB", "cosine", "differ %", "")


def verify_build(plan: str, model: str, config: BuildConfig, calibration: Calibration | None, notify: Notify,
                 warn: Notify) -> bool:
    """Return True if the plan file passes; print the table with `notify`, and faults with advice with `warn`."""
    data, read = None, read_plan(plan)
    if calibration and calibration.data:
        data = calibration.open(read.open.inputs if read.open else read.inputs, config.pixels is not None, read.extents)
    result = verify(plan, model, data, shapes=config.shapes, constants=config.constants, pixels=config.pixels,
                   progress=_bar)
    source = data.source if data else "generated inputs"
    notify(f"{plan} ({result.precision}) beside {result.oracle}, {result.items} items of {source}:\n{listed(result)}")
    for note in result.notes:
        warn(f"{plan}: {note}")
    if not result.faults:
        elsewhere = device_of(read.machine.backend).mismatch(read)
        notify(f"{plan}: verified" + f", as it is compiled for this machine: {elsewhere}" * bool(elsewhere))
        return True
    warn("\n".join([f"{plan}: NOT verified", *(f"  {fault}" for fault in result.faults), f"  {result.advice}"]))
    return False


def listed(result: Verification) -> str:
    """Return a table with the errors of each output and of each part that is judged separately.

    The worst part is marked.
    """
    rows = [_row(errors, bool(errors.fault(result.limits))) for errors in (*result.outputs, *result.parts)]
    for row in rows[len(result.outputs):]:
        row[-1] += ", the worst part" * (row[0] == result.worst)
    return table(rows, HEADER)


def _row(errors: OutputErrors, is_fault: bool) -> list[str]:
    verdict = "FAILED" if is_fault else "passed"
    differing = errors.missing / max(errors.rows, 1) if errors.rows >= 0 else errors.differing
    if errors.wrong or not errors.floating:
        numbers = ["-"] * 7
    else:
        numbers = [f"{errors.largest:.3g}", f"{errors.relative:.2e}", str(errors.item), f"{errors.mean:.3g}",
                   f"{errors.median:.3g}", f"{errors.sqnr_db:.1f}", f"{errors.cosine:.6f}"]
    return [errors.name, *numbers, f"{100 * differing:.2f}", verdict + f" ({errors.rows} rows)" * (errors.rows >= 0)]


def _bar(feeds: Iterable[Feed], slow: bool) -> Iterable[Feed]:
    """Show progress on stderr, if that is a terminal and the verification is slow."""
    if not slow:
        return feeds
    from tqdm import tqdm
    return tqdm(feeds, desc="verifying", unit="batch", disable=None, leave=False)


def target_of(options: argparse.Namespace) -> AccuracyTarget | None:
    """Return the accuracy target of the options, or None."""
    if options.max_drop is None:
        return None
    limit = {} if options.max_slowdown is None else {
        "max_slowdown": options.max_slowdown if math.isfinite(options.max_slowdown) else None}
    return AccuracyTarget(options.max_drop, options.metric or "", options.eval_data, options.labels or "",
                          options.test, options.test_labels or "", **limit)


def target_line(target: Mapping[str, Any]) -> str:
    """Return the result of an accuracy target, from a plan's metadata, with the items of each part."""
    test, metric = target.get("test"), target["metric"]
    parts = [f"ranges chosen on {target['calibration_items']} items" if target.get("calibration_items") else
             "ranges from a cache", f"layers on {target['items']}"]
    if test is None:
        measured = f"{metric} {target['score']:.4f}, in float {target['float']:.4f}, on the items that chose the layers"
    else:
        parts.append(f"the score on {test['items']} others ({test['source']})")
        measured = (f"{metric} {test['score']:.4f}, in float {test['float']:.4f}, on test items; {target['score']:.4f} "
                    "on the items that chose the layers")
    return f"accuracy target {'met' if target['met'] else 'NOT met'}: {measured}; {', '.join(parts)}"


def parse_drop(text: str) -> float:
    """Parse "0.5%" or "0.005" to 0.005, as an argparse type."""
    number = text.removesuffix("%")
    try:
        value = float(number) / (100.0 if number != text else 1.0)
        if 0.0 <= value < math.inf:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is not a drop such as 0.5% or 0.005")


def parse_slowdown(text: str) -> float:
    """Parse "25%" or "0.25" to 0.25, and "none" to infinity, as an argparse type."""
    if text == "none":
        return math.inf
    try:
        return parse_drop(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a share of time such as 25% or 0.25, or \"none\"") from None


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the options of an accuracy target."""
    target = parser.add_argument_group(
        "accuracy target", f"Keep layers in float until a metric is within --max-drop of the float model's, at the "
                           f"least cost in time. Exits with {TARGET_MISSED}, and writes the closest plan, if none is.")
    target.add_argument("--max-drop", type=parse_drop, metavar="DROP",
                        help="allowed drop of the metric on evaluation items: 0.5%% or 0.005")
    target.add_argument("--metric", metavar="NAME",
                        help=f"{', '.join(METRICS)}, or script.py:function(inputs, outputs, labels) (default: top1 "
                             "with labels, agreement of the classes for classifiers without, cosine for others)")
    target.add_argument("--eval", dest="eval_data", metavar="PATH",
                        help="items that the layers are chosen on, in the forms of --calib (default: every fourth item "
                             "of --calib, which ranges are not chosen on)")
    target.add_argument("--max-slowdown", type=parse_slowdown, metavar="LIMIT",
                        help="how much longer than all layers in INT8 the plan may take: 25%%, 0.25 or none (default "
                             f"with --max-drop: {100 * MAX_SLOWDOWN:g}%%). Without --max-drop, the layers that add "
                             "most noise stay in float within this time")
    forms = ("an .npy or .txt file with one number an item, a .csv file with lines path,number, or \"folders\" for a "
             "folder of images per class")
    target.add_argument("--labels", metavar="FILE", help=f"classes of the evaluation items: {forms}")
    target.add_argument("--test", metavar="PATH",
                        help="items for the reported score, on which nothing is chosen, in the forms of --calib "
                             f"(default: every fourth item of --eval, or of --calib without it, of {FEWEST_ITEMS} or "
                             "more)")
    target.add_argument("--test-labels", metavar="FILE",
                        help="classes of the test items (default: --labels, if it is a .csv file or \"folders\")")


def calibration_of(options: argparse.Namespace) -> Calibration | None:
    """Return the calibration of the options, or None."""
    if not options.calib and not options.calib_cache and not options.calib_part:
        return None
    return Calibration(options.calib, options.calibrator or "", options.calib_cache or "", options.preprocess or "",
                       target_of(options), options.allow_corrupt,
                       sensitivity=bool(options.report) and options.precision == "int8",
                       parts=tuple(options.calib_part or ()),
                       max_slowdown=0.0 if options.max_drop is not None else options.max_slowdown or 0.0)


def weight_only_of(options: argparse.Namespace) -> WeightOnly | None:
    """Return the weight-only quantisation of the options, or None. Raises ConfigError."""
    if options.weight_only is not None:
        return WeightOnly(options.weight_only, options.group_size or 0, options.accuracy_level or 0)
    for option in ("group_size", "accuracy_level"):
        if getattr(options, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} is of weight-only quantisation: give --weight-only int4")
    return None


def add_weight_only(parser: argparse.ArgumentParser) -> None:
    """Add the options of weight-only quantisation."""
    group = parser.add_argument_group(
        "weight-only quantisation", "Store the weights of a float model's MatMul and Gemm nodes, and tables of Gather "
                                    "nodes, packed in few bits. Activations stay float. With --calib, weights are "
                                    "rounded by the error of each layer's output (GPTQ).")
    group.add_argument("--weight-only", choices=TYPES,
                       help="int8: a byte a weight, with a scale per output channel; int4: half a byte, with a scale "
                            "per group (tables are INT8)")
    group.add_argument("--group-size", type=int, choices=GROUP_SIZES, metavar="N",
                       help=f"INT4 weights that share a scale: {', '.join(map(str, GROUP_SIZES))} "
                            f"(default {USUAL_GROUP})")
    group.add_argument("--accuracy-level", type=int, choices=(ROWS_AS_MODEL, ROWS_AS_INT8),
                       help=f"{ROWS_AS_MODEL}: INT4 weights multiply float rows; {ROWS_AS_INT8}: rows are rounded to 8 "
                            "bits in groups like the weights, which is faster with AVX-512 VNNI (as MatMulNBits of "
                            f"ONNX Runtime; default {ROWS_AS_MODEL})")


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """Add the options of a calibration."""
    parser.add_argument("--calib", metavar="PATH", help="calibration data: a folder of images or .npz files, an .npz "
                                                        "file, or script.py:function")
    parser.add_argument("--allow-corrupt", action="store_true",
                        help="leave out files of --calib that cannot be read, and name them (default: stop the build)")
    parser.add_argument("--calibrator", metavar="NAME", help=f"calibrator: {', '.join(CALIBRATORS)} (default: the one "
                                                             "with the least error on the calibration data)")
    parser.add_argument("--calib-cache", metavar="FILE", help="calibration cache: read if the file exists and matches "
                                                              "the model, else written")
    parser.add_argument("--calib-part", action="append", metavar="FILE",
                        help="calibration cache of a part of the data, written with --calibrator; can be repeated: the "
                             "ranges are those of all parts together")
    parser.add_argument("--tensorrt-cache", nargs=2, metavar=("FILE", "VERSION"),
                        help="also write the ranges as a calibration cache of TensorRT, up to version 10, for its own "
                             "tools (trtexec --calib) with the same ONNX model")
    parser.add_argument("--preprocess", metavar="FILE|PRESET",
                        help=f"preprocessing of images: a TOML file, or {', '.join(PRESETS)}")
    parser.add_argument("--uint8-input", action="store_true",
                        help="build an engine that takes images as uint8 [N, H, W, C] and normalises them as "
                             "--preprocess says")
    parser.add_argument("--keep-float", action="append", metavar="NODE",
                        help="ONNX node that --int8 or --weight-only leaves in float, or a pattern of names "
                             "('head/*'); NODE... also leaves all nodes that follow it; can be repeated")
    parser.add_argument("--float-type", choices=("fp32", "bf16", "fp16"), default="fp32",
                        help="precision of what --int8 leaves in float (default fp32)")
    parser.add_argument("--keep-fp32", action="append", metavar="NODE",
                        help="ONNX node of --keep-float that computes in fp32 beside --float-type bf16 or fp16, or a "
                             "pattern of names; can be repeated")
