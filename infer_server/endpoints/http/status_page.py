"""The page at /: what the server does, for a person with a browser. Plain HTML that asks for itself again."""
from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from http import HTTPStatus

from infer_server.batching.statistics import Counters, Statistics
from infer_server.endpoints.http.messages import HttpRequest, HttpResponse
from infer_server.lifecycle import Lifecycle
from infer_server.repository.model import Model
from infer_server.repository.repository import IndexEntry, Repository
from protos.version import NAME, VERSION

_REFRESH_SECS = 2
_QUANTILES = (0.5, 0.9, 0.99)
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 96em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; width: 100%; margin-bottom: 2em }
th, td { text-align: left; padding: .3em .6em; border-bottom: 1px solid #ddd; vertical-align: top; white-space: nowrap;
  font-variant-numeric: tabular-nums }
th { font-weight: 600 } td[colspan] { white-space: normal; overflow-wrap: anywhere }
.bar { display: inline-block; height: .8em; background: #4a7ebb; margin-right: .4em }
.READY { color: #17752e } .UNAVAILABLE { color: #b3261e } .LOADING, .UNLOADING { color: #8a6100 }
"""


@dataclass(frozen=True)
class _Look:
    """What a model had done when it was looked at."""
    at: float
    requests: int
    items: int


class StatusPage:
    """Rates are those since the page was last made."""

    def __init__(self, repository: Repository, lifecycle: Lifecycle, workers: int) -> None:
        self._repository, self._lifecycle, self._workers = repository, lifecycle, workers
        self._started = time.monotonic()
        self._looks: dict[Statistics, _Look] = {}   # a model that is loaded again counts anew

    async def page(self, _: HttpRequest) -> HttpResponse:
        index = await self._repository.index()
        models = self._repository.models()
        counters = {(model.name, model.version): model.statistics.snapshot() for model in models}
        state = "ready" if self._lifecycle.ready else f"not ready ({self._lifecycle.phase.value})"
        rows = [*self._rows(index, models, counters)] or [["there is no model"]]
        body = "\n".join((
            f"<h1>{NAME} {VERSION}</h1>",
            f"<p>{state}; up for {_duration(time.monotonic() - self._started)}"
            f"{f'; {self._workers} workers read and answer' if self._workers > 1 else ''}</p>",
            *_table(("model", "version", "state", "instances", "loaded in", "waiting", "requests/s", "items/s", "p50",
                     "p90", "p99", "answered", "failed"), rows),
            *(line for model in models for line in _batches(model, counters[model.name, model.version]))))
        html = (f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{NAME}</title>"
                f"<meta http-equiv=refresh content={_REFRESH_SECS}><style>{_STYLE}</style></head>"
                f"<body>{body}</body></html>")
        return HttpResponse((html.encode(),), HTTPStatus.OK, "text/html; charset=utf-8", {"Cache-Control": "no-store"})

    def _rows(self, index: Iterable[IndexEntry], models: Iterable[Model],
              counters: Mapping[tuple[str, int], Counters]) -> Iterator[list[str]]:
        by_version = {(model.name, str(model.version)): model for model in models}
        looks, now = {}, time.monotonic()
        for entry in index:
            model = by_version.get((entry.name, entry.version))
            state = escape(entry.state or "not loaded")
            row = [escape(entry.name), escape(entry.version), f'<span class="{state}">{state}</span>']
            if model is None:
                yield [*row[:2], f"{row[2]} {escape(entry.reason)}"]
                continue
            counted = counters[model.name, model.version]
            looks[model.statistics] = look = _Look(now, counted.success.count, counted.inference_count)
            since = self._looks.get(model.statistics, _Look(self._started, 0, 0))
            secs = max(1e-3, now - since.at)
            latencies = model.statistics.quantiles(_QUANTILES)["request"]
            yield [*row, _instances(model), f"{model.load_secs:.2f} s", str(model.pending),
                   f"{(look.requests - since.requests) / secs:.1f}", f"{(look.items - since.items) / secs:.1f}",
                   *map(_time, latencies), str(counted.success.count), str(counted.fail.count)]
        self._looks = looks


def _instances(model: Model) -> str:
    """How many there are, and where."""
    names = {gpu.number: escape(str(gpu)) for gpu in model.gpus}
    return ", ".join(f"{count} on {names[device]}" if device in names else str(count)
                     for device, count in Counter(model.config.devices).items())


def _batches(model: Model, counters: Counters) -> Iterator[str]:
    """How large the executed batches were, and why there was no more in them."""
    if not counters.batches:
        return
    yield f"<h2>{escape(model.name)} {model.version}</h2>"
    most = max(batch.compute_infer.count for batch in counters.batches.values())
    yield from _table(("batch size", "executions", "mean time", "share"), (
        [str(size), str(batch.compute_infer.count), _time(batch.compute_infer.ns / max(1, batch.compute_infer.count)),
         f'<span class=bar style="width:{12 * batch.compute_infer.count / most:.2f}em"></span>'
         f"{batch.compute_infer.count / max(1, counters.execution_count):.0%}"]
        for size, batch in sorted(counters.batches.items())))
    reasons = ", ".join(f"{escape(reason)} {count}" for reason, count in counters.closed.items() if count)
    yield f"<p>Batches closed: {reasons}.</p>"


def _table(head: Iterable[str], rows: Iterable[list[str]]) -> Iterator[str]:
    names = list(head)
    yield f"<table><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    for row in rows:
        last = f"<td colspan={len(names) - len(row) + 1}>" if len(row) < len(names) else "<td>"
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in row[:-1])}{last}{row[-1]}</td></tr>"
    yield "</table>"


def _time(ns: float) -> str:
    if ns != ns:            # nan: there was none
        return "&ndash;"
    return f"{ns / 1e6:.3g} ms" if ns < 1e9 else f"{ns / 1e9:.3g} s"


def _duration(secs: float) -> str:
    hours, rest = divmod(int(secs), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
