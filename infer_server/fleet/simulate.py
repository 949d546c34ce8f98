"""Event simulation of servers behind balancers: latencies of Poisson requests of one item each.

A server has `instances`. A free one takes waiting requests as the server's batcher does without deadlines: a share of
them if other instances are idle, up to the batch size that pays. Before that a request passes the server's event loop,
which takes `request_seconds` for it. A balancer knows the unanswered requests that it has itself sent to each server,
and none of other balancers.
"""
from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infer_server.batching.policy import share
from infer_server.engines.ir.graph import Array
from infer_server.fleet.service import ServiceTimes

BALANCERS = ("two-choices", "least-request", "round-robin", "random", "connection")
WARM_UP = 0.1               # share of the requests that come first and are not counted
CONNECTIONS = 4             # connections of clients for each server, for "connection"


@dataclass(frozen=True)
class Fleet:
    """Servers and the balancers in front of them.

    balancer         one of BALANCERS
    balancers        number of balancing processes, which do not know each other's requests
    batch            maximum number of items of a batch
    request_seconds  time of a request on the server's event loop
    hop_seconds      time of a request on the way to a server and back
    slow             share of the servers that take `slower` times as long
    """
    servers: int
    instances: int
    times: ServiceTimes
    batch: int
    balancer: str = "two-choices"
    balancers: int = 1
    request_seconds: float = 0.0
    hop_seconds: float = 0.0
    slow: float = 0.0
    slower: float = 3.0

    @property
    def capacity(self) -> float:
        """Most items a second that the servers can execute; those of the event loops are a limit, too."""
        paying = self.times.paying_batch(self.batch)
        one = self.instances * self.times.capacity(paying)
        if self.request_seconds:
            one = min(one, 1 / self.request_seconds)
        slow = round(self.slow * self.servers)
        return one * (self.servers - slow + slow / self.slower)


def poisson(rate: float, requests: int, seed: int) -> Array:
    """Return the times in seconds of a Poisson process of `rate` a second."""
    arrivals: Array = np.random.default_rng(seed).exponential(1 / rate, requests).cumsum()
    return arrivals


def simulate(fleet: Fleet, arrivals: Array, seed: int = 0) -> Array:
    """Return the latency in seconds of each request after the warm-up, in order of arrival.

    arrivals: ascending times in seconds. Equal seeds give equal results.
    """
    count = len(arrivals)
    pick, release = _policy(fleet, random.Random(seed))
    owners = np.random.default_rng([seed, 1]).integers(0, fleet.balancers, count).tolist()
    factors = fleet.times.draws(np.random.default_rng([seed, 2]), count).tolist()
    most = fleet.times.paying_batch(fleet.batch)
    takes = [fleet.times.of(items) for items in range(most + 1)]
    slow = round(fleet.slow * fleet.servers)
    queues: list[deque[int]] = [deque() for _ in range(fleet.servers)]
    idle, loop_free = [fleet.instances] * fleet.servers, [0.0] * fleet.servers
    ended = [0.0] * count
    # (time, order, server, event): a batch ends (its requests), or a request (its index) leaves the event loop
    events: list[tuple[float, int, int, list[int] | int]] = []
    order = 0

    def start(server: int, now: float) -> None:
        nonlocal order
        queue = queues[server]
        while idle[server] and queue:
            idle[server] -= 1
            batch = [queue.popleft() for _ in range(min(share(len(queue), idle[server]), most))]
            lasts = takes[len(batch)] * factors[order % count] * (fleet.slower if server < slow else 1.0)
            order += 1
            heapq.heappush(events, (now + lasts, order, server, batch))

    for request, arrives in enumerate([*arrivals.tolist(), float("inf")]):
        while events and events[0][0] <= arrives:
            now, _, server, event = heapq.heappop(events)
            if isinstance(event, int):
                queues[server].append(event)
            else:
                idle[server] += 1
                for each in event:
                    ended[each] = now
                    release(owners[each], server)
            start(server, now)
        if request == count:
            break
        server = pick(owners[request])
        loop_free[server] = max(arrives, loop_free[server]) + fleet.request_seconds
        order += 1
        heapq.heappush(events, (loop_free[server], order, server, request))
    latencies: Array = np.array(ended) - arrivals + fleet.hop_seconds
    return latencies[int(WARM_UP * count):]


def _policy(fleet: Fleet, chance: random.Random) -> tuple[Callable[[int], int], Callable[[int, int], None]]:
    """Return the functions that pick a server for a balancer's request, and that note an answer."""
    servers = fleet.servers
    open_requests = [[0] * servers for _ in range(fleet.balancers)]
    turns = [chance.randrange(servers) for _ in range(fleet.balancers)]
    connections = [chance.randrange(servers) for _ in range(CONNECTIONS * servers)]

    def two_choices(balancer: int) -> int:
        known, one, other = open_requests[balancer], chance.randrange(servers), chance.randrange(servers)
        return one if known[one] <= known[other] else other

    def least_request(balancer: int) -> int:
        known, first = open_requests[balancer], chance.randrange(servers)
        return min(range(first, first + servers), key=lambda at: known[at % servers]) % servers

    def round_robin(balancer: int) -> int:
        turns[balancer] = (turns[balancer] + 1) % servers
        return turns[balancer]

    choices: dict[str, Callable[[int], int]] = {
        "two-choices": two_choices, "least-request": least_request, "round-robin": round_robin,
        "random": lambda balancer: chance.randrange(servers),
        "connection": lambda balancer: chance.choice(connections)}
    choose = choices[fleet.balancer]
    knows = fleet.balancer in ("two-choices", "least-request")

    def pick(balancer: int) -> int:
        server = choose(balancer)
        if knows:
            open_requests[balancer][server] += 1
        return server

    def release(balancer: int, server: int) -> None:
        if knows:
            open_requests[balancer][server] -= 1

    return pick, release
