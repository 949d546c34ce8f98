"""Affine forms, which fold pointwise arithmetic into few instructions of an epilogue program.

A value is kept as a clipped affine form of registers,

    clip(offset + sum of scale_i * ref_i, low, high)            scale, offset, low, high: scalars or per channel

so that bias, batch norm, dequantisation, ReLU, residual addition and requantisation fold into constants: conv + bias +
residual + ReLU + requantise is two fma, and the saturating store does the ReLU. Before a nonlinear function (a sigmoid)
the form is *settled*: written to a register. For a product of two tensors only one factor is settled; the other stays a
form and becomes its scale, so that later scales still fold into constants.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.lowering.epilogue.program import ProgramBuilder, Ref

Floats = NDArray[np.float64]
_INF: Floats = np.array(np.inf)
MOST_TERMS = 32         # longer forms are settled: repeating x = x + x would double them each time


def _floats(number: Any) -> Floats:
    return np.asarray(number, np.float64)


@dataclass(frozen=True)
class Affine:
    """Form clip(offset + sum(scale * ref for ref, scale in terms), low, high); a scale may be an unclipped form.

    saturates: the clip is that of integer saturation, which maps NaN to a bound.
    """
    terms: tuple[tuple[Ref, Floats | Affine], ...]
    offset: Floats
    low: Floats
    high: Floats
    saturates: bool = False

    @classmethod
    def of(cls, ref: Ref, scale: Any = 1.0, offset: Any = 0.0) -> Affine:
        """Return scale * ref + offset."""
        return cls(((ref, _floats(scale)),), _floats(offset), -_INF, _INF)

    @classmethod
    def number(cls, number: Any) -> Affine:
        """Return a constant, scalar or per channel."""
        return cls((), _floats(number), -_INF, _INF)

    @property
    def clipped(self) -> bool:
        return bool(np.any(self.low > -_INF) or np.any(self.high < _INF))

    @property
    def constant(self) -> bool:
        return not self.terms

    @property
    def register(self) -> Ref | None:
        """Register that holds exactly this value, or None."""
        plain = len(self.terms) == 1 and _is_one(self.terms[0][1]) and not np.any(self.offset) and not self.clipped
        return self.terms[0][0] if plain else None

    @property
    def size(self) -> int:
        """Number of terms, including those of scales that are forms."""
        return sum(1 + (scale.size if isinstance(scale, Affine) else 0) for _, scale in self.terms)

    @property
    def one_fma(self) -> bool:
        """True if at most one instruction is needed, so that computing it twice costs no more than keeping it."""
        return len(self.terms) == 1 and not isinstance(self.terms[0][1], Affine) and not self.clipped

    def scaled(self, scale: Any, offset: Any = 0.0) -> Affine:
        """Return scale * self + offset; a negative scale swaps the bounds."""
        scale, offset = _floats(scale), _floats(offset)
        low, high = (self._moved(bound, scale, offset) for bound in (self.low, self.high))
        terms = tuple((ref, s.scaled(scale) if isinstance(s, Affine) else s * scale) for ref, s in self.terms)
        return replace(self, terms=terms, offset=self.offset * scale + offset, low=np.minimum(low, high),
                       high=np.maximum(low, high))

    @staticmethod
    def _moved(bound: Floats, scale: Floats, offset: Floats) -> Floats:
        """Return bound * scale + offset; an infinite bound stays infinite even for a scale of 0."""
        with np.errstate(invalid="ignore"):
            moved = bound * scale + offset
        sign = np.where(scale < 0, -1.0, 1.0)
        return np.where(np.isinf(bound), bound * sign, moved)

    def clip(self, low: Any, high: Any, saturates: bool = False) -> Affine:
        low, high = _floats(low), _floats(high)
        return Affine(self.terms, self.offset, np.clip(self.low, low, high), np.clip(self.high, low, high),
                      self.saturates or saturates)


def _is_one(scale: Floats | Affine) -> bool:
    return not isinstance(scale, Affine) and bool(np.all(scale == 1))


class AffineWriter:
    """Arithmetic on Affine values over a ProgramBuilder.

    coarse: the result is a byte. approximate: the result is rounded to a byte in the end, so approximations suffice.
    """

    def __init__(self, builder: ProgramBuilder, coarse: bool = False, approximate: bool = False) -> None:
        self.builder, self.coarse, self.approximate = builder, coarse, coarse or approximate

    def settle(self, value: Affine) -> Ref:
        """Write the value to a register, as a sum of fma and the remaining clip."""
        add = self.builder.add
        total: Ref | None = None
        for ref, scale in value.terms:
            if total is None:
                plain, shifted = _is_one(scale), bool(np.any(value.offset != 0))
                if plain and not shifted:
                    total = ref
                elif plain:
                    total = add("add", ref, self._constant(value.offset))
                elif not shifted:
                    total = add("mul", ref, self._factor(scale))
                else:
                    total = add("fma", ref, self._factor(scale), self._constant(value.offset))
            elif _is_one(scale):
                total = add("add", total, ref)
            else:
                total = add("fma", ref, self._factor(scale), total)
        if total is None:
            total = self._constant(value.offset)
        if np.any(value.low > -_INF):
            total = self._limited("max", total, self._constant(value.low), value.saturates)
        if np.any(value.high < _INF):
            total = self._limited("min", total, self._constant(value.high), value.saturates)
        return total

    def _limited(self, op: str, total: Ref, bound: Ref, saturates: bool) -> Ref:
        """Apply a bound. For NaN the second argument wins: the bound if the result is an integer, else NaN."""
        return self.builder.add(op, *((total, bound) if saturates or self.coarse else (bound, total)))

    def _factor(self, scale: Floats | Affine) -> Ref:
        return self.settle(scale) if isinstance(scale, Affine) else self._constant(scale)

    def _constant(self, numbers: Floats) -> Ref:
        """Return a constant; for byte results infinities become the largest float32, as they cannot be rounded."""
        largest = float(np.finfo(np.float32).max)
        return self.builder.constant(np.clip(numbers, -largest, largest) if self.coarse else numbers)

    def settled(self, value: Affine) -> Affine:
        return Affine.of(self.settle(value))

    def add(self, a: Affine, b: Affine) -> Affine:
        if a.constant or b.constant:
            a, b = (b, a) if a.constant else (a, b)
            return a.scaled(1.0, b.offset)
        long = a.size + b.size > MOST_TERMS
        a, b = (self.settled(v) if v.clipped or long else v for v in (a, b))
        return Affine(a.terms + b.terms, a.offset + b.offset, -_INF, _INF)

    def multiply(self, a: Affine, b: Affine) -> Affine:
        if a.constant or b.constant:
            a, b = (b, a) if a.constant else (a, b)
            return a.scaled(b.offset)
        a, b = (self.settled(v) if v.clipped else v for v in (a, b))
        if a.register is not None:
            a, b = b, a
        if a.size >= MOST_TERMS:
            a = self.settled(a)
        return Affine(((self.settle(b), a),), _floats(0.0), -_INF, _INF)

    def apply(self, op: str, *arguments: Affine) -> Affine:
        """Add a nonlinear instruction, whose arguments are settled first."""
        return Affine.of(self.builder.add(op, *(self.settle(a) for a in arguments)))

    def requantise(self, value: Affine, scale: float, zero_point: int, low: int, high: int) -> Affine:
        """Return value / scale + zero_point, without clips that the saturating store makes redundant.

        The bounds have a tolerance of half a step: with scale = 6 / 255, 6 / scale may be slightly below 255.
        """
        moved = value.scaled(1.0 / scale, zero_point)
        return replace(moved, low=np.where(moved.low < low + 0.5, -_INF, moved.low),
                       high=np.where(moved.high > high - 0.5, _INF, moved.high))
