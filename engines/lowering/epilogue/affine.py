"""Writing a program with as few instructions as its meaning allows.

A value is kept as a clipped linear form of what is already in registers,

    clip(offset + sum of scale_i * ref_i, low, high)            scale, offset, low, high: a number or one per channel

so that bias, batch norm, dequantisation, ReLU, residual addition and the final requantisation meet in the constants:
conv + bias + residual + ReLU + requantise is two fma, and the saturating store does the ReLU. Anything that is not
linear (a sigmoid) first *settles* the form: writes it into a register. Of a product of two tensors only one factor is
settled. The other stays a form, as the scale of the first: what the product is scaled by later meets its constants.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.lowering.epilogue.program import ProgramBuilder, Ref

Floats = NDArray[np.float64]
_INF: Floats = np.array(np.inf)
MOST_TERMS = 32         # of a form that is not settled: x = x + x, n times over, would have 2**n


def _floats(number: Any) -> Floats:
    return np.asarray(number, np.float64)


@dataclass(frozen=True)
class Affine:
    """clip(offset + sum(scale * ref for ref, scale in terms), low, high); a scale may be a form without a clip.

    saturates: the clip is one to the range of integers, so of NaN it makes an end of it.
    """
    terms: tuple[tuple[Ref, Floats | Affine], ...]
    offset: Floats
    low: Floats
    high: Floats
    saturates: bool = False

    @classmethod
    def of(cls, ref: Ref, scale: Any = 1.0, offset: Any = 0.0) -> Affine:
        return cls(((ref, _floats(scale)),), _floats(offset), -_INF, _INF)

    @classmethod
    def number(cls, number: Any) -> Affine:
        """A constant: one number, or one per channel."""
        return cls((), _floats(number), -_INF, _INF)

    @property
    def clipped(self) -> bool:
        return bool(np.any(self.low > -_INF) or np.any(self.high < _INF))

    @property
    def constant(self) -> bool:
        return not self.terms

    @property
    def register(self) -> Ref | None:
        """Where the value is, if it is in a register just so."""
        plain = len(self.terms) == 1 and _is_one(self.terms[0][1]) and not np.any(self.offset) and not self.clipped
        return self.terms[0][0] if plain else None

    @property
    def size(self) -> int:
        """The number of terms, including those of scales that are forms."""
        return sum(1 + (scale.size if isinstance(scale, Affine) else 0) for _, scale in self.terms)

    @property
    def one_fma(self) -> bool:
        """At most one instruction away from a register: writing it twice costs no more than keeping it."""
        return len(self.terms) == 1 and not isinstance(self.terms[0][1], Affine) and not self.clipped

    def scaled(self, scale: Any, offset: Any = 0.0) -> Affine:
        """scale * self + offset; a negative scale turns the clip around."""
        scale, offset = _floats(scale), _floats(offset)
        low, high = (self._moved(bound, scale, offset) for bound in (self.low, self.high))
        terms = tuple((ref, s.scaled(scale) if isinstance(s, Affine) else s * scale) for ref, s in self.terms)
        return replace(self, terms=terms, offset=self.offset * scale + offset, low=np.minimum(low, high),
                       high=np.maximum(low, high))

    @staticmethod
    def _moved(bound: Floats, scale: Floats, offset: Floats) -> Floats:
        """bound * scale + offset, where an infinite bound stays infinite even if the scale is 0."""
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
    """Arithmetic on Affine values, over a ProgramBuilder. coarse: the result is stored in a byte, so functions need not
    be finer."""

    def __init__(self, builder: ProgramBuilder, coarse: bool = False) -> None:
        self.builder, self.coarse = builder, coarse

    def settle(self, value: Affine) -> Ref:
        """The value in a register: a sum of fma, then what clip is left."""
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
        """Beside NaN the second is the result: the bound where integers are made of it, else what it was."""
        return self.builder.add(op, *((total, bound) if saturates or self.coarse else (bound, total)))

    def _factor(self, scale: Floats | Affine) -> Ref:
        return self.settle(scale) if isinstance(scale, Affine) else self._constant(scale)

    def _constant(self, numbers: Floats) -> Ref:
        """Where a byte is made of the result, infinities become the largest float32: no integer is made of infinity."""
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
        """An instruction that is not linear: its arguments are settled first."""
        return Affine.of(self.builder.add(op, *(self.settle(a) for a in arguments)))

    def requantise(self, value: Affine, scale: float, zero_point: int, low: int, high: int) -> Affine:
        """value / scale + zero_point; clips that the rounding and saturating store does anyway are dropped: 6 / scale
        may be a little less than 255 where the scale was made of 6."""
        moved = value.scaled(1.0 / scale, zero_point)
        return replace(moved, low=np.where(moved.low < low + 0.5, -_INF, moved.low),
                       high=np.where(moved.high > high - 0.5, _INF, moved.high))
