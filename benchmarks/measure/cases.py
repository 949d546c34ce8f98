"""Measurement of a case: load the builds for one feed, compare their outputs, and time them in turns."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.measure.accuracy import MIN_COSINE, Judge, Outputs, compare
from benchmarks.measure.cycles import Counter
from benchmarks.measure.measuring import MIN_TURNS, Clock, WallClock, WorkClock, interleaved
from benchmarks.measure.results import Case, Row
from benchmarks.models import Model
from benchmarks.runtimes.builds import Build, Log
from benchmarks.runtimes.runtimes import LOADERS, Feed, OnnxRuntime, Session

HOPELESS = 1.5      # builds slower than this multiple of the peer's fastest in the first turn take no more turns


class Bench:
    """Bench for the builds of one model in one precision, which loads, compares and times them."""

    def __init__(self, model: Model, precision: str, builds: Sequence[Build], log: Log) -> None:
        self.model, self.precision, self.builds, self._log = model, precision, builds, log

    def metrics(self, judge: Judge) -> dict[Build, Mapping[str, float]]:
        """Return the model's own metric of each build that runs."""
        feed = self.model.feed(1)
        reference = judge.outputs(OnnxRuntime(self.model.source, feed, "fp32", 1))
        metrics = {}
        for build in self.builds:
            self._log(f"  metric of {build.runtime}, {build.name}")
            session = self._load(build, feed, 1)
            if not isinstance(session, str):
                metrics[build] = judge.metric(reference, judge.outputs(session))
        return metrics

    def case(self, batch: int, threads: int, counter: Counter, seconds: float,
             metrics: Mapping[Build, Mapping[str, float]], fewest: int = MIN_TURNS, screened: bool = False) -> Case:
        """Measure all builds at a batch size and number of threads.

        One thread is timed by its CPU work, several by the wall clock, for at least `fewest` turns. metrics: added to
        the rows. screened: builds that are far too slow in a first turn take no more turns.
        """
        feed = self.model.feed(batch)
        reference = _outputs(OnnxRuntime(self.model.source, feed, "fp32", 1))
        sessions = {build: self._load(build, feed, threads) for build in self.builds}
        rows = {build: self._row(build, session, reference) for build, session in sessions.items()}
        calls = {build: session.infer for build, session in sessions.items()
                 if not isinstance(session, str) and not rows[build].failure}
        clock: Clock = WorkClock(counter) if threads == 1 else WallClock()
        slow = hopeless(interleaved(clock, calls, 0, fewest=1)) if screened else {}
        for build, cost in slow.items():
            del calls[build]
            rows[build] = replace(rows[build], failure=f"too slow, {cost:.3g} {clock.unit} in its first turn")
        turns = interleaved(clock, calls, seconds, fewest)
        timed = [replace(row, turns=tuple(turns.get(build, ())), metric=metrics.get(build, {}))
                 for build, row in rows.items()]
        return Case(self.model.name, self.precision, batch, threads, clock.unit, tuple(timed))

    def _load(self, build: Build, feed: Feed, threads: int) -> Session | str:
        """Return the loaded session, or the reason why it could not be loaded."""
        if build.file is None:
            return build.failure
        try:
            return LOADERS[build.runtime](build.file, feed, self.precision, threads)
        except Exception as error:      # any error by which a runtime rejects the model
            return _reason(error)

    def _row(self, build: Build, session: Session | str, reference: Outputs) -> Row:
        """Return a build's row of the results, without times."""
        if isinstance(session, str):
            return Row(build.runtime, build.name, failure=session)
        try:
            agreement = compare(reference, _outputs(session))
        except Exception as error:      # an error of the runtime, or ValueError if the outputs differ in shape
            return Row(build.runtime, build.name, failure=_reason(error))
        agrees = agreement.cosine >= MIN_COSINE[self.precision]
        if not agrees:
            self._log(f"  {build.runtime}, {build.name}: cosine {agreement.cosine:.4f} with float32")
        return Row(build.runtime, build.name, cosine=agreement.cosine, error=agreement.error, agrees=agrees,
                   note=session.note)


def hopeless(turns: Mapping[Build, Sequence[float]]) -> dict[Build, float]:
    """Return the builds whose first turn costs far more than that of the runtime's fastest build, with its cost."""
    return {build: cost for build, (cost, *_) in turns.items()
            if cost > HOPELESS * min(other for same, (other, *_) in turns.items() if same.runtime == build.runtime)}


def _outputs(session: Session) -> Outputs:
    session.infer()
    return session.outputs()


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
