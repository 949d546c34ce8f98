"""Memory for results, used again once their caller has let go of the last view of them.

Fresh memory costs a page fault for every 4 KiB that is written first, which is more than a short step takes.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.ir.graph import Array

LARGEST = 1 << 24       # bytes of a result whose memory is kept
KEPT = 4                # results of one shape that are kept
MOST_BYTES = 1 << 26    # of all that is kept


def _has_gil() -> bool:
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def _unread(arrays: Sequence[Array]) -> Array | None:
    """One of the arrays that nobody has a view of; None: there is none, or views cannot be told.

    An array without views has as many references as another one without, all counted in one step, which no debugger
    that holds what it looks at comes between. Without the GIL others may count meanwhile.
    """
    probes = [np.empty(1), np.empty(1)]
    view = probes[1].view()
    alone, viewed, *counts = map(sys.getrefcount, (*probes, *arrays))
    if view.base is not probes[1] or viewed != alone + 1 or not _has_gil():
        return None
    return arrays[counts.index(alone)] if alone in counts else None


class Results:
    """Results of one context; views of them are handed out."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], np.dtype[Any]], list[Array]] = {}
        self._bytes = 0

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of whatever its memory holds."""
        made = self._made.get((shape, dtype), ())
        if (found := _unread(made) if made else None) is None:
            found = np.empty(shape, dtype)
            if len(made) < KEPT and found.nbytes <= LARGEST:
                self._keep(found)
        return found.view()

    def _keep(self, array: Array) -> None:
        if self._bytes + array.nbytes > MOST_BYTES:     # of many shapes: those in use begin anew
            self._made.clear()
            self._bytes = 0
        self._made.setdefault((array.shape, array.dtype), []).append(array)
        self._bytes += array.nbytes
