"""Reasons why batches are closed, for tuning max_batch_size, delays and instances."""
from __future__ import annotations

from collections.abc import Collection

FULL = "full"
PREFERRED = "preferred size"
WAITED = "delay over"
FREE = "instance free"
REASONS = (FULL, PREFERRED, WAITED, FREE)


def closing_reason(items: int, waited_ns: int, most: int, preferred: Collection[int], delay_us: int) -> str:
    """Return the reason, one of REASONS, why a batch was executed without more items.

    Parameters
    ----------
    items : int
        Items of the batch.
    waited_ns : int
        Time in the queue of its oldest request.
    most : int
        max_batch_size of the model.
    preferred : collection of int
        preferred_batch_size of the model.
    delay_us : int
        max_queue_delay_microseconds of the model.
    """
    if items >= most:
        return FULL
    if items in preferred:
        return PREFERRED
    return WAITED if delay_us and waited_ns >= delay_us * 1000 else FREE
