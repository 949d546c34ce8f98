"""Search for the highest rate that holds: doubling, then bisection on a logarithmic scale."""
from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

PRECISION = 1.05            # ratio by which the rate found may be too low
_LOWEST = 2 ** -10          # lowest rate tried, relative to the first


async def highest_rate(holds: Callable[[float], Awaitable[bool]], start: float) -> float:
    """Return the highest rate that holds within PRECISION, or 0. If a rate holds, lower ones must hold, too."""
    low = high = start
    if await holds(start):
        while await holds(high := 2 * low):
            low = high
    else:
        while not await holds(low := high / 2):
            high = low
            if low < start * _LOWEST:
                return 0.0
    while high > PRECISION * low:
        middle = math.sqrt(low * high)
        if await holds(middle):
            low = middle
        else:
            high = middle
    return low
