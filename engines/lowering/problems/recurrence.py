"""Recurrent cells over time: LSTM, GRU and RNN after their input projection.

    for t in time: for stage of the cell:
      sum[gate, unit] = sum over k of state[stage.source][k] * R[gate, unit, k]         for gate in stage.gates
      for update in stage.updates:
        state[update.slot] = program(x[...], sum[...], state[...], unit constants)      per unit
    store h to y

State 0 is h, which all units of the next product read: its new value is visible from the next step on (and to later
updates of the step). An LSTM has one stage and a second state, c. A GRU has one stage if the reset gate scales the
product (linear_before_reset), else two, with the states z and r * h between them.

Precision "int16" multiplies integers: the state, known to be in [-1, 1], in units of 2**-13, by 16-bit weights with a
scale per row. Sums are exact; the error of a product is that of rounding its factors, about 2**-13, and weights take
half the bytes. "int8" does so in 8 bits, with the state in units of 1/127 around a zero point of 128, for layers that
are bound by reading their weights in every step. All but these products is float32.

`rounds`: the model itself quantises the state before each step, to 8 bits of its own range, and its weights are bytes.
The integer product is exact; its scale is that of the weights times that of the state. A machine may add the products
of two neighbouring units of the state in 16 bits; the second one is `crowded` if they may not fit.

An item with its own length runs that many steps; y is zero after them.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.lowering.epilogue.functions import fma
from infer_server.engines.lowering.epilogue.program import EpilogueProgram, Floats, load_meaning, store_meaning
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import FLOATS, View

SECOND_LEVEL = 1 << 18  # smallest L2 cache of the targets, in bytes


@dataclass(frozen=True)
class QuantizedState:
    """Integer form of a state in [-1, 1]: round(state * one) + zero."""
    one: int
    zero: int


QUANTIZED_STATES = {"int16": QuantizedState(1 << 13, 0), "int8": QuantizedState(127, 128)}      # by precision

# ("x", gate), ("sum", gate), ("gate", gate) for their sum, ("state", slot), ("unit", constant of a unit)
Source = tuple[str, int]


@dataclass(frozen=True)
class Update:
    """New value of a state. `numbers` are the program's constants, shared by all units."""
    slot: int
    program: EpilogueProgram
    operands: tuple[Source, ...]
    numbers: tuple[float, ...]

    def meaning(self, operands: Sequence[Floats]) -> Floats:
        """Compute the new value in NumPy."""
        return self.program.meaning(None, operands, [np.array([number], np.float32) for number in self.numbers])


@dataclass(frozen=True)
class Stage:
    """Product with state `source` for some gates, and the updates that follow it."""
    gates: tuple[int, ...]
    source: int
    updates: tuple[Update, ...]


@dataclass(frozen=True)
class Cell:
    """Stages of a recurrent cell."""
    stages: tuple[Stage, ...]
    kept: int                   # number of states that persist between steps
    units: int                  # number of constants per unit

    @property
    def states(self) -> int:
        return 1 + max(update.slot for stage in self.stages for update in stage.updates)

    @property
    def gates(self) -> int:
        return sum(len(stage.gates) for stage in self.stages)


@dataclass(frozen=True)
class Recurrence(Problem):
    """Recurrent layer with D directions.

    gates [T, D G H]; y [T, D H]; first and last: the persistent states [D H] before and after.
    """
    gates: View
    hidden: int
    cells: tuple[Cell, ...]             # per direction
    backwards: tuple[bool, ...]
    y: View | None                      # None: nobody reads it
    first: tuple[View | None, ...]      # None: zeros, or a constant listed in `given`
    last: tuple[View | None, ...]       # None: nobody reads it
    lengths: View | None = None         # int32 []: number of steps of each item
    given: tuple[int, ...] = ()         # persistent states whose initial values are constants
    program: EpilogueProgram = EpilogueProgram()        # program from h to y ...
    numbers: tuple[float, ...] = ()     # ... and its constants, shared by all units
    precision: str = "fp32"
    rounds: bool = False                # implies precision "int8"
    crowded: int | None = None          # number of crowded units if it is small, else None
    family = "recurrence"
    computes_on = (*FLOATS, "int32")    # lengths are int32
    reads = ("gates", "first", "lengths")
    writes = ("y", "last")

    @property
    def macs(self) -> int:
        return self.steps * len(self.cells) * self.cells[0].gates * self.hidden ** 2

    @property
    def steps(self) -> int:
        return self.gates.shape[0]

    def first_constants(self, constants: Mapping[str, Any]) -> Sequence[Array]:
        """Return the initial states that are constants."""
        return constants["first"] if self.given else ()

    def scales_by_gate(self, constants: Mapping[str, Any]) -> list[Array]:
        """Return the scales of integer sums per gate, [D, H] each; none for floats."""
        if self.precision not in QUANTIZED_STATES:
            return []
        scales = np.asarray(constants["scales"], np.float32)
        return list(scales.reshape(len(self.cells), -1, self.hidden).swapaxes(0, 1))

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Compute the layer in NumPy.

        Constants: "weights" [D, G H, H], float32, int16 or int8; "units", a sequence of float32 [D, H]; "scales" [D, G
        H] for integers; "first", a float32 [D H] for each state of `given`.
        """
        given = iter(inputs)
        gates = load_meaning(self.gates.dtype, next(given))
        items, count = len(gates), len(self.cells)
        gates = gates.reshape(items, self.steps, count, -1, self.hidden)
        first = [load_meaning(view.dtype, next(given)).reshape(items, count, -1) if view else
                 np.zeros((items, count, self.hidden), np.float32) for view in self.first]
        for slot, constant in zip(self.given, self.first_constants(constants), strict=True):
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
        """Return one item's persistent states after a step; x is [G, H]."""
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
        """Return the sums of one gate, without the zero point's part, and their scale."""
        weights = np.asarray(constants["weights"])[d].reshape(-1, self.hidden, self.hidden)[gate]
        if self.precision not in QUANTIZED_STATES:
            return np.asarray(weights @ state, np.float32), np.float32(1)
        if self.rounds:
            integers, step = by_own_range(state)
            sums = (weights.astype(np.int64) @ integers.astype(np.int64)).astype(np.float32)
            return sums, self.scales_by_gate(constants)[gate][d] * step
        whole = np.rint(state * np.float32(QUANTIZED_STATES[self.precision].one)).astype(np.int64)
        sums = (weights.astype(np.int64) @ whole).astype(np.float32)
        return sums, self.scales_by_gate(constants)[gate][d]


def by_own_range(state: Floats) -> tuple[Floats, np.float32]:
    """Quantise a state to 256 steps between its minimum and maximum, with 0 on a step.

    Returns the integers in -255..255 and the step.
    """
    low, high = state.min(initial=0), state.max(initial=0)
    step = np.float32((high - low) / np.float32(255)) or np.float32(1)
    zero = np.clip(np.rint(-low / step), 0, 255)
    return np.clip(np.rint(state / step) + zero, 0, 255) - zero, step


def crowded_units(weights: Array) -> NDArray[np.intp]:
    """Return the odd units of int8 weights [..., H] whose products may overflow 16 bits with those of the unit before.

    A sum of two u8 * s8 products fits if the weights of equal sign add up to at most 128.
    """
    rows = weights.reshape(-1, weights.shape[-1])[:, :weights.shape[-1] // 2 * 2].astype(np.int16)
    first, second = rows[:, ::2], rows[:, 1::2]
    most = np.maximum(np.maximum(first, 0) + np.maximum(second, 0), -np.minimum(first, 0) - np.minimum(second, 0))
    return 2 * np.flatnonzero((most > 128).any(axis=0)) + 1


def integer_precision(weights: Array) -> str:
    """Return the precision of recurrent weights [D, G H, H] in INT8 engines: 16 bits if they fit in L2."""
    return "int16" if weights[0].size * 2 <= SECOND_LEVEL else "int8"


def integer_weights(weights: Array, precision: str) -> tuple[Array, Array]:
    """Quantise recurrent weights [D, G H, H], and return int16 or int8 weights and scales [D, G H].

    A row's scale is the finest for which its weights fit their bits, and sums of products fit 32 bits.
    """
    dtype, one = precision, QUANTIZED_STATES[precision].one
    most = one + QUANTIZED_STATES[precision].zero      # largest stored state
    largest = np.abs(weights).max(axis=2) / np.iinfo(dtype).max
    total = np.abs(weights).sum(axis=2) / ((np.iinfo(np.int32).max - weights.shape[2] * most) / most)
    step = np.maximum(largest, total)
    step = np.where(step > 0, step, 1)
    return np.rint(weights / step[..., None]).astype(dtype), (step / one).astype(np.float32)
