"""Runs of MLPerf's load generator, which issues samples from a thread of its own and is notified of each answer.

A sample is a request of one item. The generator has no notion of failures: a failed request is reported as answered,
and counted here. https://github.com/mlcommons/inference/tree/master/loadgen
"""
from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer_server.clients.channels import StatusError
from infer_server.clients.errors import ClientError
from infer_server.clients.load.mlperf.search import highest_rate
from infer_server.clients.load.schedule import Scenario
from infer_server.clients.load.target import Target
from infer_server.clients.load.transports.transport import Send

if TYPE_CHECKING:
    import mlperf_loadgen

_MARK = ":::MLLOG "
_MS = 1e6                   # nanoseconds
_TRIALS = 3                 # requests that estimate the server's speed before the run; the last one counts
_MAX_IN_FLIGHT = 4096       # further samples wait in the client; their latency includes the wait


@dataclass(frozen=True)
class Run:
    """Result of one run of the generator."""
    rate: float | None              # samples a second, where the scenario has a rate
    samples: int
    samples_per_sec: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    holds: bool                     # the bound on latency, where there is one; and nothing failed
    invalid: str                    # why it is no valid run by MLPerf's rules; "": it is one
    errors: dict[str, int]          # gRPC status -> samples


@dataclass(frozen=True)
class ScenarioResult:
    """Result of one server in a scenario."""
    url: str
    metric: str
    value: float                    # 0: no rate holds
    runs: list[Run]

    @property
    def decisive(self) -> Run:
        """The run with the reported value, or the last run if no rate holds."""
        return next((run for run in self.runs if run.rate == self.value), self.runs[-1])


def require_loadgen() -> None:
    """Raise ClientError if the load generator is not installed. Called before a test starts."""
    if importlib.util.find_spec("mlperf_loadgen") is None:
        raise ClientError("--scenario needs MLCommons' load generator: pip install 'infer-server[loadgen]'")


async def measure(scenario: Scenario, target: Target, duration: float, timeout: float, seed: int) -> ScenarioResult:
    generator = _Generator(scenario, target, duration, timeout, seed)
    runs: list[Run] = []
    guess = 1 / [await target.try_once() for _ in range(_TRIALS)][-1]

    async def run(rate: float) -> Run:
        runs.append(await generator.run(rate))
        return runs[-1]

    async def holds(rate: float) -> bool:
        return (await run(rate)).holds

    if scenario.name == "Server":
        return ScenarioResult(target.url, f"samples/s whose p99 is at most {scenario.latency_ms:g} ms",
                              await highest_rate(holds, guess), runs)
    first = await run(guess)
    if scenario.name == "Offline":
        if first.samples < first.samples_per_sec * duration:        # the run ended early: repeat it with more samples
            await run(first.samples_per_sec)
        return ScenarioResult(target.url, "samples/s", runs[-1].samples_per_sec, runs)
    single = scenario.name == "SingleStream"
    return ScenarioResult(target.url, f"ms, the {'90' if single else '99'}th percentile of a query's latency",
                          first.p90_ms if single else first.p99_ms, runs)


class _Generator:
    def __init__(self, scenario: Scenario, target: Target, duration: float, timeout: float, seed: int) -> None:
        self._scenario, self._target, self._duration, self._timeout, self._seed = (
            scenario, target, duration, timeout, seed)
        self._count = 0             # number of runs so far

    async def run(self, rate: float) -> Run:
        import mlperf_loadgen
        system = _System(self._target.requests, self._timeout)
        logs = self._scenario.logs
        if logs:
            logs = logs / f"{self._count}"
            logs.mkdir(parents=True, exist_ok=True)
        self._count += 1
        with nullcontext(str(logs)) if logs else tempfile.TemporaryDirectory() as folder:
            sut = mlperf_loadgen.ConstructSUT(system.issue, lambda: None)
            samples = len(self._target.requests)
            library = mlperf_loadgen.ConstructQSL(samples, samples, lambda chosen: None, lambda chosen: None)
            generating = asyncio.ensure_future(asyncio.to_thread(
                mlperf_loadgen.StartTestWithLogSettings, sut, library, self._settings(rate), _logging(folder),
                f"{folder}/audit.config"))
            try:
                await asyncio.shield(generating)
            finally:
                system.stopped = True           # further queries of the generator are answered at once
                if not generating.done():
                    await _over(generating)
                mlperf_loadgen.DestroyQSL(library)
                mlperf_loadgen.DestroySUT(sut)
            if system.failure:
                raise system.failure
            return self._read(read_log(Path(folder) / "mlperf_log_detail.txt"), system, rate)

    def _settings(self, rate: float) -> mlperf_loadgen.TestSettings:
        import mlperf_loadgen
        scenario, settings = self._scenario, mlperf_loadgen.TestSettings()
        settings.scenario = getattr(mlperf_loadgen.TestScenario, scenario.name)
        settings.mode = mlperf_loadgen.TestMode.PerformanceOnly
        settings.min_duration_ms = round(self._duration * 1000)
        settings.min_query_count = scenario.queries
        settings.qsl_rng_seed = settings.sample_index_rng_seed = settings.schedule_rng_seed = self._seed
        settings.multi_stream_samples_per_query = scenario.samples_per_query
        settings.server_target_qps = settings.offline_expected_qps = rate
        settings.server_target_latency_ns = round(scenario.latency_ms * _MS)
        settings.server_target_latency_percentile = 0.99
        return settings

    def _read(self, log: dict[str, Any], system: _System, rate: float) -> Run:
        many = "_per_query" if self._scenario.name == "MultiStream" else ""
        p50, p90, p99 = (log[f"result_{percent}.00_percentile{many}_latency_ns"] / _MS for percent in (50, 90, 99))
        is_server = self._scenario.name == "Server"
        return Run(
            rate if is_server else None, system.samples,
            log.get("result_completed_samples_per_sec") or log.get("result_samples_per_second")
            or system.samples / max(system.seconds, 1e-9),
            p50, p90, p99, not system.errors and not (is_server and p99 > self._scenario.latency_ms),
            "" if log["result_validity"] == "VALID" else " ".join(
                f"{log['result_invalid_reason']} {log['early_stopping_result']}".split()), dict(system.errors))


class _System:
    """System under test, as the generator calls it."""

    def __init__(self, requests: Sequence[Send], timeout: float) -> None:
        self._requests, self._timeout = requests, timeout
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._tasks = set[asyncio.Task[None]]()         # the loop itself keeps no task alive
        self._began = self._ended = 0.0
        self.stopped = False
        self.failure: Exception | None = None           # the first that is no failure of a sample
        self.samples = 0
        self.errors = Counter[str]()

    @property
    def seconds(self) -> float:
        """Return the time from the first sample to the last answer."""
        return self._ended - self._began

    def issue(self, samples: Sequence[mlperf_loadgen.QuerySample]) -> None:
        """Start requests for samples. Called on the generator's thread; the samples are invalid after the call."""
        pairs = [(sample.id, sample.index) for sample in samples]
        if self.stopped:
            _complete(number for number, _ in pairs)
        else:
            self._loop.call_soon_threadsafe(self._begin, pairs)

    def _begin(self, samples: Sequence[tuple[int, int]]) -> None:
        self._began = self._began or self._loop.time()
        for number, index in samples:
            task = self._loop.create_task(self._send(number, self._requests[index]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, number: int, request: Send) -> None:
        try:
            async with self._slots:
                if not self.stopped:
                    await request(self._timeout)
        except StatusError as error:
            self.errors[error.status] += 1
        except Exception as error:                      # nothing awaits the task: raised after the run
            self.failure, self.stopped = self.failure or error, True
        finally:
            self.samples += 1
            self._ended = self._loop.time()
            _complete([number])


async def _over(generating: asyncio.Future[None]) -> None:
    """Wait after an interrupt for the generator, whose run cannot be stopped. A second interrupt ends the process."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    print("\n" * sys.stderr.isatty() + "load-test: waiting for the generator, whose run cannot be stopped; "
          "Ctrl-C again leaves at once", file=sys.stderr, flush=True)
    try:
        await generating
    finally:
        signal.signal(signal.SIGINT, before)


def _complete(numbers: Any) -> None:
    import mlperf_loadgen
    mlperf_loadgen.QuerySamplesComplete([mlperf_loadgen.QuerySampleResponse(number, 0, 0) for number in numbers])


def _logging(folder: str) -> mlperf_loadgen.LogSettings:
    import mlperf_loadgen
    settings, output = mlperf_loadgen.LogSettings(), mlperf_loadgen.LogOutputSettings()
    output.outdir, output.copy_summary_to_stdout = folder, False
    settings.log_output, settings.enable_trace = output, False
    return settings


def read_log(path: Path) -> dict[str, Any]:
    """Return the values of a detailed log by key."""
    entries = (json.loads(line.split(_MARK, 1)[1]) for line in path.read_text().splitlines() if _MARK in line)
    return {entry["key"]: entry["value"] for entry in entries}
