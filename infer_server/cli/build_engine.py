"""build-engine: compile an ONNX model into an engine plan tuned for this machine.

    build-engine model.onnx -o model.plan                               float32
    build-engine model.onnx -o model.plan --int8 --calib photos/        INT8, calibrated on a folder of images
"""
from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from calibration.calibrators import CALIBRATORS
from calibration.data.preprocess import PRESETS, load_preprocess
from engines.backends import backend_of, every_target
from engines.compiler.builder import DEFAULT_MAX_BATCH, BuildConfig
from engines.compiler.engine_cache import EngineCache
from engines.errors import ConfigError
from engines.frontend.onnx_export import onnx_from_graph
from engines.passes.pixels import Pixels
from engines.plan.file import read_plan, write_plan
from engines.plan.plan import Plan, graph_of
from infer_server.cli.calibrating import Calibration, Say
from infer_server.cli.common import NOT_VERIFIED, guarded, positive
from infer_server.cli.compiling import compile_model
from infer_server.cli.inspect_engine import fallbacks, kernels, layers
from infer_server.cli.verifying import verify_build
from infer_server.malloc import tune_malloc


def parse_shape(text: str) -> tuple[str, tuple[int | None, ...]]:
    """"input:1x3x224x224" -> ("input", (1, 3, 224, 224)); "ids:batchx128" -> ("ids", (None, 128))"""
    name, colon, extents = text.rpartition(":")
    first, *others = extents.lower().split("x")
    sizes = [*[first] * (first != "batch"), *others]
    if not colon or not all(part.isdecimal() and int(part) for part in sizes):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME:1x3x224x224 or NAME:batchx3x224x224")
    return name, (*[None] * (first == "batch"), *map(int, sizes))


class Bar:
    """Progress over the kernels, on stderr, where stderr is a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def __call__(self, done: int, of: int, what: str) -> None:
        if self._bar is None:
            self._bar = tqdm(desc="compiling", total=of, unit="kernel", disable=None, leave=False)
        self._bar.update(done - self._bar.n)
        self._bar.set_postfix_str(what[-40:])
        if done == of:
            self._bar.close()
            self._bar = None


def _command(options: argparse.Namespace) -> int:
    tune_malloc()
    _check(options)
    config = BuildConfig(
        precision=options.precision, max_batch=options.max_batch, opt_batch=options.opt_batch,
        target=options.target or "",
        shapes=dict(options.shape or ()), pixels=_pixels(options), keep_float=tuple(options.keep_float or ()),
        timing=not options.no_timing, timing_cache=options.timing_cache or "")
    calibration = Calibration(options.calib or "", options.calibrator or "", options.calib_cache or "",
                              options.preprocess or "", options.uint8_input)
    say = _nothing if options.quiet else _say

    def build() -> None:
        begin = time.perf_counter()
        result = compile_model(options.model, config, calibration, say, Bar())
        write_plan(replace(result.plan, metadata={**result.plan.metadata, "threads": options.threads}), options.output)
        if options.verbose:
            print(*result.notes, sep="\n")
        say(f"{options.output}: built in {time.perf_counter() - begin:.1f} s")

    if options.cache_dir:
        cache = EngineCache(options.cache_dir)
        _build_once(cache, lambda: cache.key(options.model, _key_options(options, config, calibration)),
                    options.output, build, say)
    else:
        build()
    plan = read_plan(options.output)
    if options.export_qdq:
        _export(plan, options.export_qdq, say)
    _summary(plan, options, say)
    if options.verify and not verify_build(options.output, options.model, config, calibration, say, _say):
        return NOT_VERIFIED
    if options.strip:
        write_plan(plan.strip(), options.output)
    return 0


def _pixels(options: argparse.Namespace) -> Pixels | None:
    return Pixels(*load_preprocess(options.preprocess).affine) if options.uint8_input else None


def _build_once(cache: EngineCache, key: Callable[[], str], output: str, build: Callable[[], None], say: Say) -> None:
    """Take the plan from the cache, or build it while whoever wants the same one waits."""
    before = key()
    with cache.lock(before):
        if cache.fetch(before, output):
            say(f"{output}: taken from the engine cache {cache.folder}")
        else:
            build()
            for made in {before, key()}:    # the build may have written the calibration cache, which is in the key
                cache.store(made, output)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _nothing(text: str) -> None:
    """--quiet"""


def _check(options: argparse.Namespace) -> None:
    if not Path(options.model).is_file():
        raise ConfigError(f"there is no model file {options.model}")
    for output in map(Path, filter(None, (options.output, options.export_qdq))):     # before minutes of calibration
        if output.is_dir() or not os.access(output.absolute().parent, os.W_OK):
            raise ConfigError(f"cannot write {output}: name a file in a folder that exists and is yours to write")
    if options.calib and options.precision not in ("int8", "best") and not options.verify:
        raise ConfigError(f"--calib is for --int8, --best and --verify; this build is {options.precision}")
    if options.uint8_input and not options.preprocess:
        raise ConfigError("--uint8-input needs --preprocess: the scale, mean and std by which pixels become what the "
                          "model takes")
    if options.export_qdq and options.precision != "int8":
        raise ConfigError("--export-qdq writes the quantised model: it needs --int8")


def _key_options(options: argparse.Namespace, config: BuildConfig, calibration: Calibration) -> dict[str, object]:
    """All that changes the plan beside the model; of calibration data, names, sizes and times of the files.

    The calibration cache counts with its content: builds that share its name may find other ranges in it.
    """
    from engines.machine.cpu import detect
    script, is_script, _ = calibration.source.partition(".py:")
    source = Path(f"{script}.py" if is_script else calibration.source)
    files = sorted(source.rglob("*")) if source.is_dir() else [source] if calibration.source else []
    return {**asdict(config), **asdict(calibration), "threads": options.threads, "cpu": detect().model,
            "target": config.target or backend_of("").default_target(), "timing_cache": "",
            "data": [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()],
            "texts": [Path(name).read_text(errors="replace") if Path(name).is_file() else ""
                      for name in (calibration.preprocess, calibration.cache)]}


def _export(plan: Plan, path: str, say: Say) -> None:
    import onnx
    onnx.save(onnx_from_graph(graph_of(plan)), path)
    say(f"{path}: the quantised model with QuantizeLinear and DequantizeLinear nodes")


def _summary(plan: Plan, options: argparse.Namespace, say: Say) -> None:
    if options.verbose:
        print(layers(plan))
    if missing := fallbacks(plan):
        _say(missing)
    size = Path(options.output).stat().st_size / 1e6
    say(f"{options.output}: {plan.precision} for {plan.target}, {kernels(plan)}, {size:.1f} MB")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("build-engine", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an ONNX file")
    parser.add_argument("-o", "--output", required=True, metavar="OUT.plan", help="the plan file to write")
    precision = parser.add_mutually_exclusive_group()
    for name in ("int8", "fp16", "bf16", "fp32"):
        precision.add_argument(f"--{name}", action="store_const", const=name, dest="precision", help=f"build in {name}")
    precision.add_argument("--best", action="store_const", const="best", dest="precision",
                           help="build in the fastest: int8 or fp32, layer by layer, where there is --calib; "
                                "else one of the floats")
    parser.set_defaults(precision="fp32")
    parser.add_argument("--calib", metavar="PATH", help="calibration data: a folder of images or .npz files, an .npz "
                                                        "file, or script.py:function")
    parser.add_argument("--calibrator", metavar="NAME", help=f"{', '.join(CALIBRATORS)}; without it, the one with the "
                                                             "least error on the calibration data")
    parser.add_argument("--calib-cache", metavar="FILE", help="ranges: read if the file exists and fits, else written")
    parser.add_argument("--preprocess", metavar="FILE|PRESET",
                        help=f"how images become inputs: a TOML file, or {', '.join(PRESETS)}")
    parser.add_argument("--uint8-input", action="store_true",
                        help="the engine takes images as uint8 [N, H, W, C] and normalises them as --preprocess says")
    parser.add_argument("--max-batch", type=positive, metavar="N",
                        help=f"most items a run (default {DEFAULT_MAX_BATCH})")
    parser.add_argument("--opt-batch", type=positive, metavar="N",
                        help="optimise for batches of N items: tactics are timed with so many (default: with one; "
                             "where several items share a tile, with a full batch too)")
    parser.add_argument("--shape", type=parse_shape, action="append", metavar="NAME:batchx128",
                        help="shape of an input whose extents beyond the batch are symbolic; a number in place of "
                             "\"batch\" fixes the batch too, unless --max-batch is given")
    parser.add_argument("--keep-float", action="append", metavar="NODE",
                        help="an ONNX node that --int8 leaves in float")
    parser.add_argument("--strip", action="store_true",
                        help="leave the graph's weights out of the plan: it takes about half the room, and cannot be "
                             "compiled again for another CPU")
    parser.add_argument("--threads", type=positive, default=1, metavar="N",
                        help="threads that run-engine takes for the plan where it is not told (default 1)")
    parser.add_argument("--target", metavar="NAME",
                        help=f"an instruction set, or another backend ({', '.join(every_target())}); default: this "
                             "CPU's best")
    parser.add_argument("--timing-cache", metavar="FILE", help="times of tactics, read and added to")
    parser.add_argument("--no-timing", action="store_true", help="take each kernel's usual tactic without timing")
    parser.add_argument("--cache-dir", metavar="DIR", help="engine cache: the second identical build is a lookup")
    parser.add_argument("--export-qdq", metavar="FILE", help="also write the quantised model as ONNX")
    parser.add_argument("--verify", action="store_true",
                        help="run the plan and the model (by ONNX Runtime where it is installed) on items of --calib "
                             f"or generated ones; exit with {NOT_VERIFIED} if an output is further off than the "
                             "precision explains")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what was fused, and every kernel")
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors and fallbacks only")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(_command, make_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
