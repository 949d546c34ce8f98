"""Constants that are computed from smaller ones when a plan is loaded (loaded.py), so that its file is smaller.

The kernels that expand them are part of the plan's code, which elf.py loads; they run on all threads of the engine.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from infer_server.engines.plan.arena import Memory
from infer_server.engines.plan.plan import ExpandedConstant, MachinePart

PIECE = 1 << 20         # bytes of a work item

Kernel = Callable[..., None]


def expand(machine: MachinePart, kernel: Callable[[ExpandedConstant], Kernel], constants: int,
           threads: int = 1) -> Memory:
    """Compute a plan's expanded constants.

    Parameters
    ----------
    kernel : return the emitted function of a constant, which releases the GIL.
    constants : address of the plan's constants.
    threads : number of threads that compute.

    Returns
    -------
    Memory
        The expanded constants, each at its offset.
    """
    memory = Memory(machine.expanded_bytes)
    pieces = [piece for item in machine.expanded for piece in _pieces(item, kernel(item), constants, memory.address)]
    if threads == 1:        # without starting a thread
        for piece in pieces:
            piece()
        return memory
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(piece) for piece in pieces]:
            done.result()
    return memory


def _pieces(item: ExpandedConstant, kernel: Kernel, constants: int, memory: int) -> Iterator[Callable[[], None]]:
    """Yield a constant's grid, divided along its columns, then its rows, into pieces of about PIECE bytes."""
    operands = np.array([constants + item.source, memory + item.offset], np.int64)
    count = -(-item.bytes // PIECE)
    columns = min(count, item.columns)
    rows = min(-(-count // max(columns, 1)), item.rows)

    def run(*bounds: int) -> None:
        kernel(operands.ctypes.data, *bounds)

    for column in range(columns):
        for row in range(rows):
            yield partial(run, row * item.rows // rows, (row + 1) * item.rows // rows,
                          column * item.columns // columns, (column + 1) * item.columns // columns)
