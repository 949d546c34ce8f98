"""score: run a plan on a folder of images, .npz, .npy or Parquet files, and write the outputs as Parquet.

    score model.plan photos/ -o scores/ --top-k 5 --labels labels.txt
    score model.plan rows.parquet -o scores/ --columns id --inputs image=pixels

A run that was interrupted is continued by the same command: files that are complete are kept.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from infer_server.batch.columns import arrow
from infer_server.batch.job import Summary, run
from infer_server.batch.results import file_digest
from infer_server.batch.scorer import Scorer
from infer_server.batch.sources import MAX_ITEMS, SPLITS, open_source
from infer_server.cli.common import guarded, positive
from infer_server.engines.machine.cpu import allowed_cpus

MAX_LISTED = 20     # number of failed items that are printed
BUILT = "_model.plan"


def _command(options: argparse.Namespace) -> int:
    arrow()
    folder = Path(options.output)
    plan, identity = _plan(Path(options.model), folder, options)
    scorer = Scorer(plan, threads=options.threads, batch=options.batch or 0, inputs=options.inputs,
                    outputs=options.outputs, columns=options.columns, preprocess=options.preprocess or "",
                    top_k=options.top_k or 0, labels=_labels(options.labels), skip_bad=options.skip_bad)
    source = open_source(Path(options.input), scorer, options.split_items or 0)
    if not options.quiet:
        for note in source.notes:
            print(note, file=sys.stderr)
    processes = options.processes or max(1, len(allowed_cpus()) // options.threads)

    def progress(items: int, before: int) -> Any:
        return tqdm(total=items + before, initial=before, unit="item", desc="scoring", leave=False,
                    disable=True if options.quiet else None)

    summary = run(scorer, source, folder, identity, processes, progress)
    if options.json:
        print(json.dumps(summary.as_json(), indent=1))
    else:
        print(_text(summary, options))
    return 0


def _plan(model: Path, folder: Path, options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Return the plan to score with and its identity as JSON values; an ONNX file is built into `folder`."""
    if model.suffix != ".onnx":
        return model, {"file": model.name, "sha256": file_digest(model)}
    from infer_server.cli.build_engine import Bar
    from infer_server.engines.compiler.build import build_engine
    from infer_server.engines.compiler.engine_cache import EngineCache, model_digest
    plan = folder / BUILT
    if not plan.exists():
        with Bar(options.quiet) as bar:
            build = build_engine(model, cache=EngineCache(options.cache_dir or ""), progress=bar, notify=bar.notice)
        folder.mkdir(parents=True, exist_ok=True)
        build.save(plan)
    return plan, {"file": model.name, "model": model_digest(model), "sha256": file_digest(plan)}


def _labels(path: str | None) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if path else []


def _text(summary: Summary, options: argparse.Namespace) -> str:
    values = summary.as_json()
    failed = values["failed"]
    now = summary.outcome.items - summary.skipped
    lines = [f"{Path(options.output)}: {summary.outcome.items} items of {options.input} in {summary.files} "
             f"file{'s' * (summary.files != 1)}; {summary.skipped} were scored before, {now} now, {len(failed)} failed"]
    if now:
        lines.append(f"{values['seconds']:.1f} s on {summary.processes} process{'es' * (summary.processes != 1)}, "
                     f"{values['items_per_second']:.1f} items/s; {values['engine_share']:.0%} of it in the engine")
    lines += [f"failed: {name}: {why}" for name, why in list(failed.items())[:MAX_LISTED]]
    if len(failed) > MAX_LISTED:
        lines.append(f"... and {len(failed) - MAX_LISTED} more; --json lists all")
    return "\n".join(lines)


def names(text: str) -> list[str]:
    """Parse "a,b", as an argparse type."""
    return [part for part in text.split(",") if part]


def renamed(text: str) -> dict[str, str]:
    """Parse "a=x,b" to {"a": "x", "b": "b"}, as an argparse type."""
    columns = dict[str, str]()
    for part in names(text):
        name, equals, column = part.partition("=")
        if not name or bool(equals) != bool(column):
            raise argparse.ArgumentTypeError(f"'{part}' is not NAME or NAME=COLUMN")
        columns[name] = column or name
    return columns


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("score", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="plan file, or an ONNX file, which is built in FP32 through the engine cache")
    parser.add_argument("input", help="folder of images, .npz, .npy or Parquet files (searched recursively), or a file")
    parser.add_argument("-o", "--output", required=True, metavar="DIR",
                        help="folder of the results: part-00000.parquet, ...")
    rows = parser.add_argument_group("columns")
    rows.add_argument("--columns", type=names, metavar="NAME,...",
                      help="columns of the input to keep (default: all but the model's inputs; path for images, path "
                           "and item for arrays)")
    rows.add_argument("--inputs", type=renamed, default={}, metavar="INPUT=COLUMN,...",
                      help="columns of the model's inputs (default: those of their names)")
    rows.add_argument("--outputs", type=renamed, default={}, metavar="OUTPUT[=COLUMN],...",
                      help="outputs to write, and their columns (default: all, by their names)")
    rows.add_argument("--top-k", type=positive, metavar="K",
                      help="write the K largest elements of each output in its place: OUTPUT_index, OUTPUT_score")
    rows.add_argument("--labels", metavar="FILE",
                      help="file with a class's name on each line, for OUTPUT_label of --top-k")
    reading = parser.add_argument_group("reading")
    reading.add_argument("--preprocess", metavar="FILE|PRESET",
                         help="preprocessing of images (default: what the plan was calibrated with, or a preset by the "
                              "input's channels)")
    reading.add_argument("--skip-bad", action="store_true",
                         help="leave items out that cannot be read or do not fit, and count them; otherwise the first "
                              "such item ends the run")
    reading.add_argument("--split-items", type=positive, metavar="N",
                         help=f"approximate number of items of a file of results (default: those of a row group of "
                              f"Parquet, up to {MAX_ITEMS}; a {SPLITS}nd of other inputs)")
    running = parser.add_argument_group("running")
    running.add_argument("--batch", type=positive, metavar="N",
                         help="items of an execution (default: the most that the plan was built for)")
    running.add_argument("--processes", type=positive, metavar="N",
                         help="processes, each with an engine of its own (default: cores / threads)")
    running.add_argument("--threads", type=positive, default=1, metavar="N", help="threads of each engine (default 1)")
    running.add_argument("--cache-dir", metavar="DIR", help="folder of the engine cache, for an ONNX file")
    running.add_argument("--json", action="store_true", help="print the summary as JSON")
    running.add_argument("-q", "--quiet", action="store_true", help="show no progress and no notes")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(_command, make_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
