"""Constants that several plans of one model (for several shapes) share.

The packed weights of a layer are the same bytes at every shape, as long as its tactic packs them in one layout. The
first plan stores them; operands of the plans that are loaded later point there, without copies. Weights that other
tactics pack in another layout are packed once for all further plans.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.tuning.candidates import Choice
from infer_server.engines.ir.content import content_of
from infer_server.engines.ir.graph import Array
from infer_server.engines.lowering.calls.calls import ProblemCall, name_of
from infer_server.engines.plan.plan import SHARED, SHARED_EXPANDED, MachinePart, Operand

LEAST = 256         # least bytes of a constant that is searched for
SPARE = 1 << 20     # bytes of packed constants that are cached, in addition to the size of the plan's constants
ENTRY = 1024        # estimated overhead of a cache entry, in bytes
Packed = list[tuple[Operand, int]]      # (operand, bytes) of each packed constant of a call


@dataclass(frozen=True)
class _CachedPacking:
    """Cache entry of packed constants: their operands if they are shared, else the packed arrays."""
    contents: list[bytes]
    operands: Packed
    arrays: list[Array] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Return the approximate memory of the entry."""
        return ENTRY + sum(array.nbytes for array in self.arrays)


class SharedConstants:
    """Constants of a plan, indexed by their contents."""

    def __init__(self, machine: MachinePart) -> None:
        self.sizes = len(machine.constants), machine.expanded_bytes
        self._bytes = np.frombuffer(machine.constants, np.uint8)
        self._expanded = {(item.symbol, item.source, item.bytes): item.offset for item in machine.expanded}
        self._offsets: dict[bytes, list[int]] = {}      # first bytes -> offsets
        starts = {o.offset for step in machine.steps for o in step.operands if o.buffer is None}
        for start in sorted(starts.union((item.source for item in machine.expanded), machine.weight_offsets.values())):
            self._offsets.setdefault(self._bytes[start:start + LEAST].tobytes(), []).append(start)
        self._packed: dict[Any, _CachedPacking] = {}
        self._spare = len(machine.constants) + SPARE    # free bytes of the cache

    def find(self, flat: Array) -> Operand | None:
        """Return the operand of a constant with these bytes, or None."""
        for start in self._offsets.get(flat[:LEAST].tobytes(), ()) if len(flat) >= LEAST else ():
            if np.array_equal(self._bytes[start:start + len(flat)], flat):
                return Operand(SHARED, start)
        return None

    def bytes_at(self, operand: Operand, size: int) -> Array:
        """Return the bytes of a shared constant."""
        return self._bytes[operand.offset:operand.offset + size]

    def expansion(self, symbol: str, source: Operand, size: int) -> Operand | None:
        """Return the operand of the constant that a kernel expands from a shared one, or None."""
        offset = self._expanded.get((symbol, source.offset, size)) if source.buffer == SHARED else None
        return None if offset is None else Operand(SHARED_EXPANDED, offset)

    def packed(self, call: ProblemCall, choice: Choice, pack: Callable[[], list[Array]],
               add: Callable[[list[Array]], Packed]) -> Packed:
        """Return the operands of a call's packed constants, each with its bytes.

        Equal constants in one layout are packed once, and not added again if all of them are shared. The cache of
        packed constants is bounded.

        Parameters
        ----------
        pack : pack the constants of the call.
        add : give packed arrays their places in the plan.
        """
        layout = choice.kernel.packing_anywhere(choice.tactic)
        if layout is None:
            return add(pack())
        key = name_of(call), type(choice.kernel), layout
        contents = [content_of(np.asarray(array)) for value in call.constants.values()
                    for array in (value if isinstance(value, list | tuple) else [value])]
        known = self._packed.get(key)
        if known is not None and known.contents == contents:
            return known.operands or add(known.arrays)
        arrays = pack()
        operands = add(arrays)
        if operands and all(operand.buffer in (SHARED, SHARED_EXPANDED) for operand, _ in operands):
            found = _CachedPacking(contents, operands)
        else:
            found = _CachedPacking(contents, [], arrays)
        self._remember(key, found)
        return operands

    def _remember(self, key: Any, known: _CachedPacking) -> None:
        """Cache an entry if there is room, in place of the entry of other constants with this key."""
        room = self._spare + (self._packed.pop(key).bytes if key in self._packed else 0)
        self._spare = room - known.bytes if known.bytes <= room else room
        if known.bytes <= room:
            self._packed[key] = known
