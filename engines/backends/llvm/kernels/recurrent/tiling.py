"""Tiles of a recurrence on a CPU, and the layout of its weights and states.

16-bit products are computed two at a time (vpmaddwd, vpdpwssd), 8-bit ones four at a time (vpdpbusd). A state that the
model quantises by its own range is stored as bytes with a zero point, for which each sum gets a correction. For
vpmaddubsw, weights of units whose neighbouring products do not fit 16 bits (crowded units) are stored separately. If
there are many of them, the state is a signed number of 9 bits instead, stored in 16 without a zero point, and its
weights stay bytes in memory.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.arithmetic import (
    BYTE_PAIRS,
    FP32,
    INT16,
    PAIRED_QUADS,
    QUADS,
    SIGNED_QUADS,
    Arithmetic,
)
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT, Grid, Kernel, Tactic
from infer_server.engines.lowering.problems.recurrence import (
    QUANTIZED_STATES,
    SECOND_LEVEL,
    QuantizedState,
    Recurrence,
    Stage,
)
from infer_server.engines.lowering.problems.view import SIZES

ARITHMETIC: dict[str, Arithmetic] = {"fp32": FP32, "int16": INT16, "int8": QUADS}
SIGNED_STATE = QuantizedState(127, 0)       # state of "int8" on machines where signed bytes take fewer instructions
FIRST_LEVEL = 1 << 15   # bytes of L1 on most machines
BLOCK = 8               # items whose states are in scratch at the same time
STEPS = 4               # the iterations of the K loop are a multiple of this, so that it can be split
PLACES = (1, 2, STEPS)
PARTLY_CACHED = 1 << 23 # bytes of weights of which a large L2 keeps a share from step to step


@dataclass(frozen=True)
class Panels(Tactic):
    """Tactic of a recurrence: vectors of units that one item's micro-kernel computes.

    Tiles of several items have fewer, as many as the registers allow.
    """
    vectors: int
    places: int = 1             # places of K that are read at the same time, as streams of weights for each vector
    prefetch: bool = False      # prefetch the next panel's weights, a line at every k
    alternate: bool = False     # every other step takes the panels backwards, to begin with those in a cache

    def __str__(self) -> str:
        words = (f"panels of {self.vectors} vectors", f"{self.places} places" if self.places > 1 else "",
                 "prefetch" if self.prefetch else "", "alternate" if self.alternate else "")
        return " ".join(filter(None, words))


class RecurrenceTiling(Kernel[Recurrence]):
    """Tiles of a recurrence, and the layout of its weights and states, for packing and for code."""

    @property
    def step_bytes(self) -> int:
        """Return the bytes of the weights that one step of one direction reads."""
        rows, plain = self.problem.cells[0].gates * self.problem.hidden, self._plain
        return rows * self.turns() * plain.elements * SIZES[plain.weights_dtype]

    @property
    def elements(self) -> int:
        """Return the elements of a state that are multiplied in an iteration of the K loop."""
        return self._plain.elements

    @property
    def _plain(self) -> Arithmetic:
        """Return the arithmetic of most machines."""
        return BYTE_PAIRS if self.problem.rounds and not self.rounds_to_bytes else ARITHMETIC[self.problem.precision]

    def arithmetic(self, isa: Isa) -> Arithmetic:
        if self.rounds_to_bytes and isa.paired_tiles:
            return PAIRED_QUADS
        return SIGNED_QUADS if self._signed(isa) else self._plain

    @property
    def rounds_to_bytes(self) -> bool:
        """Return True if a state that the model quantises dynamically is multiplied as bytes, with its zero point."""
        return self.problem.rounds and self.problem.crowded is not None

    @property
    def crowded_offset(self) -> int:
        """Return the offset of the copies of crowded units in a state of bytes.

        Each is beside a byte that has no weight.
        """
        return -(-self.problem.hidden // 2) * 2

    def stored(self, isa: Isa) -> QuantizedState | None:
        """Return the quantisation of the state with a constant step, as this machine multiplies it.

        It is None if the state is quantised dynamically.
        """
        if self.problem.rounds:
            return None
        return SIGNED_STATE if self._signed(isa) else QUANTIZED_STATES.get(self.problem.precision)

    def _signed(self, isa: Isa) -> bool:
        return self._plain is QUADS and not self.problem.rounds and bool(isa.paired_tiles)

    @property
    def scales(self) -> int:
        """Return the number of a unit's constants that convert its integer sums to real numbers."""
        return self.problem.cells[0].gates if self.problem.precision in QUANTIZED_STATES else 0

    def zero(self, isa: Isa) -> int:
        """Return the zero point of the state in integers."""
        stored = self.stored(isa)
        return stored.zero if stored else 0

    @property
    def by_batch(self) -> bool:
        """Return True if tiles may hold several items; integers may be multiplied so on a matrix unit."""
        return self.shares_weights or self.problem.lengths is None and self.problem.precision in QUANTIZED_STATES

    @property
    def shares_weights(self) -> bool:
        """Return True if the vectors of weights that a micro-kernel loads are multiplied by several items."""
        return self.problem.lengths is None and self.step_bytes > FIRST_LEVEL

    # ---- tiles
    def tile_items(self, isa: Isa) -> int:
        """Return the items of the largest tile.

        Weights that stay in L1 can be read for one item as fast as they are multiplied; others are read once for as
        many items as the registers hold.
        """
        if not self.shares_weights:
            return 1
        most = max(len(stage.gates) for stage in self.problem.cells[0].stages)
        return max(items for items in range(1, BLOCK + 1) if items == 1 or self._fits(isa, items, most))

    def vectors(self, isa: Isa, tactic: Panels, stage: Stage, items: int) -> int:
        """Return the vectors of units in a tile of so many items."""
        return max(v for v in range(1, tactic.vectors + 1) if v == 1 or self._fits(isa, items, v * len(stage.gates)))

    def _fits(self, isa: Isa, items: int, weights: int) -> bool:
        """Return True if a tile fits the registers.

        If dot2 is two instructions, their products need a register; a factor of dot4 may take several.
        """
        each = isa.ready_bytes // isa.bytes if self._plain is QUADS else 1
        return fits(isa, items, weights, int(bool(self.scales) and items > 1 and not isa.one_dot2), each)

    def tactics(self, isa: Isa) -> Sequence[Panels]:
        most = max(len(stage.gates) for stage in self.problem.cells[0].stages)
        vectors = range(1, -(-self.problem.hidden // isa.lanes) + 1)
        widest = max(v for v in vectors if v == 1 or self._fits(isa, 1, v * most))
        return tuple(Panels(v) for v in dict.fromkeys((widest, max(widest // 2, 1), 1)))

    def cost(self, isa: Isa, tactic: Any) -> float:
        return self.vectors_of_gates(isa) * self.turns() / 2

    def vectors_of_gates(self, isa: Isa) -> int:
        """Return the vectors of sums of an item, in all steps and directions."""
        problem = self.problem
        return problem.steps * len(problem.cells) * problem.cells[0].gates * -(-problem.hidden // isa.lanes)

    def refinements(self, isa: Isa, best: Panels) -> Sequence[Panels]:
        if self.step_bytes < SECOND_LEVEL:
            return ()
        found = [replace(best, places=places, prefetch=prefetch) for places in PLACES for prefetch in (False, True)]
        return found + [replace(best, alternate=True)] * (self.step_bytes <= PARTLY_CACHED)

    def packing(self, tactic: Panels) -> None:
        """Return None: weights are packed vector by vector, which does not depend on the panels."""
        return

    def grid(self, isa: Isa, tactic: Panels) -> Grid:
        return Grid(1, self.tile_items(isa), len(self.problem.cells))

    # ---- layout of weights and states
    def turns(self) -> int:
        """Return the iterations of the K loop."""
        return -(-self._multiplied // (self.elements * STEPS)) * STEPS

    def head(self, isa: Isa) -> int:
        """Return the iterations' worth of bytes before the K loop's weights: 1 if the state has a zero point.

        They hold the initial sum, or if the zero point is found at run time, the initial sum for a zero point of -1.
        """
        return int(self.zero(isa) != 0 or self.rounds_to_bytes)

    def stage_vector(self, isa: Isa, stage: Stage) -> int:
        """Return the bytes of the weights of one vector of units."""
        return (self.head(isa) + self.turns()) * len(stage.gates) * self.arithmetic(isa).weight_bytes(isa)

    def state_elements(self, isa: Isa) -> int:
        """Return the elements of a state in memory: whole vectors, and all that the K loop reads."""
        step = max(isa.lanes, self.elements * STEPS)
        return -(-self._multiplied // step) * step

    @property
    def _multiplied(self) -> int:
        """Return the elements of a state that are multiplied."""
        return self.crowded_offset + 2 * self.problem.crowded if self.problem.crowded else self.problem.hidden

    def header(self) -> int:
        """Return the bytes before the weights, which hold the numbers of the crowded units."""
        return -(-4 * (self.problem.crowded or 0) // ALIGNMENT) * ALIGNMENT


def fits(isa: Isa, items: int, weights: int, spare: int = 0, each: int = 1) -> bool:
    """Return True if a tile fits the registers.

    They hold its accumulators, the smaller of its two sides and one vector of the other, each in `each` registers, and
    `spare` more.
    """
    return items * weights + each * (min(items, weights) + 1) + spare <= isa.registers
