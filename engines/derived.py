"""The constants that kernels make of others when a plan is made ready to run."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from engines.memory import Memory
from engines.plan import Derived, Plan
from engines.tables import WORD

if TYPE_CHECKING:
    from engines.execution import EmittedFunction

PIECE = 1 << 20         # bytes that a thread makes before it takes the next piece

Kernels = Callable[[Derived], "EmittedFunction"]


def derive(plan: Plan, kernel: Kernels, constants: int, threads: int = 1) -> Memory:
    """The memory of a plan's derived constants, filled.

    kernel: the function of each, which releases the GIL. constants: the address of the plan's constants.
    """
    memory = Memory(plan.derived_bytes)
    pieces = _pieces(plan, kernel, constants, memory.address)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            piece()

    helpers = [threading.Thread(target=work) for _ in range(threads - 1 if plan.derived else 0)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    return memory


def _pieces(plan: Plan, kernel: Kernels, constants: int, memory: int) -> Iterator[Callable[[], None]]:
    """Each constant's grid, cut along its columns and then its rows into pieces of about PIECE bytes."""
    for item in plan.derived:
        function = kernel(item)
        operands = np.array([constants + item.source, memory + item.offset], np.int64)
        assert operands.itemsize == WORD
        count = max(item.bytes // PIECE, 1)
        columns = min(count, item.columns)
        rows = min(-(-count // columns), item.rows)
        for column in range(columns):
            for row in range(rows):
                bounds = (row * item.rows // rows, (row + 1) * item.rows // rows,
                          column * item.columns // columns, (column + 1) * item.columns // columns)

                def call(function: EmittedFunction = function, operands: np.ndarray = operands,
                         bounds: tuple[int, ...] = bounds) -> None:
                    function(operands.ctypes.data, *bounds)
                yield call
