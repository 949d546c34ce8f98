"""Check bulk scoring against a loop over an engine: equal bytes, each id once after a kill, and the processor time.

20,000 digits in Parquet are scored by the command, by a loop over one engine that reads and writes the same files, and
with --spark and --ray by these frameworks. Limits: equal bytes; after a kill at half, each id once and the same files;
processor time at most 1.05 of the loop's, without start-up (the minimum of interleaved turns in one process).
"""
from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infer_server import Calibration, Scorer, build_engine, load_engine
from infer_server.batch.job import run as score_all
from infer_server.batch.sources import open_source
from infer_server.engines.ir.graph import Array

BAR = 1.05
BATCH = 32
DEMO = Path(__file__).resolve().parents[1] / "demo_data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--items", type=int, default=20_000, help="rows (default 20000)")
    parser.add_argument("--row-group", type=int, default=4096, help="rows of a row group (default 4096)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each measurement (default 5)")
    parser.add_argument("--spark", action="store_true", help="score on Spark, too (needs pyspark and Java)")
    parser.add_argument("--ray", action="store_true", help="score on Ray Data, too (needs ray[data])")


def run(arguments: argparse.Namespace) -> int:
    """Print each number with its limit; return 1 if one is missed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan, rows = folder / "digits.plan", folder / "rows.parquet"
        build_engine(DEMO / "model.onnx", precision="int8", max_batch=BATCH, calibration=Calibration(
            DEMO / "calibration", preprocess=DEMO / "preprocess.toml")).save(plan)
        write_rows(rows, arguments.items, arguments.row_group)
        checks = [same_bytes(plan, rows, folder), killed(plan, rows, folder, arguments.items),
                  processor_time(plan, rows, folder, arguments.turns)]
        expected = scores_in(pq.read_table(folder / "loop.parquet"))
        if arguments.spark:
            checks.append(outcome("Spark, mapInArrow", on_spark(plan, rows), expected))
        if arguments.ray:
            checks.append(outcome("Ray Data, map_batches, two actors", on_ray(plan, rows), expected))
    return 0 if all(checks) else 1


def write_rows(path: Path, items: int, row_group: int) -> None:
    images = np.random.default_rng(0).random((items, 784), np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(images.reshape(-1)), 784)
    pq.write_table(pa.table({"id": np.arange(items), "image": column}), path, row_group_size=row_group)


def loop(plan: Path, rows: Path, output: Path) -> Callable[[], None]:
    """Return a loop over one engine, as users write it; the engine is loaded."""
    engine = load_engine(plan)

    schema = pa.schema([("id", pa.int64()), ("logits", pa.list_(pa.float32(), 10))])

    def score() -> None:
        with pq.ParquetWriter(output, schema) as writer:
            for batch in pq.ParquetFile(rows).iter_batches(1024, use_threads=False):
                images = batch["image"].flatten().to_numpy().reshape(-1, 1, 28, 28)
                logits = np.concatenate([engine.run({"image": images[start:start + BATCH]})["logits"]
                                         for start in range(0, len(images), BATCH)])
                column = pa.FixedSizeListArray.from_arrays(pa.array(logits.reshape(-1)), 10)
                writer.write_batch(pa.record_batch([batch["id"], column], ["id", "logits"]))
    return score


def command(plan: Path, rows: Path, output: Path, processes: int = 2) -> list[str]:
    return [sys.executable, "-m", "infer_server", "score", str(plan), str(rows), "-o", str(output),
            "--split-items", "1024", "--processes", str(processes)]


def same_bytes(plan: Path, rows: Path, folder: Path) -> bool:
    loop(plan, rows, folder / "loop.parquet")()
    subprocess.run(command(plan, rows, folder / "clean"), check=True, stdout=subprocess.DEVNULL)
    return outcome("score, two processes", pq.read_table(folder / "clean"),
                   scores_in(pq.read_table(folder / "loop.parquet")))


def outcome(name: str, table: Any, expected: tuple[Array, Array]) -> bool:
    """Print and return whether a result has each id once, with the loop's bytes."""
    ids, logits = scores_in(table)
    good = np.array_equal(ids, expected[0]) and logits.tobytes() == expected[1].tobytes()
    print(f"{name}: {len(ids)} rows, {len(np.unique(ids))} ids, {'the' if good else 'NOT the'} bytes of a loop")
    return good


def scores_in(table: Any) -> tuple[Array, Array]:
    """Return the ids in order, and their logits."""
    table = table.sort_by("id")
    logits = np.array(table["logits"].combine_chunks().flatten().to_numpy(), np.float32)
    return table["id"].to_numpy(), logits.reshape(-1, 10)


def killed(plan: Path, rows: Path, folder: Path, items: int) -> bool:
    """Kill a run when half of its files are there, run it again, and compare with a run that was not killed."""
    output, total = folder / "killed", len(list((folder / "clean").glob("part-*")))
    process = subprocess.Popen(command(plan, rows, output), stdout=subprocess.DEVNULL)
    while process.poll() is None and len(list(output.glob("part-*"))) < total // 2:
        time.sleep(0.002)
    process.kill()
    process.wait()
    before = len(list(output.glob("part-*")))
    subprocess.run(command(plan, rows, output), check=True, stdout=subprocess.DEVNULL)
    ids, _ = scores_in(pq.read_table(output))
    files = [{path.name: path.read_bytes() for path in sorted((folder / name).glob("part-*"))}
             for name in ("clean", "killed")]
    good = np.array_equal(ids, np.arange(items)) and files[0] == files[1]
    print(f"killed when {before} of {total} files were there, run again: {len(ids)} rows, {len(np.unique(ids))} ids, "
          f"{'equal' if files[0] == files[1] else 'NOT equal'} files")
    return good


def processor_time(plan: Path, rows: Path, folder: Path, turns: int) -> bool:
    """Compare the processor time of a loop and of the command's work, in this process."""
    pa.set_cpu_count(1)
    once, scorer = loop(plan, rows, folder / "loop.parquet"), Scorer(plan)
    bar = nullcontext(SimpleNamespace(update=lambda items: None))

    def score() -> None:
        shutil.rmtree(folder / "timed", ignore_errors=True)
        score_all(scorer, open_source(rows, scorer), folder / "timed", {}, 1, lambda items, before: bar)

    score()         # loads the engine
    costs = [(cpu(once), cpu(score)) for _ in range(turns)]
    looped, scored = (min(column) for column in zip(*costs, strict=True))
    print(f"processor time: loop {looped:.3f} s, score {scored:.3f} s, {scored / looped:.3f} of it (bar {BAR})")
    return scored <= BAR * looped


def cpu(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def on_spark(plan: Path, rows: Path) -> Any:
    """Score the rows with Spark's mapInArrow on two local workers."""
    from pyspark.sql import SparkSession
    from pyspark.sql.pandas.types import from_arrow_schema
    settings = {"spark.driver.memory": "1g", "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1"}
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    try:
        spark.sparkContext.setLogLevel("ERROR")
        frame, scorer = spark.read.parquet(str(rows)), Scorer(plan)
        schema = from_arrow_schema(scorer.schema(pq.read_schema(rows)))
        return frame.mapInArrow(scorer.stream, schema).toArrow()
    finally:
        spark.stop()


def on_ray(plan: Path, rows: Path) -> Any:
    """Score the rows with Ray Data's map_batches on two actors."""
    import ray
    # Actors hold a CPU each: reading needs one more.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        scored = ray.data.read_parquet(str(rows)).map_batches(
            Scorer, fn_constructor_args=(str(plan),), batch_format="pyarrow", batch_size=1024,
            compute=ray.data.ActorPoolStrategy(size=2))
        return pa.concat_tables(list(scored.iter_batches(batch_format="pyarrow", batch_size=None)))
    finally:
        ray.shutdown()
