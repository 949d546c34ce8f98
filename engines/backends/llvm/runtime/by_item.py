"""Steps that run for one item of the batch after the other, in a single call, and inputs with scattered items.

run_steps knows nothing of items. Such steps have a step table of their own: the steps once for each batch slot, each
with the rows of one item and the operands of its slot.
"""
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.backends.llvm.runtime.abi import StepRow
from infer_server.engines.backends.llvm.runtime.zero_copy import ZeroCopyBuffers
from infer_server.engines.plan.plan import TensorView

Words = NDArray[np.int64]


class ItemTables:
    """Step and operand tables of one arena for execution item by item."""

    def __init__(self, steps: Words, operands: Words, strides: Words, offsets: Words, slots: int,
                 zero_copy: ZeroCopyBuffers) -> None:
        """Make the tables.

        Parameters
        ----------
        steps : step table of the plan.
        operands : operand table of the arena.
        strides : item stride of each operand, in bytes.
        offsets : offset of each operand in its buffer, in bytes.
        slots : number of batch slots.
        """
        self._zero_copy, self._operand_offsets = zero_copy, offsets
        every = np.arange(slots)[:, None]
        self._every_step = steps
        self._operands = operands + every * strides
        self._offsets = self._operands.ctypes.data - operands.ctypes.data + every * self._operands.strides[0]
        self._steps: dict[tuple[int, int], Words] = {}
        self._words = self._operands.data                   # memoryview: faster for single writes
        self._redirected: list[tuple[int, int, int]] = []         # (slot, redirected operand, its own address)

    def steps(self, first: int, last: int) -> Words:
        """Return a step table of steps first..last - 1 for each slot, to be run with the arena's operand table."""
        found = self._steps.get((first, last))
        if found is None:
            rows = np.repeat(self._every_step[None, first:last], len(self._operands), 0)
            rows[..., StepRow.OPERANDS] += self._offsets
            rows[..., StepRow.ROWS] += rows[..., StepRow.ROWS_PER_ITEM]
            rows[..., StepRow.ROWS_PER_ITEM] = 0
            found = self._steps[first, last] = rows.reshape(-1, rows.shape[-1])
        return found

    def redirect(self, view: TensorView, first: int, begin: int, byte_size: int) -> None:
        """Make `byte_size` bytes from address `begin` on replace the items of an input from slot `first` on."""
        for slot, item in enumerate(range(begin, begin + byte_size, view.item_stride), first):
            for operand in self._zero_copy.items[view.buffer]:
                self._redirected.append((slot, operand, self._words[slot, operand]))
                self._words[slot, operand] = item + int(self._operand_offsets[operand])

    def restore(self) -> None:
        """Make every item refer to its own slot again."""
        while self._redirected:
            slot, operand, address = self._redirected.pop()
            self._words[slot, operand] = address
