"""Why a batch was closed as it was: for those who tune max_batch_size, delays and instances."""
from __future__ import annotations

from collections.abc import Collection

FULL = "full"
PREFERRED = "preferred size"
WAITED = "delay over"
FREE = "instance free"
REASONS = (FULL, PREFERRED, WAITED, FREE)


def why_closed(items: int, waited_ns: int, most: int, preferred: Collection[int], delay_us: int) -> str:
    """items: of the batch; waited_ns: of its oldest request; the rest as its model is configured."""
    if items >= most:
        return FULL
    if items in preferred:
        return PREFERRED
    return WAITED if delay_us and waited_ns >= delay_us * 1000 else FREE
