"""build-engine: compile an ONNX model into an engine plan tuned for this machine.

    build-engine model.onnx -o model.plan                               float32
    build-engine model.onnx -o model.plan --int8 --calib photos/        INT8, calibrated on a folder of images
    build-engine model.onnx -o model.plan --weight-only int4            float, with weights of four bits
"""
from __future__ import annotations

import argparse
import math
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer_server.calibration.table import read_table, write_tensorrt
from infer_server.calibration.workflow import Calibration
from infer_server.cli.common import (
    NOT_VERIFIED,
    add_plan_store,
    gibibytes,
    guarded,
    parse_shape,
    parse_shapes,
    plan_store_log,
    plan_store_of,
    positive,
)
from infer_server.cli.dims import parse_constant, parse_dims, shapes_of_dims
from infer_server.cli.inspect_engine import by_reference, kernels, layers
from infer_server.cli.verifying import (
    TARGET_MISSED,
    add_calibration,
    add_target,
    add_weight_only,
    calibration_of,
    target_line,
    verify_build,
    weight_only_of,
)
from infer_server.engines.backends import known_targets
from infer_server.engines.compiler.build import EngineBuild, build_engine
from infer_server.engines.compiler.builder import BuildConfig, Profile
from infer_server.engines.compiler.engine_cache import SIZE_VARIABLE, USUAL_GIB, EngineCache, usual_folder
from infer_server.engines.compiler.max_batch import DEFAULT_MAX_BATCH
from infer_server.engines.compiler.ranges import Notify
from infer_server.engines.compiler.specialise import graph_at
from infer_server.engines.errors import ConfigError
from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.plan.coverage import Coverage
from infer_server.engines.plan.plan import Plan
from infer_server.engines.plan.roofline import expected
from infer_server.engines.plan.weights import weights_text
from infer_server.engines.preprocess import load_preprocess
from infer_server.process import tune_malloc
from infer_server.reporting.command import add_report, report_plan

if TYPE_CHECKING:
    from tqdm import tqdm


class Bar:
    """Progress on stderr: a bar for each stage of the build on a terminal, else a line every QUIET seconds.

    A terminal whose width is unknown (0 columns, as under some pseudo terminals) gets lines: tqdm shows nothing there.

    A thread writes the lines, so that a long step of a build does not delay them.
    """
    UNITS = {"calibrating": "item", "searching": "trial", "compiling": "kernel", "evaluating": "item",
             "ranking": "layer", "quantising": "layer", "tracing": "shape"}
    QUIET, BEAT = 4.0, 0.5      # seconds between lines, and between checks

    def __init__(self, quiet: bool = False) -> None:
        self._stage, self._text = "", "reading the model"
        self._bar: tqdm[Any] | None = None
        self._begin = self._last = time.perf_counter()
        self._lines = not _columns()
        self._done = threading.Event()
        if not quiet:
            threading.Thread(target=self._beat, daemon=True).start()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._close()

    def __call__(self, stage: str, done: int, of: int, what: str) -> None:
        self._text = f"{stage}: {done}" + f" of {of}" * bool(of) + f" {self.UNITS.get(stage, 'trial')}s"
        if stage != self._stage:
            self._close()
            self._stage = stage
            if not self._lines:
                from tqdm import tqdm  # importing it takes a tenth of the time to start
                self._bar = tqdm(desc=stage, total=of or None, unit=self.UNITS.get(stage, "trial"), leave=False)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            self._bar.set_postfix_str(what[-40:], refresh=False)
        if done == of:
            self._stage = ""
            self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def notice(self, text: str) -> None:
        """Print a notice."""
        self._last = time.perf_counter()
        _print_error(text)

    def _beat(self) -> None:
        while not self._done.wait(self.BEAT):
            now = time.perf_counter()
            bar = self._bar
            if bar is not None:
                bar.refresh()
            elif now - self._last >= self.QUIET:
                self.notice(f"{self._text}, {now - self._begin:.0f} s")


def _columns() -> int:
    """Return the width of the terminal that stderr is; 0 if it is none, or does not say."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):       # ValueError: stderr is no file
        return 0


def _command(options: argparse.Namespace) -> int:
    tune_malloc()
    _check(options)
    config, calibration = _config(options), calibration_of(options)
    cache = not options.no_cache and EngineCache(options.cache_dir or "", options.cache_size, plan_store_of(options))
    begin = time.perf_counter()
    with plan_store_log(), Bar(options.quiet) as bar:
        notify: Notify = (lambda text: None) if options.quiet else bar.notice
        build = build_engine(options.model, calibration=_build_calibration(calibration, config), cache=cache,
                             progress=bar, notify=notify, **vars(config))
    if options.strict:
        _refuse_reference(build.coverage)
    build.save(options.output)
    if options.entry_file and build.entry:
        Path(options.entry_file).write_text(str(build.entry))
    if options.verbose and build.notes:
        print(*build.notes, sep="\n")
    notify(f"{options.output}: " + (
        f"taken from the engine cache ({build.cached}); --no-cache builds it again" if build.cached else
        f"built in {time.perf_counter() - begin:.1f} s"))
    _summary(build, options, notify)
    if options.export_qdq:
        _export(build.plan, options.export_qdq, notify)
    if options.tensorrt_cache:
        _for_tensorrt(build.plan, options, notify)
    if options.report:
        report_plan(options.report, options.output, build.plan, notify, timing=not options.no_timing,
                    model=options.model, data=options.calib, preprocess=options.preprocess or "", quiet=options.quiet)
    missed = options.max_drop is not None and not _meets_target(build.plan, notify)
    if options.verify and not verify_build(options.output, options.model, config, calibration, notify, _print_error):
        return NOT_VERIFIED
    if options.strip:       # last: verifying asks the plan for its graph
        build.save(options.output, strip=True)
    return TARGET_MISSED if missed else 0


def _meets_target(plan: Plan, notify: Notify) -> bool:
    """Return True if the plan meets its accuracy target; print the result, or that none was measured."""
    target = plan.metadata.get("target")
    if target is None:
        _print_error("--max-drop: no accuracy was measured, because the model is quantised already")
        return False
    notify(f"{plan.name}: {target_line(target)}")
    return bool(target["met"])


def _config(options: argparse.Namespace) -> BuildConfig:
    return BuildConfig(
        precision=options.precision, max_batch=options.max_batch, opt_batch=options.opt_batch,
        target=options.target or "", shapes=_shapes(options), constants=dict(options.constant or ()),
        keep_float=tuple(options.keep_float or ()), float_type=options.float_type,
        keep_fp32=tuple(options.keep_fp32 or ()), weight_only=weight_only_of(options),
        pixels=load_preprocess(options.preprocess).pixels if options.uint8_input else None,
        timing=not options.no_timing, timing_cache=options.timing_cache or "", threads=options.threads,
        profiles=_profiles(options), ragged=tuple(options.ragged or ()), optional=tuple(options.optional or ()),
        symbolic_plans=not options.no_symbolic_plans)


def _shapes(options: argparse.Namespace) -> dict[str, tuple[int | None, ...]]:
    has_dims = options.dims or options.batch_first
    shapes = shapes_of_dims(options.model, dict(options.dims or ()), options.batch_first) if has_dims else {}
    return {**shapes, **dict(options.shape or ())}


def _profiles(options: argparse.Namespace) -> tuple[Profile, ...]:
    """Return the optimization profiles: the n-th of --min-shapes, --opt-shapes and --max-shapes together.

    Missing minimum or maximum shapes default to --opt-shapes.
    """
    usual = options.opt_shapes or []
    groups = [options.min_shapes or usual, usual, options.max_shapes or usual]
    if any(len(group) != len(usual) for group in groups):
        raise ConfigError("--min-shapes, --opt-shapes and --max-shapes form profiles: give --opt-shapes for each "
                          "profile, and the others for each or for none")
    profiles = []
    for least, opt, most in zip(*groups, strict=True):
        if not least.keys() == opt.keys() == most.keys():
            raise ConfigError("--min-shapes, --opt-shapes and --max-shapes of a profile must name the same inputs")
        profiles.append({name: (least[name], opt[name], most[name]) for name in opt})
    return tuple(profiles)


def _build_calibration(calibration: Calibration | None, config: BuildConfig) -> Calibration | None:
    """Return the calibration if the build itself needs it, and not only --verify."""
    needed = config.precision in ("int8", "best") or (
        calibration and calibration.data and (config.precision == "fp16" or config.weight_only))
    return calibration if needed else None


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError with all contradictory options before minutes of calibration."""
    faults = [f"cannot write {output}: name a file in a folder that exists and is yours to write"
              for output in map(Path, filter(None, (
                  options.output, options.report, options.export_qdq,
                  options.tensorrt_cache and options.tensorrt_cache[0])))
              if output.is_dir() or not os.access(output.absolute().parent, os.W_OK)]
    if options.calib and options.precision not in ("int8", "best", "fp16") and not (
            options.verify or options.weight_only):
        faults.append("--calib is for --int8, --best, --fp16, --weight-only and --verify; this build is "
                      f"{options.precision}")
    if options.weight_only and (options.calibrator or options.calib_cache or options.calib_part):
        faults.append("--calibrator, --calib-cache and --calib-part are of INT8 builds: give --weight-only the data "
                      "alone, by --calib")
    if options.uint8_input and not options.preprocess:
        faults.append("--uint8-input needs --preprocess: the scale, mean and std that normalise pixels for the model")
    if options.max_drop is None and any((
            options.metric, options.eval_data, options.labels, options.test, options.test_labels)):
        faults.append("--metric, --eval, --labels and --test are of a target: give --max-drop, too")
    if options.max_slowdown is not None and options.precision != "int8":
        faults.append("--max-slowdown limits the layers that an INT8 build keeps in float: it needs --int8")
    if options.max_slowdown and options.max_drop is None and options.no_timing:
        faults.append("--max-slowdown without --max-drop needs the times of kernels: leave --no-timing out")
    if options.max_slowdown == math.inf and options.max_drop is None:
        faults.append("--max-slowdown none lets all layers move to float: give it with --max-drop, which says how many")
    if options.max_drop is not None and options.float_type != "fp32":
        faults.append("--max-drop chooses the precision of the layers that it keeps in float: leave --float-type out")
    if options.max_drop is not None and options.precision != "int8":
        faults.append("--max-drop moves layers from INT8 to float: it needs --int8")
    if options.plan_store and options.no_cache:
        faults.append("--plan-store is the second level of the engine cache: do without --no-cache")
    if options.export_qdq and options.precision != "int8" and not options.weight_only:
        faults.append("--export-qdq writes the quantised model: it needs --int8 or --weight-only")
    if options.tensorrt_cache and not options.calib_cache:
        faults.append("--tensorrt-cache writes the ranges of --calib-cache: give that, too")
    if options.tensorrt_cache and not _version(text := options.tensorrt_cache[1]):
        faults.append(f"--tensorrt-cache: '{text}' is not a version of TensorRT that reads calibration caches; write "
                      "one up to 10, such as 8.6.1 or 10.3.0")
    if faults:
        raise ConfigError("\n  ".join(faults))


def _refuse_reference(coverage: Coverage) -> None:
    if coverage.by_reference:
        raise ConfigError(f"--strict: nothing is written, because {len(coverage.by_reference)} of {coverage.steps} "
                          f"steps run on the reference:\n{coverage.reasons}")


def _for_tensorrt(plan: Plan, options: argparse.Namespace, notify: Notify) -> None:
    if plan.program is not None:
        raise ConfigError(f"--tensorrt-cache: {plan.name} is a program, whose ranges are in no calibration cache")
    if not Path(options.calib_cache).exists():
        raise ConfigError(f"--tensorrt-cache: {options.calib_cache} does not exist, because the plan was taken from "
                          "the engine cache; write --no-cache to calibrate again")
    path, text = options.tensorrt_cache
    version = _version(text)
    assert version, "it was checked"
    left_out = write_tensorrt(read_table(options.calib_cache), path, version)
    notify(f"{path}: calibration cache of TensorRT {text}"
           + (f", without {len(left_out)} tensors that it cannot contain ({left_out[0]}, ...)" if left_out else ""))


def _version(text: str) -> tuple[int, int, int] | None:
    """Parse a version of TensorRT up to 10, which has calibration caches; None if it is not one."""
    match = re.fullmatch(r"(\d|10)\.(\d+)\.(\d+)", text, re.ASCII)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _export(plan: Plan, path: str, notify: Notify) -> None:
    import onnx
    packed = bool(plan.metadata.get("weights"))
    onnx.save(onnx_from_graph(graph_at(plan), packed), path)
    notify(f"{path}: the quantised model with " + (
        "packed weights, for ONNX Runtime" if packed else "QuantizeLinear and DequantizeLinear nodes"))


def _summary(build: EngineBuild, options: argparse.Namespace, notify: Notify) -> None:
    plan, coverage = build.plan, build.coverage
    if options.verbose:
        print(layers(plan))
    if missing := by_reference(coverage):
        _print_error(missing)
    size = Path(options.output).stat().st_size / 1e6
    notify(f"{options.output}: {plan.precision} for {plan.machine.target}, {kernels(plan)}, {size:.1f} MB")
    if weights := weights_text(plan.metadata):
        notify(weights)
    notify(coverage.line)
    if line := expected(plan):
        notify(line)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("build-engine", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="ONNX file to compile")
    parser.add_argument("-o", "--output", required=True, metavar="OUT.plan", help="plan file to write")
    precision = parser.add_mutually_exclusive_group()
    for name in ("int8", "fp16", "bf16", "fp32"):
        precision.add_argument(f"--{name}", action="store_const", const=name, dest="precision", help=f"build in {name}")
    precision.add_argument("--best", action="store_const", const="best", dest="precision",
                           help="build in the fastest precision: int8 or fp32, layer by layer, with --calib; otherwise "
                                "the fastest floating-point type")
    parser.add_argument("--entry-file", help=argparse.SUPPRESS)     # for infer-server: the plan's file in the cache
    parser.set_defaults(precision="fp32")
    add_calibration(parser)
    add_weight_only(parser)
    add_target(parser)
    _add_shapes(parser)
    _add_tuning(parser)
    _add_output(parser)
    return parser


def _add_shapes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-batch", type=positive, metavar="N",
                        help=f"maximum number of items in a batch (default {DEFAULT_MAX_BATCH}; fewer for large items, "
                             "more for small ones)")
    parser.add_argument("--opt-batch", type=positive, metavar="N",
                        help="optimise for batches of N items: time tactics with N items (default: with one, and also "
                             "with a full batch if several items share a tile)")
    parser.add_argument("--shape", type=parse_shape, action="append", metavar="NAME:batchx128",
                        help="fix the shape of an input with symbolic dimensions; a number instead of \"batch\" also "
                             "fixes the batch, unless --max-batch is given")
    parser.add_argument("--dims", type=parse_dims, action="append", metavar="NAME:3x-1x224",
                        help="like --shape, for dimensions that the model leaves open, with or without the batch as in "
                             "config.pbtxt; an input with a -1 stays open")
    parser.add_argument("--batch-first", action="store_true",
                        help="take the leading dimension of every input as the batch, if it is open; needed if the "
                             "model does not give it one name")
    parser.add_argument("--ragged", action="append", metavar="NAME",
                        help="input with one open dimension in which several requests are concatenated "
                             "(allow_ragged_batch in config.pbtxt); no dimension is the batch then")
    parser.add_argument("--optional", action="append", metavar="NAME",
                        help="input with a default value in the ONNX file (an initializer of its name) that stays an "
                             "optional input; without this option it becomes a constant")
    parser.add_argument("--constant", type=parse_constant, action="append", metavar="NAME=VALUE",
                        help="replace an input by a constant, a number or a list of numbers; for example one that "
                             "selects a branch")
    for which, of in (("min", "minimum shapes of a profile"), ("max", "maximum shapes of a profile"),
                      ("opt", "shapes for which a model with open dimensions is compiled and tuned; other shapes are "
                              "specialised when they first occur")):
        parser.add_argument(f"--{which}-shapes", type=parse_shapes, action="append", metavar="X:1x3x64x64,...",
                            help=f"{of}; the n-th of the min, opt and max shapes form a profile")
    parser.add_argument("--no-symbolic-plans", action="store_true",
                        help="leave out symbolic plans; runs at shapes that are not compiled have to make them then")


def _add_tuning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=positive, default=1, metavar="N",
                        help="default number of threads of run-engine for this plan (default 1)")
    parser.add_argument("--target", metavar="NAME",
                        help="target to build for: an instruction set or another backend "
                             f"({', '.join(known_targets())}) (default: the best of this CPU)")
    parser.add_argument("--timing-cache", metavar="FILE", help="file with measured times of tactics, read and updated")
    parser.add_argument("--no-timing", action="store_true",
                        help="choose tactics by the cost model instead of timing them")
    cache = parser.add_mutually_exclusive_group()
    cache.add_argument("--cache-dir", metavar="DIR", help="folder of the engine cache, which answers identical builds "
                                                          f"(default {usual_folder()})")
    cache.add_argument("--no-cache", action="store_true", help="do not use the engine cache")
    parser.add_argument("--cache-size", type=gibibytes, metavar="GIB",
                        help=f"limit of the size of the engine cache (default ${SIZE_VARIABLE}, or {USUAL_GIB:g})")
    add_plan_store(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strip", action="store_true",
                        help="omit the graph's weights from the plan, which halves its size; it cannot be compiled "
                             "again for another CPU")
    parser.add_argument("--export-qdq", metavar="FILE", help="also write the quantised model as ONNX")
    add_report(parser, "; measures the kernels' times, the layers' errors and, with --int8, their sensitivity")
    parser.add_argument("--verify", action="store_true",
                        help="compare the plan with the model (in ONNX Runtime, if installed) on items of --calib or "
                             f"on generated inputs; exit with {NOT_VERIFIED} if an error exceeds what the precision "
                             "explains")
    parser.add_argument("--strict", action="store_true",
                        help="fail without writing a plan if any step would run on the reference")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the fusions and all kernels")
    parser.add_argument("-q", "--quiet", action="store_true", help="print only errors and fallbacks")


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(_command, make_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
