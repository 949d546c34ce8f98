"""Load generation: warm-up, then windows until they agree or the time is over.

One event loop sends all requests. They are serialised beforehand and responses are not parsed, so that the client takes
little of a machine that it may share with the server.
"""
from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infer_server.clients.channels import StatusError
from infer_server.clients.load.alarm import Alarm
from infer_server.clients.load.measure import (
    OK,
    WINDOWS,
    LoadWindow,
    Recorder,
    Summary,
    is_stable,
    latency_of,
    summarise,
)
from infer_server.clients.load.schedule import Closed, Load, Open
from infer_server.clients.load.statistics import Reading, ServerSplit, difference
from infer_server.clients.load.transports.transport import Send, StartedSend

MAX_IN_FLIGHT = 4096            # in an open loop; further requests wait in the client, and latency includes that wait
MAX_BYTES_IN_FLIGHT = 512 << 20
LONGEST_SLEEP = 0.05            # seconds after which a dispatcher looks whether it should stop
WINDOWS_IN_DURATION = 10


@dataclass(frozen=True)
class Timing:
    """Seconds of warm-up, and the maximum of the measurement."""
    warmup: float
    duration: float


@dataclass(frozen=True)
class LoadLevel:
    """Result of one load: a concurrency or a rate."""
    load: Load
    client: Summary
    server: ServerSplit | None      # None: the server keeps no statistics, or executed nothing
    stopped_by: str                 # "stable" (the last three windows) or "duration" (all of it)
    messages: dict[str, str]        # gRPC status -> its first message
    client_busy: float              # share of the interval in which the load generator's thread computed

    @property
    def client_cpu_us(self) -> float:
        """Processor time of the load generator's thread per request in microseconds; nan if none ended."""
        ended = self.client.requests + sum(self.client.errors.values())
        return self.client_busy * self.client.seconds * 1e6 / ended if ended else math.nan

    @property
    def parts_ms(self) -> dict[str, float]:
        """The mean latency by where it went; empty if nothing was answered, or the server keeps no statistics.

        client : from the moment at which a request was due until it was sent, and the load generator's processor time.
        network : the rest: the network, gRPC at both ends, and the server's work around the model.
        queue, compute : the server's own statistics.
        """
        server = self.server
        if server is None or not self.client.requests:
            return {}
        inside = {"queue": server.queue_ms,
                  "compute": server.compute_input_ms + server.compute_infer_ms + server.compute_output_ms}
        own = self.client.mean_send_delay_ms + self.client_cpu_us / 1e3
        return {"client": own, "network": max(0.0, self.client.latency.mean - own - sum(inside.values())), **inside}


class _Mark(NamedTuple):
    """End of a window."""
    at: float                       # seconds of the monotonic clock
    cpu: float                      # seconds that the thread has computed
    statistics: Reading | None


class Sender:
    """Sender of requests in turn, which records each result."""

    def __init__(self, requests: Sequence[Send], request_bytes: int, timeout: float) -> None:
        """request_bytes: approximate size of a request."""
        self.recorder = Recorder()
        self.messages: dict[str, str] = {}
        self.max_in_flight = max(1, min(MAX_IN_FLIGHT, MAX_BYTES_IN_FLIGHT // request_bytes))
        self._next_request = itertools.cycle([
            (request, request.start if isinstance(request, StartedSend) else None) for request in requests]).__next__
        self._timeout = timeout

    def send(self, due: float | None, group: asyncio.TaskGroup, ended: Callable[[], None]) -> None:
        """Send the next request, in a task of the group if it needs one; `ended` is called when it has ended.

        due: on time.monotonic(); None for now.
        """
        (send, start), sent = self._next_request(), time.monotonic()
        due_at = sent if due is None else due

        def done(error: StatusError | None) -> None:
            if error:
                self.messages.setdefault(error.status, error.details)
            self.recorder.add(due_at, sent, time.monotonic(), error.status if error else OK)
            ended()

        if not (start and start(self._timeout, done)):
            group.create_task(self._await(send, done))

    async def _await(self, send: Send, done: Callable[[StatusError | None], None]) -> None:
        try:
            await send(self._timeout)
        except StatusError as error:
            done(error)
        else:
            done(None)


async def send_closed(sender: Sender, load: Closed, stop: asyncio.Event) -> None:
    """Send requests in a closed loop until `stop`, and wait for the last answer."""
    slots = asyncio.Semaphore(0)                # users that have stopped

    async with asyncio.TaskGroup() as group:
        def next_request() -> None:
            if stop.is_set():
                slots.release()
            else:
                sender.send(None, group, next_request)

        for _ in range(load.concurrency):
            next_request()
        for _ in range(load.concurrency):
            await slots.acquire()


async def send_open(sender: Sender, load: Open, seed: int, stop: asyncio.Event) -> None:
    """Send requests on schedule until `stop`, and wait for the last answer."""
    slots = asyncio.Semaphore(sender.max_in_flight)
    start = time.monotonic()
    with Alarm() as alarm:
        async with asyncio.TaskGroup() as group:
            for offset in load.arrivals(seed):
                due = start + offset
                while not stop.is_set() and due > (now := time.monotonic()):
                    await alarm.wait_until(min(due, now + LONGEST_SLEEP))
                await slots.acquire()
                if stop.is_set():
                    slots.release()
                    break
                sender.send(due, group, slots.release)
            for _ in range(sender.max_in_flight):
                await slots.acquire()


async def run_level(load: Load, sender: Sender, batch: int, timing: Timing, seed: int,
                    read_statistics: Callable[[], Awaitable[Reading | None]],
                    observe: Callable[[float, Summary], None]) -> LoadLevel:
    """Measure one load. `observe(seconds measured, summary of the window)` is called after each window."""
    stop = asyncio.Event()
    marks: list[_Mark] = []
    windows: list[LoadWindow] = []
    is_scheduled = isinstance(load, Open)
    async with asyncio.TaskGroup() as group:
        group.create_task(send_closed(sender, load, stop) if isinstance(load, Closed)
                          else send_open(sender, load, seed, stop))
        await asyncio.sleep(timing.warmup)
        marks.append(_Mark(time.monotonic(), time.thread_time(), await read_statistics()))
        start, ended = marks[0].at, len(sender.recorder)
        while len(windows) < WINDOWS_IN_DURATION and not is_stable(windows, is_scheduled):
            due = start + timing.duration * len(marks) / WINDOWS_IN_DURATION
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            marks.append(_Mark(time.monotonic(), time.thread_time(), await read_statistics()))
            samples, ended = sender.recorder.since(ended), len(sender.recorder)
            summary = summarise(samples, marks[-2].at, marks[-1].at, batch)
            answered = samples.succeeded.latency_ms
            windows.append(LoadWindow(len(answered), summary.throughput, latency_of(answered).mean))
            observe(marks[-1].at - start, summary)
        stop.set()
    stable = is_stable(windows, is_scheduled)
    begin, end = marks[-1 - WINDOWS if stable else 0], marks[-1]
    return LoadLevel(load, summarise(sender.recorder.since(0), begin.at, end.at, batch),
                     difference(begin.statistics, end.statistics) if begin.statistics and end.statistics else None,
                     "stable" if stable else "duration", sender.messages,
                     (end.cpu - begin.cpu) / (end.at - begin.at))
