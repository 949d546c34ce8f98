"""The times at which waiting requests expire, as a heap: which of them is next."""
from __future__ import annotations

import heapq
from itertools import count

from infer_server.batching.request import Request

_SLACK = 64                     # entries of requests that are gone, before the heap is made anew


class Expiries:
    """Times of requests, the earliest first. A request that is discarded leaves its entry in the heap for a while."""

    def __init__(self) -> None:
        self.at: dict[Request, int] = {}            # of those that were not discarded
        self._heap: list[tuple[int, int, Request]] = []
        self._order = count()                       # so that equal times never compare requests

    def add(self, request: Request, at_ns: int) -> None:
        self.at[request] = at_ns
        heapq.heappush(self._heap, (at_ns, next(self._order), request))

    def discard(self, request: Request) -> None:
        """Forgets a request; one that is not in the heap is ignored."""
        if self.at.pop(request, None) is not None and len(self._heap) > 2 * len(self.at) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2] in self.at]
            heapq.heapify(self._heap)

    def first_ns(self) -> int | None:
        """The earliest time of all."""
        while self._heap and self._heap[0][2] not in self.at:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_before(self, ns: int) -> list[Request]:
        """Forgets the requests whose times lie before `ns`, and returns them, the earliest first."""
        due = []
        while (first_ns := self.first_ns()) is not None and first_ns < ns:
            request = heapq.heappop(self._heap)[2]
            del self.at[request]
            due.append(request)
        return due
