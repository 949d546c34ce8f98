"""How a recurrence is cut into tiles on a CPU, and how its weights and states lie in memory.

Pairs of 16 bits are multiplied at a time (vpmaddwd, vpdpwssd), four of 8 (vpdpbusd). A state that the model rounds by
its own range is bytes with a zero point, which a share of each sum makes up for. vpmaddubsw multiplies those; weights
whose neighbours' products do not fit into 16 bits are set apart. Where those are many, the state is 9 bits with its
sign, so 16, without a zero point, and its weights stay bytes in memory.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.common.arithmetic import (
    BYTE_PAIRS,
    FP32,
    INT16,
    PAIRED_QUADS,
    QUADS,
    SIGNED_QUADS,
    Arithmetic,
)
from engines.backends.llvm.kernels.kernel import ALIGNMENT, Grid, Kernel, Tactic
from engines.lowering.problems.recurrence import QUANTIZED_STATES, SECOND_LEVEL, QuantizedState, Recurrence, Stage
from engines.lowering.problems.view import SIZES

ARITHMETIC: dict[str, Arithmetic] = {"fp32": FP32, "int16": INT16, "int8": QUADS}
SIGNED_STATE = QuantizedState(127, 0)       # what "int8" multiplies where signed bytes take fewer instructions
FIRST_LEVEL = 1 << 15   # bytes of cache that most machines have there
BLOCK = 8               # items whose states are in scratch together
STEPS = 4               # the K loop's turns are a multiple of this, so that it can be cut
PLACES = (1, 2, STEPS)
PARTLY_CACHED = 1 << 23 # bytes of weights of which a large second level of cache keeps a share from step to step


@dataclass(frozen=True)
class Panels(Tactic):
    """Vectors of units that one item's micro-kernel computes; larger tiles of items take what registers are left."""
    vectors: int
    places: int = 1             # of K that are read side by side: streams of weights, for each vector
    prefetch: bool = False      # ask for the next panel's weights, a line at every k
    alternate: bool = False     # every other step takes the panels backwards: it begins with what is in a cache

    def __str__(self) -> str:
        words = (f"panels of {self.vectors} vectors", f"{self.places} places" if self.places > 1 else "",
                 "prefetch" if self.prefetch else "", "alternate" if self.alternate else "")
        return " ".join(filter(None, words))


class RecurrenceTiling(Kernel[Recurrence]):
    """How a recurrence is cut into tiles, and how its weights and states lie; asked by packing and by the code."""

    @property
    def step_bytes(self) -> int:
        """Of the weights that one step of one direction reads."""
        rows, plain = self.problem.cells[0].gates * self.problem.hidden, self._plain
        return rows * self.turns() * plain.elements * SIZES[plain.weights_dtype]

    @property
    def elements(self) -> int:
        """Of a state, that are multiplied in a turn of the K loop."""
        return self._plain.elements

    @property
    def _plain(self) -> Arithmetic:
        """The arithmetic of most machines."""
        return BYTE_PAIRS if self.problem.rounds and not self.rounds_to_bytes else ARITHMETIC[self.problem.precision]

    def arithmetic(self, isa: Isa) -> Arithmetic:
        if self.rounds_to_bytes and isa.paired_tiles:
            return PAIRED_QUADS
        return SIGNED_QUADS if self._signed(isa) else self._plain

    @property
    def rounds_to_bytes(self) -> bool:
        """Whether a state that the model rounds is multiplied as bytes, with its zero point."""
        return self.problem.rounds and self.problem.crowded is not None

    @property
    def behind(self) -> int:
        """Where, in a state of bytes, the crowded ones stand again, each beside a byte that no weight is for."""
        return -(-self.problem.hidden // 2) * 2

    def stored(self, isa: Isa) -> QuantizedState | None:
        """The state in integers of one step for all times, as this machine multiplies it."""
        if self.problem.rounds:
            return None
        return SIGNED_STATE if self._signed(isa) else QUANTIZED_STATES.get(self.problem.precision)

    def _signed(self, isa: Isa) -> bool:
        return self._plain is QUADS and not self.problem.rounds and bool(isa.paired_tiles)

    @property
    def scales(self) -> int:
        """Constants of a unit that make real numbers of its integer sums."""
        return self.problem.cells[0].gates if self.problem.precision in QUANTIZED_STATES else 0

    def zero(self, isa: Isa) -> int:
        """The zero point of the state in integers."""
        stored = self.stored(isa)
        return stored.zero if stored else 0

    @property
    def by_batch(self) -> bool:
        return self.problem.lengths is None and self.step_bytes > FIRST_LEVEL

    # ---- tiles
    def tile_items(self, isa: Isa) -> int:
        """Of the largest tile. Weights that stay in the first level of cache are read for one item as fast as they are
        multiplied; others are read once for as many items as there are registers."""
        if not self.by_batch:
            return 1
        most = max(len(stage.gates) for stage in self.problem.cells[0].stages)
        return max(items for items in range(1, BLOCK + 1) if items == 1 or self._fits(isa, items, most))

    def vectors(self, isa: Isa, tactic: Panels, stage: Stage, items: int) -> int:
        """Of units, in a tile of that many items."""
        return max(v for v in range(1, tactic.vectors + 1) if v == 1 or self._fits(isa, items, v * len(stage.gates)))

    def _fits(self, isa: Isa, items: int, weights: int) -> bool:
        """Where dot2 is two instructions, their products need a register; a factor of dot4 may take several."""
        each = isa.ready_bytes // isa.bytes if self._plain is QUADS else 1
        return fits(isa, items, weights, int(bool(self.scales) and items > 1 and not isa.one_dot2), each)

    def tactics(self, isa: Isa) -> Sequence[Panels]:
        most = max(len(stage.gates) for stage in self.problem.cells[0].stages)
        vectors = range(1, -(-self.problem.hidden // isa.lanes) + 1)
        widest = max(v for v in vectors if v == 1 or self._fits(isa, 1, v * most))
        return tuple(Panels(v) for v in dict.fromkeys((widest, max(widest // 2, 1), 1)))

    def refinements(self, isa: Isa, best: Panels) -> Sequence[Panels]:
        if self.step_bytes < SECOND_LEVEL:
            return ()
        found = [replace(best, places=places, prefetch=prefetch) for places in PLACES for prefetch in (False, True)]
        return found + [replace(best, alternate=True)] * (self.step_bytes <= PARTLY_CACHED)

    def packing(self, tactic: Panels) -> None:
        """Weights lie vector by vector, whatever the panels."""
        return

    def grid(self, isa: Isa, tactic: Panels) -> Grid:
        return Grid(1, self.tile_items(isa), len(self.problem.cells))

    # ---- how weights and states lie
    def turns(self) -> int:
        """Of the K loop."""
        return -(-self._multiplied // (self.elements * STEPS)) * STEPS

    def head(self, isa: Isa) -> int:
        """Turns before the K loop's: where the state has a zero point, a turn's bytes hold what a sum begins with, or
        what it begins with for -1 in the zero point if that is found step by step."""
        return int(self.zero(isa) != 0 or self.rounds_to_bytes)

    def stage_vector(self, isa: Isa, stage: Stage) -> int:
        """Bytes of the weights of one vector of units."""
        return (self.head(isa) + self.turns()) * len(stage.gates) * self.arithmetic(isa).weight_bytes(isa)

    def room(self, isa: Isa) -> int:
        """Elements of a state: whole vectors, and all that the K loop reads."""
        step = max(isa.lanes, self.elements * STEPS)
        return -(-self._multiplied // step) * step

    @property
    def _multiplied(self) -> int:
        """Elements of a state that are multiplied."""
        return self.behind + 2 * self.problem.crowded if self.problem.crowded else self.problem.hidden

    def header(self) -> int:
        """Bytes before the weights: which units are crowded."""
        return -(-4 * (self.problem.crowded or 0) // ALIGNMENT) * ALIGNMENT


def fits(isa: Isa, items: int, weights: int, spare: int = 0, each: int = 1) -> bool:
    """Whether a tile's accumulators fit the registers, beside the fewer of its two sides and one of the other, each in
    so many registers, and what the arithmetic needs to spare."""
    return items * weights + each * (min(items, weights) + 1) + spare <= isa.registers
