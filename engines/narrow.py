"""Integers that lie in memory wider than their values need, kept in a byte each while they are in a file.

Machines without a dot product of bytes multiply weights of 16 or 32 bits. To widen them again takes less time than to
read the wider ones from a disk, or to check them.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engines.memory import Memory

_WIDE = ("int32", "int16")      # in this order: what fits a byte as int32 also does as pairs of int16
_SMALLEST = 4096                # bytes: shorter runs are left as they are
_WORTH = 0.25                   # of the memory, saved: for less, processes rather go on sharing the file's pages
_SAMPLE = 1024                  # elements that settle most cases


@dataclass(frozen=True)
class Run:
    """Bytes of memory that follow each other: `bytes` of them, as they are (dtype "") or as integers of a dtype."""
    bytes: int
    dtype: str = ""


def narrow(memory: bytes | memoryview, starts: Iterable[int]) -> tuple[bytes | memoryview, tuple[Run, ...]]:
    """(what to keep of the memory, its runs): no runs where all is kept as it is. starts: where runs may begin."""
    data = np.frombuffer(memory, np.uint8)
    bounds = sorted({0, len(data), *starts})
    runs = [Run(end - begin, _narrow_dtype(data[begin:end])) for begin, end in pairwise(bounds)]
    saved = sum(run.bytes - run.bytes // np.dtype(run.dtype).itemsize for run in runs if run.dtype)
    if saved < _WORTH * len(data) or not saved:
        return memory, ()
    parts = [data[begin:end].view(run.dtype).astype(np.int8) if run.dtype else data[begin:end]
             for (begin, end), run in zip(pairwise(bounds), runs, strict=True)]
    return b"".join(part.tobytes() for part in parts), tuple(runs)


def widen(kept: memoryview, runs: Sequence[Run]) -> memoryview:
    """The memory that was narrowed, in pages of its own; read-only."""
    memory = Memory(sum(run.bytes for run in runs))
    source, at, begin = np.frombuffer(kept, np.int8), 0, 0
    for run in runs:
        target = memory.bytes[begin:begin + run.bytes].view(run.dtype or np.int8)
        target[:] = source[at:at + len(target)]
        at, begin = at + len(target), begin + run.bytes
    return memory.bytes.data.toreadonly()


def _narrow_dtype(data: NDArray[np.uint8]) -> str:
    """The dtype whose values here all fit a byte; "" if there is none."""
    for dtype in _WIDE:
        if len(data) >= _SMALLEST and len(data) % np.dtype(dtype).itemsize == 0:
            wide = data.view(dtype)
            if all(np.array_equal(part, part.astype(np.int8)) for part in (wide[:_SAMPLE], wide)):
                return dtype
    return ""
