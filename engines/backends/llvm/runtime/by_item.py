"""Steps that run for one item of the batch after the other: one call for all of them, and inputs whose items lie
wherever their callers have them.

run_steps knows of no items. What runs so is a step table of its own: the steps once for each batch slot, in order, each
with the rows of one item, and each slot's with operands of its own.
"""
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engines.backends.llvm.runtime.abi import StepRow
from engines.backends.llvm.runtime.lending import Lendable
from engines.plan.plan import TensorView

Words = NDArray[np.int64]


class ItemTables:
    """Of one arena."""

    def __init__(self, steps: Words, operands: Words, strides: Words, slots: int, lendable: Lendable) -> None:
        """steps: the plan's step table. operands: the arena's operand table. strides: bytes from an item to the next,
        of each operand."""
        self._lendable = lendable
        every = np.arange(slots)[:, None]
        self._every_step = steps
        self._operands = operands + every * strides
        self._offsets = self._operands.ctypes.data - operands.ctypes.data + every * self._operands.strides[0]
        self._steps: dict[tuple[int, int], Words] = {}
        self._words = self._operands.data                   # which are quicker to write one by one
        self._lent: list[tuple[int, int, int]] = []         # slot, operand, and its own address

    def steps(self, first: int, last: int) -> Words:
        """Rows of a step table: steps first..last - 1 for each slot, to be run with the arena's operand table."""
        found = self._steps.get((first, last))
        if found is None:
            rows = np.repeat(self._every_step[None, first:last], len(self._operands), 0)
            rows[..., StepRow.OPERANDS] += self._offsets
            rows[..., StepRow.ROWS] += rows[..., StepRow.ROWS_PER_ITEM]
            rows[..., StepRow.ROWS_PER_ITEM] = 0
            found = self._steps[first, last] = rows.reshape(-1, rows.shape[-1])
        return found

    def lend(self, view: TensorView, first: int, begin: int, byte_size: int) -> None:
        """Let so many bytes at an address stand in for the items of an input from slot `first` on."""
        for slot, item in enumerate(range(begin, begin + byte_size, view.item_stride), first):
            for operand, offset in self._lendable.items[view.buffer]:
                self._lent.append((slot, operand, self._words[slot, operand]))
                self._words[slot, operand] = item + offset

    def take_back(self) -> None:
        """Every item lies in its own slot again."""
        while self._lent:
            slot, operand, address = self._lent.pop()
            self._words[slot, operand] = address
