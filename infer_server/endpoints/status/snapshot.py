"""Data of the status page: server and models at one moment, as JSON, for any number of viewers.

Counters are cumulative, on the server's monotonic clock: each viewer computes rates from two snapshots.
"""
from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from infer_server.batching.statistics import Counters
from infer_server.endpoints.status.history import MAX_MODELS, History
from infer_server.endpoints.status.state import ServerState
from infer_server.errors import RepositoryError
from infer_server.protocol.redaction import redacted
from infer_server.protos.version import NAME, VERSION
from infer_server.repository.model import Model
from infer_server.repository.repository import IndexEntry
from infer_server.workers import PeriodicValue, run_off_loop

_QUANTILES = (0.5, 0.9, 0.99)
_LISTING_SECS = 10.0            # time for which a listing of the repository is reused
_MAX_CHARACTERS = 2000          # limit of the reason for a failure


class _Entry(NamedTuple):
    """Version of a model: its entry in the repository index, and the model if it is loaded."""
    listed: IndexEntry
    model: Model | None
    pending: int


class Snapshots:
    """Cache of snapshots. Belongs to the event loop; JSON is made on a thread, at most once in `cache_secs`."""

    def __init__(self, state: ServerState, history: History, workers: int, cache_secs: float) -> None:
        """Make snapshots of a server with this number of frontend workers."""
        self._state, self._history, self._workers = state, history, workers
        self._started = time.monotonic()
        self._names = PeriodicValue(self._list_names, _LISTING_SECS)
        self._current = PeriodicValue(self._make_snapshot, cache_secs)
        self._past = PeriodicValue(self._make_history, cache_secs)

    async def current(self) -> bytes:
        return await self._current.get()

    async def past(self) -> bytes:
        return await self._past.get()

    async def _list_names(self) -> tuple[list[str], str]:
        """Return the models in the repository, and the reason if it cannot be read."""
        try:
            return await self._state.repository.names(), ""
        except RepositoryError as error:
            return [], redacted(str(error))

    async def _make_snapshot(self) -> bytes:
        names, problem = await self._names.get()
        known = self._state.repository.known()
        seen = {entry.name for entry in known}
        known += [IndexEntry(name, "", "", "") for name in names if name not in seen]
        loaded = {(model.name, str(model.version)): model for model in self._state.repository.models()}
        entries = []
        for listed in sorted(known, key=_order)[:MAX_MODELS]:
            model = loaded.get((listed.name, listed.version))
            entries.append(_Entry(listed, model, model.pending if model else 0))
        now = time.monotonic()
        server = {"name": NAME, "version": VERSION, "now_secs": round(now, 3),
                  "uptime_secs": round(now - self._started), "workers": self._workers, "problem": problem,
                  **self._state.summary()}
        return await run_off_loop(lambda: _json({
            "server": {**server, "processes": self._state.usage()}, "omitted": max(0, len(known) - MAX_MODELS),
            "models": [_described(entry) for entry in entries]}))

    async def _make_history(self) -> bytes:
        samples = self._history.as_json()
        return await run_off_loop(lambda: _json(samples))


def _order(entry: IndexEntry) -> tuple[bool, str, str]:
    """Return a sort key: by name, versions that were never loaded last."""
    return not entry.state, entry.name, entry.version


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _described(entry: _Entry) -> dict[str, Any]:
    listed, model = entry.listed, entry.model
    about = {"name": listed.name, "version": listed.version, "state": listed.state,
             "reason": listed.reason[:_MAX_CHARACTERS]}
    if model is None:
        return about
    counters = model.statistics.snapshot()
    return {
        **about, "revision": model.revision.decode(errors="replace"), "platform": model.platform,
        "precision": model.precision, "built_secs": round(model.built_secs), "instances": _instances(model),
        "memory_bytes": model.memory_bytes, "load_secs": round(model.load_secs, 3),
        "warmup_secs": round(model.warmup_secs, 3), "pending": entry.pending,
        "requests": counters.success.count, "items": counters.inference_count,
        "failures": {reason.value: count for reason, count in counters.failures.items() if count},
        "latencies_ms": _milliseconds(model.statistics.quantiles(_QUANTILES)["request"]),
        "batches": _batches(counters), "closed": {reason: count for reason, count in counters.closed.items() if count}}


def _instances(model: Model) -> str:
    """Return the number of instances as text, by GPU."""
    names = {gpu.number: str(gpu) for gpu in model.gpus}
    return ", ".join(f"{count} on {names[device]}" if device in names else str(count)
                     for device, count in Counter(model.config.devices).items())


def _batches(counters: Counters) -> list[tuple[int, int, float]]:
    """Return batch size, number of executions and mean time in ms of the executed batches."""
    return [(size, batch.compute_infer.count,
             float(f"{batch.compute_infer.ns / 1e6 / max(1, batch.compute_infer.count):.4g}"))
            for size, batch in sorted(counters.batches.items())]


def _milliseconds(ns: Sequence[float]) -> list[float] | None:
    """Convert times to ms; None if there were no requests in the last minute."""
    return None if ns[0] != ns[0] else [float(f"{each / 1e6:.4g}") for each in ns]
