"""Constants that are computed from others when a plan is loaded (execution.py): its file holds only the smaller ones.

The kernels that expand them lie in the plan's code, which elf.py loads; as many threads as the engine has run them.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from engines.plan.arena import Memory
from engines.plan.plan import ExpandedConstant, MachinePart

PIECE = 1 << 20         # bytes that a thread computes before it takes the next piece

Kernel = Callable[..., None]


def expand(machine: MachinePart, kernel: Callable[[ExpandedConstant], Kernel], constants: int,
           threads: int = 1) -> Memory:
    """Memory with a plan's expanded constants in it, computed by so many threads.

    kernel: the emitted function of each, which releases the GIL. constants: the address of the plan's constants.
    """
    memory = Memory(machine.expanded_bytes)
    pieces = [piece for item in machine.expanded for piece in _pieces(item, kernel(item), constants, memory.address)]
    if threads == 1:        # and no thread is started
        for piece in pieces:
            piece()
        return memory
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(piece) for piece in pieces]:
            done.result()
    return memory


def _pieces(item: ExpandedConstant, kernel: Kernel, constants: int, memory: int) -> Iterator[Callable[[], None]]:
    """A constant's grid, cut along its columns, then its rows, into pieces of about PIECE bytes."""
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
