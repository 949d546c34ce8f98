"""State of the server as a whole, for metrics and the status page."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from infer_server.endpoints.inflight import Inflight
from infer_server.lifecycle import Lifecycle, ServerPhase
from infer_server.observing.load_report import LoadTotals
from infer_server.observing.machine import Samples
from infer_server.process import cpu_secs, resident_bytes
from infer_server.repository.model import VersionState
from infer_server.repository.repository import Repository
from infer_server.repository.roots import Durations


class ServerState:
    """State of the server. Belongs to the event loop, except usage()."""

    def __init__(self, repository: Repository, lifecycle: Lifecycle, inflight: Inflight, max_inflight_bytes: int,
                 processes: Callable[[], Mapping[str, int]] = dict, builds: Durations | None = None) -> None:
        """Observe a server.

        Parameters
        ----------
        repository, lifecycle, inflight, max_inflight_bytes
        processes : callable
            Returns the process ids of frontend workers by name.
        builds : Durations, optional
            Durations of the processes that have compiled models.
        """
        self.repository, self.lifecycle = repository, lifecycle
        self._builds = builds or Durations()
        self._inflight, self._max_inflight_bytes, self._processes = inflight, max_inflight_bytes, processes

    def gauges(self) -> Iterator[tuple[str, str, Samples]]:
        """Yield name, help text and samples of each metric."""
        yield "infer_server_inflight_bytes", "Bytes of requests and answers that the server holds", {
            "": self._inflight.held_bytes}
        yield "infer_server_inflight_limit_bytes", "Limit of infer_server_inflight_bytes (--max-inflight-mib)", {
            "": self._max_inflight_bytes}
        yield "infer_server_state", "State of the server: 1 for the one that it is in", {
            f'state="{phase.value}"': int(phase is self.lifecycle.phase) for phase in ServerPhase}
        yield "infer_server_startup_duration_secs", "Duration of each phase of the start, so far, in seconds", {
            f'phase="{phase}"': round(secs, 3) for phase, secs in self._startup_secs().items()}
        states = self._states()
        yield "infer_server_model_versions", "Number of model versions by state", {
            f'state="{state.value}"': states[state.value] for state in VersionState}

        yield from self._loading()

    def _loading(self) -> Iterator[tuple[str, str, Samples]]:
        """Yield the metrics of what precedes the load of a model: copying and compiling it."""
        yield "infer_model_builds_total", "Number of models that were compiled when they were loaded", {
            "": self._builds.count}
        yield "infer_model_build_secs_total", "Seconds of these builds", {"": round(self._builds.secs, 3)}
        remote = {f'repository="{root}"': root for root in self.repository.roots if root.is_remote}
        if remote:
            yield "infer_repository_reachable", "1 if the last call to a remote repository succeeded, else 0", {
                label: int(root.is_reachable) for label, root in remote.items()}
            yield "infer_repository_fetches_total", "Number of models that were copied from a remote repository", {
                label: root.fetched.count for label, root in remote.items()}
            yield "infer_repository_fetch_secs_total", "Seconds of these copies", {
                label: round(root.fetched.secs, 3) for label, root in remote.items()}

    def summary(self) -> dict[str, Any]:
        """Return the state of the server for the status page, except usage()."""
        return {
            "state": self.lifecycle.phase.value, "ready": self.lifecycle.ready,
            "inflight_bytes": self._inflight.held_bytes, "inflight_limit_bytes": self._max_inflight_bytes,
            "startup_secs": {phase: round(secs, 2) for phase, secs in self._startup_secs().items()},
            "versions": self._states()}

    def load_totals(self) -> LoadTotals:
        """Return the counters of all models that load reports are made of."""
        models = [*self.repository.models()]
        totals = [model.statistics.totals() for model in models]
        return LoadTotals(sum(each.requests for each in totals), sum(each.failures for each in totals),
                          sum(each.queue_ns for each in totals), sum(model.pending for model in models))

    def cpu_secs(self) -> float:
        """Return the CPU time of all processes of the server."""
        return float(sum(usage["cpu_secs"] for usage in self.usage().values()))

    def usage(self) -> dict[str, Any]:
        """Return CPU time in seconds and resident memory in bytes of each process. From any thread."""
        processes = {"server": "self", **{name: str(pid) for name, pid in self._processes().items()}}
        usage = {}
        for name, pid in processes.items():
            try:
                usage[name] = {"cpu_secs": round(cpu_secs(pid), 2), "resident_bytes": resident_bytes(pid)}
            except OSError:             # the process has ended, or this system has no /proc
                continue
        return usage

    def _states(self) -> Counter[str]:
        """Return the number of model versions in each state."""
        return Counter(entry.state for entry in self.repository.known())

    def _startup_secs(self) -> dict[str, float]:
        """Return the duration of each phase of the start; warm_up is the sum over models and a part of loading."""
        warm_up = sum(model.warmup_secs for model in self.repository.models())
        return {**self.lifecycle.startup.durations(), "warm_up": warm_up}
