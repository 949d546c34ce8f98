"""Concurrent client requests and accidents for a given time."""
from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import grpc

from scripts.soak import accidents
from scripts.soak.clients import Channel, clients
from scripts.soak.models import MORTAL
from scripts.stress import Running

_PAUSE_SECS = 0.002                 # pause of a client without a rate, from a response to its next request
_PATIENCE_SECS = 10.0               # most delay behind the schedule; requests due before that are dropped


class Soak:
    """Requests and accidents for `seconds` from now on, and their results.

    rates: requests per second of each client, by kind of request; clients without a rate send the next one when
    answered.
    """

    def __init__(self, seconds: float, seed: int = 0, rates: Mapping[str, float] | None = None) -> None:
        self._rng, self._rates = random.Random(seed), rates or {}
        self.seconds, self._ends = seconds, time.monotonic() + seconds
        self.seen: Counter[str] = Counter()             # keys that begin with "failure" are failures
        self.clients: Counter[str] = Counter()         # number of clients by kind of request
        self.longest_secs = 0.0                         # longest time to a response since the last reset

    async def run(self, server: Running, repository: Path) -> None:
        left = deque[socket.socket]()
        happening = {
            "killed processes of models": (accidents.killed_process(repository), 1.0),
            "killed clients": (accidents.killed_client(server.grpc_port), 0.2),
            "half-open connections": (
                accidents.half_open((server.grpc_port, server.http_port), self._rng, left), 0.02)}
        async with (grpc.aio.insecure_channel(server.address) as channel,
                    clients(server.address, server.http_port, repository, self._rng, self.seen) as senders):
            happening["reloads"] = accidents.reload(Channel(channel), repository), 0.02
            happening["models that came and went"] = accidents.passing_by(Channel(channel)), 0.02
            self.clients = Counter(what for what, _ in senders)
            await asyncio.gather(
                *(self._again_and_again(what, send, self._due(what)) for what, send in senders),
                *(self._again_and_again(what, act, _after(secs)) for what, (act, secs) in happening.items()))
        for connection in left:
            connection.close()

    @property
    def answers(self) -> int:
        return sum(self.seen[what] for what in self.clients)

    def failures(self) -> list[str]:
        return [f"{count} {what}" for what, count in self.seen.items() if what.startswith("failure")]

    def share(self, load: float) -> dict[str, float]:
        """Return the rate of each client at this share of the throughput that was measured."""
        return {what: load * self.seen[what] / self.seconds / count for what, count in self.clients.items()}

    def _due(self, what: str) -> Iterator[float]:
        return arrivals(self._rates[what], self._rng) if what in self._rates else _after(_PAUSE_SECS)

    async def _again_and_again(self, what: str, act: Callable[[], Awaitable[None]], due: Iterator[float]) -> None:
        """Repeat an accident or a request until the end, at least once. Its exceptions count as failures."""
        over = False
        while not over:
            begin = time.monotonic()
            try:
                await act()
                self.seen[what] += 1
            except (grpc.aio.AioRpcError, OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
                details = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                self.seen[f"failure: {what}: {type(error).__name__} {details}"] += 1
            if MORTAL not in what:                      # requests for MORTAL may wait for its process to start
                self.longest_secs = max(self.longest_secs, time.monotonic() - begin)
            await asyncio.sleep(min(next(due), self._ends) - time.monotonic())
            over = time.monotonic() >= self._ends


def _after(secs: float) -> Iterator[float]:
    """Yield times that are `secs` after the previous one has ended."""
    while True:
        yield time.monotonic() + secs


def arrivals(rate: float, rng: random.Random, now: Callable[[], float] = time.monotonic) -> Iterator[float]:
    """Yield the times of Poisson arrivals at `rate` per second, however long each takes.

    Arrivals that are due more than _PATIENCE_SECS ago are dropped, so a busy machine need not catch up.
    """
    due = now()
    while True:
        due = max(due + rng.expovariate(rate), now() - _PATIENCE_SECS)
        yield due
