"""Heap of the times at which waiting requests expire."""
from __future__ import annotations

import heapq
from itertools import count

from infer_server.batching.request import Request

_SLACK = 64                     # discarded entries that may remain before the heap is rebuilt


class Expiries:
    """Times of requests, earliest first. Discarded requests stay in the heap until it is rebuilt."""

    def __init__(self) -> None:
        self.due_ns: dict[Request, int] = {}        # time of each request that was not discarded
        self._heap: list[tuple[int, int, Request]] = []
        self._order = count()                       # tie-breaker, because requests cannot be compared

    def add(self, request: Request, ns: int) -> None:
        self.due_ns[request] = ns
        heapq.heappush(self._heap, (ns, next(self._order), request))

    def discard(self, request: Request) -> None:
        """Remove a request, if present."""
        if self.due_ns.pop(request, None) is not None and len(self._heap) > 2 * len(self.due_ns) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2] in self.due_ns]
            heapq.heapify(self._heap)

    def first_ns(self) -> int | None:
        """Return the earliest time, or None."""
        while self._heap and self._heap[0][2] not in self.due_ns:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_before(self, ns: int) -> list[Request]:
        """Remove the requests whose times are before `ns` and return them, earliest first."""
        due = []
        while (first_ns := self.first_ns()) is not None and first_ns < ns:
            request = heapq.heappop(self._heap)[2]
            del self.due_ns[request]
            due.append(request)
        return due
