"""Problems along the innermost axis: softmax, norms, local response normalisation, reductions.

    softmax   y = program(e**(x - max x) / sum of e**(x - max x))
              a row of -inf (a query without visible keys) becomes zeros
    log       y = program(x - max x - log(sum of e**(x - max x)))
    layer     y = program((x - mean) / sqrt(variance + epsilon))        variance: the mean of (x - mean)**2
    rms       y = program(x / sqrt(mean of x**2 + epsilon))
    l2        y = program(x / max(sqrt(sum of x**2), epsilon))
    LRN       y[c] = program(x[c] * (bias + alpha / size * sum over k of x[c - before + k]**2) ** -beta)
              k in 0..size-1, before = (size - 1) // 2; missing channels are 0
    scaled    y = program(x / scale), scale = max |x| / 127             and one scale per row
    reduce    y = program(sum, max or min of x)                         one element per row
    extreme   y = program(max or min of all x)                          one element for all rows of all items

A norm's scale and shift (gamma, beta) and a mean's 1 / width are constants of the program; squares and absolute values
are instructions of the prologue. All machines reduce in the same order: element i goes to partial result i % 64, and
the partial results are combined by halves. Results are thus equal bit for bit for any number of lanes.
"""
from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer_server.engines.ir.rounding import MIDDLE, STEPS, row_scales
from infer_server.engines.lowering.epilogue.program import (
    COPY,
    INSTRUCTIONS,
    NUMPY,
    EpilogueProgram,
    Floats,
    load_meaning,
    store_meaning,
)
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import View

PARTIALS = 64
# largest: the maximum of numbers without a sign, by their bits, so that NaN is the largest
NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf, "largest": 0.0}
WIDEST_LRN = 64         # channels per window of local response normalisation
EXP = INSTRUCTIONS["exp_of_moderate"]
EXP_DOWN_TO_0 = INSTRUCTIONS["exp_down_to_0"]
ROOTS: dict[float, Callable[[Any, Callable[[Any], Any]], Any]] = {     # beta -> t**beta by square roots
    0.5: lambda t, root: root(t),
    0.75: lambda t, root: root(t) * root(root(t)),
    1.0: lambda t, root: t}


@dataclass(frozen=True)
class RowProblem(Problem):
    """Base of problems along rows.

    `sources` have one shape [..., width] (a stride of 0 broadcasts); `prologue` maps them to x, usually by
    dequantisation. y has their shape or one element per row; `operands` are further inputs of `program`, shaped as y.

    Constants: "prologue" and "program", each a sequence of float32 [1] or [width].
    """
    sources: tuple[View, ...]
    y: View
    operands: tuple[View, ...] = ()
    prologue: EpilogueProgram = COPY
    program: EpilogueProgram = EpilogueProgram()
    reads = ("sources", "operands")

    @property
    def width(self) -> int:
        return self.sources[0].shape[-1]

    @property
    def constants_width(self) -> int:
        return self.width

    @abstractmethod
    def meaning(self, x: Floats) -> Floats:
        """Return the program's accumulator for x [..., width]."""

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        arrays = [load_meaning(view.dtype, x) for view, x in zip(self.inputs, inputs, strict=True)]
        split = len(self.sources)
        x = self.prologue.meaning(None, arrays[:split], constants.get("prologue", ()))
        result = self.program.meaning(self.meaning(x), arrays[split:], constants.get("program", ()))
        return (store_meaning(self.y.dtype, result),)


@dataclass(frozen=True)
class Softmax(RowProblem):
    """Softmax, or log-softmax if `log`."""
    log: bool = False
    family = "softmax"

    def meaning(self, x: Floats) -> Floats:
        peak = reduced_rows("max", x)
        shifted = less_peak(x, peak)
        exponentials = np.asarray(EXP_DOWN_TO_0(NUMPY, shifted), np.float32)
        total = reduced_rows("sum", exponentials)
        result = shifted - log_of_positive(NUMPY, total) if self.log else exponentials * share_of(peak, total)
        return np.asarray(result, np.float32)


@dataclass(frozen=True)
class Norm(RowProblem):
    """Normalisation of kind "layer", "rms" or "l2"."""
    kind: str = "layer"
    epsilon: float = 1e-5
    family = "norm"

    def meaning(self, x: Floats) -> Floats:
        share, epsilon = np.float32(1 / self.width), np.float32(self.epsilon)
        if self.kind == "layer":
            x = x - reduced_rows("sum", x) * share
        total = reduced_rows("sum", x * x)
        if self.kind == "l2":
            scale = np.float32(1) / np.maximum(np.sqrt(total), epsilon)
        else:
            scale = np.float32(1) / np.sqrt(total * share + epsilon)
        return np.asarray(x * scale, np.float32)


@dataclass(frozen=True)
class ScaledRows(RowProblem):
    """Division of each row by its scale (ir/rounding.py), without a program.

    `scales` is the second output, float32 [..., 1]. Bytes are stored as y + MIDDLE, or as y if steps is UNSIGNED_STEPS.
    """
    scales: View | None = None
    steps: int = STEPS
    family = "scaled_rows"
    writes = ("y", "scales")

    @property
    def shift(self) -> float:
        """Number that is added to y before it is stored."""
        return MIDDLE if self.y.dtype == "uint8" and self.steps == STEPS else 0.0

    def meaning(self, x: Floats) -> Floats:
        return np.asarray(x * (np.float32(1) / row_scales(x, self.steps)) + np.float32(self.shift), np.float32)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        with np.errstate(invalid="ignore"):
            return *super().reference(inputs, constants), row_scales(
                load_meaning(self.sources[0].dtype, inputs[0]), self.steps)


@dataclass(frozen=True)
class ScaledNorm(Norm):
    """Norm whose result y is also written as ScaledRows: `numbers` and `scales`."""
    numbers: View | None = None
    scales: View | None = None
    family = "scaled_norm"
    writes = ("y", "numbers", "scales")

    @property
    def scaled(self) -> ScaledRows:
        """Problem of the rows and scales, which reads y."""
        assert self.numbers is not None
        return ScaledRows((self.y,), self.numbers, scales=self.scales)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        y, = super().reference(inputs, constants)
        return y, *self.scaled.reference([y], {})


@dataclass(frozen=True)
class Lrn(RowProblem):
    """Local response normalisation. The power is e**(-beta * log t), t > 0, or square roots for the betas of ROOTS."""
    size: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    bias: float = 1.0
    family = "lrn"

    def meaning(self, x: Floats) -> Floats:
        before = (self.size - 1) // 2
        squares = np.pad(x * x, [(0, 0)] * (x.ndim - 1) + [(before, self.size - 1 - before)])
        total = squares[..., :self.width]
        for k in range(1, self.size):
            total = total + squares[..., k:k + self.width]
        base = total * np.float32(self.alpha / self.size) + np.float32(self.bias)
        if self.beta in ROOTS:
            return np.asarray(x / ROOTS[self.beta](base, np.sqrt), np.float32)
        return np.asarray(x * EXP(NUMPY, log_of_positive(NUMPY, base) * np.float32(-self.beta)), np.float32)


@dataclass(frozen=True)
class Reduce(RowProblem):
    """Reduction to y [..., 1]. All constants are scalars."""
    kind: str = "sum"
    family = "reduce"

    @property
    def constants_width(self) -> int:
        return 1

    def meaning(self, x: Floats) -> Floats:
        return reduced_rows(self.kind, x)


@dataclass(frozen=True)
class Extreme(Reduce):
    """Maximum or minimum over all items. y is [1], shared by all items (its `item` is 0)."""
    family = "extreme"

    def meaning(self, x: Floats) -> Floats:
        extreme = x.max() if self.kind == "max" else x.min()
        return np.full((len(x), 1), extreme, np.float32)


def log_of_positive(machine: Any, x: Any) -> Any:
    """Return log x for positive x, NaN for NaN."""
    return machine.select(machine.compare(x, "oeq", x), INSTRUCTIONS["log_of_positive"](machine, x), x)


def reduced_rows(kind: str, x: Floats) -> Floats:
    """Return the sum, max or min of [..., width] as [..., 1]."""
    combine: Any = {"sum": np.add, "max": np.maximum, "min": np.minimum}[kind]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % PARTIALS)]
    chunks = np.pad(x, padding, constant_values=np.float32(NEUTRAL[kind])).reshape(*x.shape[:-1], -1, PARTIALS)
    partial: Any = chunks[..., 0, :]
    for i in range(1, chunks.shape[-2]):
        partial = combine(partial, chunks[..., i, :])
    while partial.shape[-1] > 1:
        half = partial.shape[-1] // 2
        partial = combine(partial[..., :half], partial[..., half:])
    return np.asarray(partial, np.float32)


def share_of(peak: Floats, total: Floats) -> Floats:
    """Return 1 / total, the factor of a row's exponentials, or 0 for a row of -inf."""
    return np.where(peak == -np.inf, np.float32(0), np.float32(1) / np.where(total == 0, np.float32(1), total))


def less_peak(x: Floats, peak: Floats) -> Floats:
    """Return x - peak, or x where the peak is -inf; `share_of` then makes it zeros."""
    return x - np.where(peak == -np.inf, np.float32(0), peak)
