"""Tiles of a recurrence on a matrix unit, and the layout of its weights and states.

Bytes of the states are the left operand, a row for each item of a block. A register of weights has 16 units and up to
64 bytes of K. States and weights of 16 bits are split into planes, the low bytes (unsigned) and the high bytes
(signed), and the sums of products of equal order are added in 32 bits:

    s * w = s0 * w0 + 2**8 * (s0 * w1 + s1 * w0) + 2**16 * s1 * w1

The sums are exact, and so equal those of vectors. Blocks of few items are multiplied by vectors. Both read bytes of
weights in one layout: the rows of a register are as far apart as two vectors of one gate. Weights of 16 bits are packed
in both layouts.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import index
from typing import Any

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.tiles import AMX, MatrixUnit
from infer_server.engines.backends.llvm.kernels.kernel import Grid
from infer_server.engines.backends.llvm.kernels.recurrent.tiling import BLOCK, STEPS, Panels, RecurrenceTiling
from infer_server.engines.lowering.problems.recurrence import QUANTIZED_STATES, Stage
from infer_server.engines.lowering.problems.view import SIZES

PANELS = (1, 2, 4)
MOST_STATES = 1 << 19   # bytes of the states of a block of 16 items; blocks of larger states have 8
FEWEST_ITEMS, FEWEST_OF_PLANES = 6, 8   # items from which on a matrix unit is faster, for bytes and for planes


@dataclass(frozen=True)
class MatrixPanels(Panels):
    """Tactic of a recurrence on a matrix unit. The fields of `Panels` hold for blocks of few items."""
    panel: int = 1              # vectors of units whose sums are in memory at the same time

    def __str__(self) -> str:
        return f"{super().__str__()}, amx panels of {self.panel}"


class MatrixTiling(RecurrenceTiling):
    """Tiles of a recurrence on a matrix unit."""

    def applies(self, isa: Isa) -> bool:
        integers = self.problem.precision in QUANTIZED_STATES
        return isa.matrix is not None and integers and self.problem.lengths is None

    def tactics(self, isa: Isa) -> Sequence[MatrixPanels]:
        if not self.applies(isa):
            return ()
        by_vectors, vectors = super().tactics(isa)[0], -(-self.problem.hidden // isa.lanes)
        return [MatrixPanels(**asdict(by_vectors), panel=panel) for panel in PANELS if panel == 1 or panel <= vectors]

    def refinements(self, isa: Isa, best: Panels) -> Sequence[Panels]:
        """Return variants of the products by vectors, whose panels the first round does not vary."""
        others = [replace(best, vectors=other.vectors) for other in super().tactics(isa)]
        return [*(other for other in others if other != best), *super().refinements(isa, best)]

    def cost(self, isa: Isa, tactic: Any) -> float:
        if self.items < self.fewest_items:
            return super().cost(isa, tactic)
        unit, rows = self.unit(isa), min(self.items, self.block(isa))
        left, right = self.planes
        each = self.blocks * left * right * unit.cycles(rows) + self.orders * unit.store_cycles
        return self.vectors_of_gates(isa) * each / rows

    def grid(self, isa: Isa, tactic: Panels) -> Grid:
        # Less than `block`, so that threads can share a batch. One thread gets the whole of it.
        return Grid(1, BLOCK if self.shares_weights else 1, len(self.problem.cells))

    def block(self, isa: Isa) -> int:
        """Return the items of a block, whose states are in scratch at the same time."""
        rows = self.unit(isa).rows
        states = 1 + max(cell.states for cell in self.problem.cells)
        return rows if rows * states * self.state_elements(isa) * SIZES["float32"] <= MOST_STATES else BLOCK

    @property
    def fewest_items(self) -> int:
        """Return the least number of items that a matrix unit multiplies; vectors multiply fewer."""
        return FEWEST_ITEMS if self.orders == 1 else FEWEST_OF_PLANES

    @staticmethod
    def unit(isa: Isa) -> MatrixUnit:
        """Return the matrix unit of a machine that has one."""
        return isa.matrix or AMX

    # ---- layout of weights and states
    @property
    def rounds_to_bytes(self) -> bool:
        """Return True if the model quantises the state dynamically.

        Any number of crowded units will do: these products do not saturate.
        """
        return self.problem.rounds

    @property
    def planes(self) -> tuple[int, int]:
        """Return the bytes of an element of the state, and those of a weight."""
        return SIZES[self._plain.dtype], SIZES[self._plain.weights_dtype]

    @property
    def in_planes(self) -> bool:
        """Return True if weights are packed a second time, in planes."""
        return self.planes[1] > 1

    @property
    def orders(self) -> int:
        """Return the number of powers of 256 whose products have sums of their own."""
        return sum(self.planes) - 1

    @property
    def blocks(self) -> int:
        """Return the number of blocks of K."""
        return -(-index(self._multiplied) // AMX.row_bytes)

    @property
    def rows(self) -> int:
        """Return the rows of a register of weights: 4 elements of K each, a multiple of STEPS for vectors."""
        return -(-index(self._multiplied) // (self.blocks * AMX.group * STEPS)) * STEPS

    @property
    def depth(self) -> int:
        """Return the elements of K in a block."""
        return self.rows * AMX.group

    def turns(self) -> int:
        return self.blocks * self.rows if self.elements == AMX.group else super().turns()

    def state_elements(self, isa: Isa) -> int:
        return max(super().state_elements(isa), -(-self.blocks * self.depth // isa.lanes) * isa.lanes)

    def matrix_vector(self, isa: Isa, stage: Stage) -> int:
        """Return the bytes of the weights of one vector of units, as the matrix unit reads them."""
        if not self.in_planes:
            return self.stage_vector(isa, stage)
        return len(stage.gates) * self.blocks * self.planes[1] * self.rows * AMX.row_bytes
