"""Recurrent cells from step to step: LSTM, GRU, RNN after their projection.

    for t in time: for stage of the cell:          see cells.py
      sum[gate, unit] = sum over k of state[k] * R[gate, unit, k]
      the updates of the stage; h goes to y        recurrent_steps.py is their code

precision "int16" multiplies integers: the state, which is known to be between -1 and 1, in units of 2**-13, by weights
of 16 bits with a scale per row, pairs at a time (vpmaddwd, vpdpwssd). Sums are exact; the error of a product is that of
rounding its factors, some 2**-13, and the weights take half the bytes. "int8" does the same in 8 bits, four products at
a time (vpdpbusd): the state in units of 1/127 around a zero point of 128, for layers of so many weights that reading
them in every step is what takes the time. Everything but these products is float32.

An item with a length of its own walks that many steps; y is zero behind them.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import Module
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.common.arithmetic import Arithmetic, arithmetic_for
from engines.backends.llvm.kernels.kernel import Grid, KernelSpec, Tactic
from engines.backends.llvm.kernels.recurrent.cells import Cell, Stage
from engines.backends.llvm.kernels.recurrent.steps import BLOCK, STEPS, WHOLE, emit_recurrence
from engines.lowering.epilogue.functions import fma
from engines.lowering.epilogue.program import EpilogueProgram, Floats, load_meaning, store_meaning
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import FLOATS, View

FIRST_LEVEL = 1 << 15   # bytes of cache that most machines have there
SECOND_LEVEL = 1 << 18  # ... and there, that some have no more of


@dataclass(frozen=True)
class Panels(Tactic):
    """Vectors of units that one item's micro-kernel computes; larger tiles of items take what registers are left."""
    vectors: int
    prefetch: bool = False      # ask for the next panel's weights, a line at every k

    def __str__(self) -> str:
        return f"panels of {self.vectors} vectors{' prefetch' if self.prefetch else ''}"


@dataclass(frozen=True)
class Recurrence(KernelSpec):
    """gates [T, D G H]; y [T, D H]; first and last: the kept states [D H] before and after. D directions."""
    gates: View
    hidden: int
    cells: tuple[Cell, ...]             # of each direction
    backwards: tuple[bool, ...]
    y: View | None                      # None: nobody reads it
    first: tuple[View | None, ...]      # None: zeros, or a constant for every item: see given
    last: tuple[View | None, ...]       # None: nobody reads it
    lengths: View | None = None         # int32 []: the items' own numbers of steps
    given: tuple[int, ...] = ()         # the kept states whose first values are constants
    program: EpilogueProgram = EpilogueProgram()        # h on its way to y ...
    numbers: tuple[float, ...] = ()     # ... and its constants, the same for every unit
    precision: str = "fp32"
    family = "recurrence"
    computes_on = (*FLOATS, "int32")    # lengths are int32

    @property
    def inputs(self) -> tuple[View, ...]:
        return tuple(view for view in (self.gates, *self.first, self.lengths) if view)

    @property
    def outputs(self) -> tuple[View, ...]:
        return tuple(view for view in (self.y, *self.last) if view)

    @property
    def macs(self) -> int:
        return self.steps * len(self.cells) * self.cells[0].gates * self.hidden ** 2

    @property
    def steps(self) -> int:
        return self.gates.shape[0]

    @property
    def step_bytes(self) -> int:
        """Of the weights that one step of one direction reads."""
        return self.cells[0].gates * self.hidden * self.turns() * self.arithmetic.weight_bytes(_ONE_LANE)

    @property
    def arithmetic(self) -> Arithmetic:
        whole = WHOLE.get(self.precision)
        return whole.arithmetic if whole else arithmetic_for(self.precision, _ONE_LANE)

    @property
    def scales(self) -> int:
        """Constants of a unit that make real numbers of its integer sums."""
        return self.cells[0].gates if self.precision in WHOLE else 0

    # ---- tiles
    def items(self, isa: Isa) -> int:
        """Of the largest tile. Weights that stay in the first level of cache are read for one item as fast as they are
        multiplied; others are read once for as many items as there are registers."""
        if self.lengths is not None or self.step_bytes <= FIRST_LEVEL:
            return 1
        most = max(len(stage.gates) for stage in self.cells[0].stages)
        return max(items for items in range(1, BLOCK + 1) if items == 1 or self._fits(isa, items, most))

    def vectors(self, isa: Isa, tactic: Panels, stage: Stage, items: int) -> int:
        """Of units, in a tile of that many items."""
        return max(v for v in range(1, tactic.vectors + 1) if v == 1 or self._fits(isa, items, v * len(stage.gates)))

    def _fits(self, isa: Isa, items: int, weights: int) -> bool:
        """Where dot2 is two instructions, their products need a register; a factor of dot4 may take several."""
        each = isa.ready_bytes // isa.bytes if self.precision == "int8" else 1
        return fits(isa, items, weights, int(bool(self.scales) and items > 1 and not isa.one_dot2), each)

    def tactics(self, isa: Isa) -> Sequence[Panels]:
        most = max(len(stage.gates) for stage in self.cells[0].stages)
        vectors = range(1, -(-self.hidden // isa.lanes) + 1)
        widest = max(v for v in vectors if v == 1 or self._fits(isa, 1, v * most))
        return tuple(Panels(v) for v in dict.fromkeys((widest, max(widest // 2, 1), 1)))

    def refinements(self, isa: Isa, best: Panels) -> Sequence[Panels]:
        return (replace(best, prefetch=True),) if self.step_bytes >= SECOND_LEVEL else ()

    def packing(self, tactic: Panels) -> None:
        """Weights lie vector by vector, whatever the panels."""
        return

    def grid(self, isa: Isa, tactic: Panels) -> Grid:
        return Grid(1, self.items(isa), len(self.cells))

    # ---- how weights and states lie
    def turns(self) -> int:
        """Of the K loop."""
        return -(-self.hidden // (self.arithmetic.elements * STEPS)) * STEPS

    @property
    def head(self) -> int:
        """Turns before the K loop's: where the state has a zero point, a turn's bytes hold what a sum begins with."""
        return int(self.precision in WHOLE and WHOLE[self.precision].zero != 0)

    def stage_vector(self, isa: Isa, stage: Stage) -> int:
        """Bytes of the weights of one vector of units."""
        return (self.head + self.turns()) * len(stage.gates) * self.arithmetic.weight_bytes(isa)

    def room(self, isa: Isa) -> int:
        """Elements of a state: whole vectors, and all that the K loop reads."""
        step = max(isa.lanes, self.arithmetic.elements * STEPS)
        return -(-self.hidden // step) * step

    def emit(self, module: Module, name: str, isa: Isa, tactic: Panels) -> None:
        emit_recurrence(self, module, name, isa, tactic)

    # ---- constants
    def pack(self, isa: Isa, tactic: Panels, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """"weights": [D, G H, H], float32, int16, int8 -> [direction][stage][vector of units][k][gate][lane][element],
        where there is a zero point, before the first k the int32 that makes up for it;
        "units": a sequence of float32 [D, H], "scales": [D, G H] -> [direction][vector of units][constant][lane];
        "first": for each given state float32 [D H], as it is."""
        vectors = -(-self.hidden // isa.lanes)
        arithmetic, weights = self.arithmetic, np.asarray(constants["weights"])
        weights = arithmetic.store_weights(weights).reshape(len(self.cells), -1, self.hidden, self.hidden)
        rows = ((0, vectors * isa.lanes - self.hidden), (0, self.turns() * arithmetic.elements - self.hidden))
        parts = []
        for cell, own in zip(self.cells, weights, strict=True):
            for stage in cell.stages:
                padded = np.pad(own[list(stage.gates)], ((0, 0), *rows))
                split = padded.reshape(len(stage.gates), vectors, isa.lanes, self.turns(), arithmetic.elements)
                if self.head:
                    start = np.int32(-WHOLE[self.precision].zero) * split.sum((3, 4), np.int32)
                    split = np.concatenate([start[..., None].view(np.int8)[..., None, :], split], 3)
                parts.append(split.transpose(1, 3, 0, 2, 4).ravel())
        units = [*constants["units"], *self._rows_of_scales(constants)]
        table = np.zeros((len(self.cells), len(units), vectors * isa.lanes), np.float32)
        for i, constant in enumerate(units):
            table[:, i, :self.hidden] = constant
        by_vector = table.reshape(len(self.cells), len(units), vectors, isa.lanes).transpose(0, 2, 1, 3)
        return np.concatenate(parts), by_vector.ravel(), *(np.asarray(s, np.float32) for s in self._given(constants))

    def _given(self, constants: Mapping[str, Any]) -> Sequence[Array]:
        """The first states that are constants."""
        return constants["first"] if self.given else ()

    def _rows_of_scales(self, constants: Mapping[str, Any]) -> list[Array]:
        """For each gate [D, H]."""
        if not self.scales:
            return []
        scales = np.asarray(constants["scales"], np.float32)
        return list(scales.reshape(len(self.cells), -1, self.hidden).swapaxes(0, 1))

    # ---- meaning
    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        given = iter(inputs)
        gates = load_meaning(self.gates.dtype, next(given))
        items, count = len(gates), len(self.cells)
        gates = gates.reshape(items, self.steps, count, -1, self.hidden)
        first = [load_meaning(view.dtype, next(given)).reshape(items, count, -1) if view else
                 np.zeros((items, count, self.hidden), np.float32) for view in self.first]
        for slot, constant in zip(self.given, self._given(constants), strict=True):
            first[slot] += constant.reshape(count, -1)
        ends = np.minimum(next(given), self.steps) if self.lengths else np.full(items, self.steps)
        y = np.zeros((items, self.steps, count, self.hidden), np.float32)
        last = [np.zeros_like(state) for state in first]
        for d, backwards in enumerate(self.backwards):
            for item in range(items):
                state = [kept[item, d] for kept in first]
                for turn in range(int(ends[item])):
                    t = int(ends[item]) - 1 - turn if backwards else turn
                    state = self._step(d, gates[item, t, d], state, constants)
                    y[item, t, d] = state[0]
                for kept, value in zip(last, state, strict=True):
                    kept[item, d] = value
        results = []
        if self.y:
            numbers = [np.array(number, np.float32) for number in self.numbers]
            stored = self.program.meaning(y.reshape(items, self.steps, -1), [], numbers)
            results.append(store_meaning(self.y.dtype, stored))
        results += [store_meaning(view.dtype, kept.reshape(items, -1))
                    for view, kept in zip(self.last, last, strict=True) if view]
        return tuple(results)

    def _step(self, d: int, x: Floats, kept: list[Floats], constants: Mapping[str, Any]) -> list[Floats]:
        """One item's kept states after a step; x [G, H]."""
        cell = self.cells[d]
        new, old = dict(enumerate(kept)), kept[0]
        for stage in cell.stages:
            source = old if stage.source == 0 else new[stage.source]
            sums, full = {}, {}
            for gate in stage.gates:
                total, scale = self._product(d, gate, source, constants)
                sums[gate], full[gate] = total * scale, fma(total, scale, x[gate])
            for update in stage.updates:
                read: dict[str, Any] = {"x": x, "sum": sums, "gate": full, "state": {**new, 0: old},
                                        "unit": [unit[d] for unit in constants["units"]]}
                new[update.slot] = update.meaning([read[kind][index] for kind, index in update.operands])
        return [new[slot] for slot in range(cell.kept)]

    def _product(self, d: int, gate: int, state: Floats, constants: Mapping[str, Any]) -> tuple[Floats, Any]:
        """The sums of one gate, without the zero point's part, and what makes real numbers of them."""
        weights = np.asarray(constants["weights"])[d].reshape(-1, self.hidden, self.hidden)[gate]
        if not self.scales:
            return np.asarray(weights @ state, np.float32), np.float32(1)
        whole = np.rint(state * np.float32(WHOLE[self.precision].one)).astype(np.int64)
        sums = (weights.astype(np.int64) @ whole).astype(np.float32)
        return sums, self._rows_of_scales(constants)[gate][d]


_ONE_LANE = Isa("one lane", 1, 16, "", "", frozenset())


def whole_precision(weights: Array) -> str:
    """Of recurrent weights [D, G H, H] in an INT8 engine: 16 bits where they stay in the second level of cache."""
    return "int16" if weights[0].size * 2 <= SECOND_LEVEL else "int8"


def whole_weights(weights: Array, precision: str) -> tuple[Array, Array]:
    """[D, G H, H] float32 -> (int16 or int8, scales [D, G H]).

    A row's scale is the finest for which neither a weight leaves its bits nor a sum of products 32.
    """
    dtype, one = WHOLE[precision].arithmetic.weights_dtype, WHOLE[precision].one
    most = one + WHOLE[precision].zero      # of a state as it is stored
    largest = np.abs(weights).max(axis=2) / np.iinfo(dtype).max
    total = np.abs(weights).sum(axis=2) / ((np.iinfo(np.int32).max - weights.shape[2] * most) / most)
    step = np.maximum(largest, total)
    step = np.where(step > 0, step, 1)
    return np.rint(weights / step[..., None]).astype(dtype), (step / one).astype(np.float32)


def fits(isa: Isa, items: int, weights: int, spare: int = 0, each: int = 1) -> bool:
    """Whether a tile's accumulators fit the registers, beside the fewer of its two sides and one of the other, each in
    so many registers, and what the arithmetic needs to spare."""
    return items * weights + each * (min(items, weights) + 1) + spare <= isa.registers
