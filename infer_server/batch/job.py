"""A bulk scoring job: every split of an input to a file of results, on this machine's cores."""
from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer_server.batch.columns import arrow
from infer_server.batch.pool import Pool, Report
from infer_server.batch.results import Outcome, PartWriter, Results
from infer_server.batch.scorer import Scorer
from infer_server.batch.sources import Source, Split
from infer_server.engines.errors import InputError

REPORT_SECONDS = 0.25       # least time between two reports of a worker


@dataclass(frozen=True)
class Done:
    """Report of a worker: items since its last report, and the outcome of a split if it is done."""
    items: int
    engine_seconds: float = 0.0
    busy_seconds: float = 0.0
    outcome: Outcome | None = None


@dataclass(frozen=True)
class SplitWork:
    """Scoring of a split, in any process."""
    scorer: Scorer
    source: Source
    results: Results

    def __call__(self, split: Split, report: Report) -> None:
        """Score a split and write its file. Raises InputError for an item that cannot be scored, unless skipped."""
        pa = arrow()
        pa.set_cpu_count(1)     # the pool has a process for each core
        begin = last = time.perf_counter()
        engine, reported = self.scorer.engine_seconds, 0
        with self.results.writing(split.number, self.scorer.schema(self.source.schema(self.scorer))) as part:
            for chunk in self.source.read(split, self.scorer):
                self._score(chunk, part)
                if (now := time.perf_counter()) - last > REPORT_SECONDS:
                    report(Done(part.outcome.items - reported))
                    last, reported = now, part.outcome.items
        report(Done(part.outcome.items - reported, self.scorer.engine_seconds - engine, time.perf_counter() - begin,
                    part.outcome))

    def _score(self, chunk: Any, part: PartWriter) -> None:
        failed = dict(chunk.failed)
        if not failed or len(failed) < chunk.items:
            scored, bad = self.scorer.score(chunk.batch)
            failed |= {chunk.names(row): why for row, why in bad.items()}
            part.write(_table(scored))
        if failed and not self.scorer.skip_bad:
            name, why = next(iter(failed.items()))
            raise InputError(f"{name}: {why}. --skip-bad leaves such items out, and counts them")
        part.outcome.add(Outcome(chunk.items, failed))


def _table(scored: Any) -> Any:
    pa = arrow()
    return pa.Table.from_batches([scored]) if isinstance(scored, pa.RecordBatch) else scored


@dataclass
class Summary:
    """Summary of a run.

    files           files of results, with those that were there before
    skipped         items that were scored before
    seconds         wall time of this run's scoring
    engine_seconds  time in the engine, of all processes
    busy_seconds    time that processes worked on splits
    """
    files: int
    processes: int
    skipped: int = 0
    seconds: float = 0.0
    engine_seconds: float = 0.0
    busy_seconds: float = 0.0
    outcome: Outcome = field(default_factory=Outcome)

    def add(self, report: Done) -> None:
        """Add a worker's report."""
        self.engine_seconds += report.engine_seconds
        self.busy_seconds += report.busy_seconds
        if report.outcome:
            self.outcome.add(report.outcome)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object that --json prints."""
        now = self.outcome.items - self.skipped
        return {"items": self.outcome.items, "skipped": self.skipped, "failed": self.outcome.failed,
                "files": self.files, "processes": self.processes, "seconds": self.seconds,
                "items_per_second": now / self.seconds if now and self.seconds else None,
                "engine_share": self.engine_seconds / self.busy_seconds if self.busy_seconds else None}


def inputs_of(source: Source) -> dict[str, Any]:
    """Return the identity of the input: names, sizes and times of its files, and the splits."""
    files = [(str(file), (status := file.stat()).st_size, status.st_mtime_ns) for file in source.files]
    return {"files": len(files), "digest": hashlib.sha256(repr(files).encode()).hexdigest(),
            "items": sum(split.items for split in source.splits), "splits": len(source.splits)}


def run(scorer: Scorer, source: Source, folder: Path, plan: dict[str, Any], processes: int,
        progress: Callable[[int, int], Any]) -> Summary:
    """Score all splits that have no file yet.

    Parameters
    ----------
    scorer : Scorer
    source : Source
    folder : Path
        Folder of the results.
    plan : dict
        Identity of the plan, as JSON values.
    processes : int
        Maximum number of worker processes; with 1 this process scores.
    progress : callable
        Called with (items to score, items scored before); returns a context manager with `update(items)`.

    Raises
    ------
    InputError
        The folder holds results of another run, or an item cannot be scored.
    """
    results = Results(folder)
    manifest = {"plan": plan, "options": scorer.settings(), "inputs": inputs_of(source)}
    with results.claimed(manifest):
        done = {split.number: outcome for split in source.splits if (outcome := results.done(split.number))}
        todo = [split for split in source.splits if split.number not in done]
        summary = Summary(len(source.splits), max(1, min(processes, len(todo))))
        for outcome in done.values():
            summary.outcome.add(outcome)
        summary.skipped = summary.outcome.items
        summary.outcome.failed |= source.failed
        begin = time.perf_counter()
        with progress(sum(split.items for split in todo), summary.skipped) as bar:
            def report(done: Done) -> None:
                bar.update(done.items)
                summary.add(done)

            _perform(SplitWork(scorer, source, results), todo, summary.processes, report)
        summary.seconds = time.perf_counter() - begin
        results.finish()
    return summary


def _perform(work: SplitWork, splits: Sequence[Split], processes: int, report: Report) -> None:
    if processes == 1:
        for split in splits:
            work(split, report)
        return
    with Pool(work, processes) as pool:
        for value in pool.run(splits):
            report(value)
