"""Scalar instructions: arithmetic, comparisons, conversions, bits."""
from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from scripts.testing.gpu.ptx.machine import TYPES, Run, action
from scripts.testing.gpu.ptx.memory import Array
from scripts.testing.gpu.ptx.text import Fault, Instruction


def _operands(run: Run, i: Instruction, count: int, type_: str = "") -> list[Array]:
    return [run.get(i.one(n), type_ or i.op[-1]) for n in range(1, count + 1)]


def _addends(run: Run, i: Instruction, count: int) -> list[Array]:
    """Return the operands of a sum; from sm_100 on all but the last may be float16, converted to float32."""
    if [*i.op[-2:]] != ["f32", "f16"]:
        return _operands(run, i, count)
    halves = (array.astype(np.float32) for array in _operands(run, i, count - 1))
    return [*halves, run.get(i.one(count), "f32")]


def _each(count: int, function: Callable[..., Any],
          read: Callable[[Run, Instruction, int], list[Array]] = _operands) -> Callable[[Run, Instruction], None]:
    """Return an instruction whose operands and result have one type."""
    def act(run: Run, i: Instruction) -> None:
        operands = read(run, i, count)
        if operands[0].dtype.kind == "f":
            with np.errstate(all="ignore"):
                result = function(*operands)
        else:       # arrays of integers wrap without a warning
            result = function(*operands)
        run.put(i.one(0), np.asarray(result, operands[0].dtype))
    return act


# ---- arithmetic
def _least(a: Array, b: Array) -> Array:
    """Return the minimum: a number if only one operand is NaN, and -0 below 0."""
    return a if a.dtype.kind == "b" else np.where((a == b) & np.signbit(b) if a.dtype.kind == "f" else False, b,
                                                  np.fmin(a, b))


def _greatest(a: Array, b: Array) -> Array:
    return np.where((a == b) & ~np.signbit(b) if a.dtype.kind == "f" else False, b, np.fmax(a, b))


def _quotient(a: Array, b: Array) -> Array:
    """Divide; integers truncate toward zero. Division by 0 is unspecified: all bits are set here."""
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    exact = np.where(b == 0, 1, b)
    return np.where(b == 0, ~np.zeros_like(a), (a - _remainder(a, exact)) // exact)


def _remainder(a: Array, b: Array) -> Array:
    """Return the remainder, with the sign of a."""
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b)))


action("add", modifiers="rn")(_each(2, np.add, _addends))
action("sub", modifiers="rn")(_each(2, np.subtract, _addends))
action("min")(_each(2, _least))
action("max")(_each(2, _greatest))
action("div", modifiers="rn")(_each(2, _quotient))
action("rem")(_each(2, _remainder))
action("and")(_each(2, np.bitwise_and))
action("or")(_each(2, np.bitwise_or))
action("xor")(_each(2, np.bitwise_xor))
action("not")(_each(1, np.invert))
action("neg")(_each(1, np.negative))
action("abs")(_each(1, np.abs))
action("copysign")(_each(2, lambda sign, size: np.copysign(size, sign)))
action("sqrt", modifiers="rn")(_each(1, np.sqrt))
action("rcp", modifiers="rn")(_each(1, lambda x: np.float32(1) / x))


@action("ex2", modifiers="approx ftz")
def _ex2(run: Run, i: Instruction) -> None:
    """Compute 2**x as the number nearest to it among those within 2**-22; results below 2**-126 are 0."""
    x, = _operands(run, i, 1)
    with np.errstate(all="ignore"):
        result = np.exp2(x.astype(np.float64)).astype(np.float32)
    run.put(i.one(0), np.where(result < np.finfo(np.float32).tiny, np.float32(0), result))


def _high(a: Array, b: Array) -> Array:
    """Return the upper half of the product."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
        return (a.astype(wide) * b.astype(wide) >> bits).astype(a.dtype)
    whole = [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]      # Python's integers do not overflow
    return np.array(whole, a.dtype)


@action("mul", modifiers="lo hi wide rn")
def _mul(run: Run, i: Instruction) -> None:
    a, b = _operands(run, i, 2)
    with np.errstate(all="ignore"):
        if "wide" in i.op:
            wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
            run.put(i.one(0), a.astype(wide) * b.astype(wide))
        else:
            run.put(i.one(0), _high(a, b) if "hi" in i.op else a * b)


@action("mad", modifiers="lo wide")
def _mad(run: Run, i: Instruction) -> None:
    type_ = i.op[-1]
    a, b = _operands(run, i, 2)
    with np.errstate(all="ignore"):
        if "wide" in i.op:
            wide = f"{type_[0]}{2 * int(type_[1:])}"
            run.put(i.one(0), a.astype(TYPES[wide]) * b.astype(TYPES[wide]) + run.get(i.one(3), wide))
        else:
            run.put(i.one(0), a * b + run.get(i.one(3), type_))


def fused(a: Array, b: Array, c: Array) -> Array:
    """Compute a * b + c of float32, rounded once.

    The sum is taken in float64, and its last bit made odd if it was inexact (Boldo and Melquiond, "Emulation of FMA and
    correctly rounded sums", 2008).
    """
    with np.errstate(all="ignore"):
        product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        total = product + c
        back = total - product
        error = (product - (total - back)) + (c - back)
        bits = total.view(np.int64)
        inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        odd = np.where(inexact, bits + np.where((error > 0) == (total > 0), 1, -1), bits)
        return odd.view(np.float64).astype(np.float32)


def fused_double(a: Array, b: Array, c: Array) -> Array:
    """Compute a * b + c of float64, rounded once, by exact fractions."""
    with np.errstate(all="ignore"):
        result = np.asarray(a * b + c)
    usual = np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & np.isfinite(result)
    exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(*(v[usual].tolist() for v in (a, b, c)),
                                                                       strict=True)]
    result[usual] = [float(total) if total else plain for total, plain in zip(exact, result[usual], strict=True)]
    return result


@action("fma", modifiers="rn")
def _fma(run: Run, i: Instruction) -> None:
    a, b, c = _addends(run, i, 3)
    run.put(i.one(0), (fused if c.dtype == np.float32 else fused_double)(a, b, c))


@action("dp4a")
def _dp4a(run: Run, i: Instruction) -> None:
    a, b = (run.get(i.one(n), "b32").view(np.uint8 if i.op[n] == "u32" else np.int8).reshape(-1, 4).astype(np.int32)
            for n in (1, 2))
    run.put(i.one(0), run.get(i.one(3), "s32") + (a * b).sum(1, dtype=np.int32))


@action("dp2a", modifiers="lo hi")
def _dp2a(run: Run, i: Instruction) -> None:
    """Multiply both halves of a word by the lower or the upper two bytes of another, and add."""
    a = run.get(i.one(1), "b32").view(np.uint16 if i.op[2] == "u32" else np.int16).reshape(-1, 2)
    b = run.get(i.one(2), "b32").view(np.uint8 if i.op[3] == "u32" else np.int8).reshape(-1, 4)
    b = b[:, 2:] if i.op[1] == "hi" else b[:, :2]
    run.put(i.one(0), run.get(i.one(3), "s32") + (a.astype(np.int32) * b).sum(1, dtype=np.int32))


# ---- comparisons
_COMPARE: dict[str, Any] = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                            "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
                            "hs": np.greater_equal}
_UNORDERED = {f"{word}u": word for word in ("eq", "ne", "lt", "le", "gt", "ge")}        # true if an operand is NaN


@action("setp", modifiers=" ".join([*_COMPARE, *_UNORDERED, "num", "nan"]))
def _setp(run: Run, i: Instruction) -> None:
    a, b = _operands(run, i, 2)
    word = i.op[1]
    nan = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(len(a), bool)
    if word in ("num", "nan"):
        run.put(i.one(0), nan if word == "nan" else ~nan)
    elif word in _UNORDERED:
        run.put(i.one(0), _COMPARE[_UNORDERED[word]](a, b) | nan)
    else:
        run.put(i.one(0), _COMPARE[word](a, b) & ~nan)


@action("selp")
def _selp(run: Run, i: Instruction) -> None:
    a, b = _operands(run, i, 2)
    run.put(i.one(0), np.where(run.get(i.one(3), "pred"), a, b))


# ---- bits
def _shifted(a: Array, by: Array, left: bool) -> Array:
    """Shift; by more bits than the type has the result is 0, or the sign."""
    bits = 8 * a.dtype.itemsize
    inside = np.minimum(by, bits - 1).astype(a.dtype)
    if left:
        return np.where(by < bits, a << inside, 0).astype(a.dtype)
    return np.where(by < bits, a >> inside, a >> (bits - 1) if a.dtype.kind == "i" else 0).astype(a.dtype)


@action("shl", "shr")
def _shift(run: Run, i: Instruction) -> None:
    a = run.get(i.one(1), i.op[-1])
    run.put(i.one(0), _shifted(a, run.get(i.one(2), "u32"), i.op[0] == "shl"))


@action("shf", modifiers="l r wrap clamp")
def _funnel(run: Run, i: Instruction) -> None:
    """Shift (b, a) left and keep the upper word, or right and keep the lower one."""
    low, high, by = (run.get(i.one(n), "u32").astype(np.uint64) for n in (1, 2, 3))
    by = by & np.uint64(31) if "wrap" in i.op else np.minimum(by, np.uint64(32))
    both = high << np.uint64(32) | low
    result = both << by >> np.uint64(32) if "l" in i.op[1:] else both >> by
    run.put(i.one(0), result.astype(np.uint32))


@action("bfe")
def _bfe(run: Run, i: Instruction) -> None:
    a, start, length = (run.get(i.one(1), i.op[-1]), *(run.get(i.one(n), "u32") & 255 for n in (2, 3)))
    bits = 8 * a.dtype.itemsize
    if np.any((length == 0) | (start + length > bits)):
        raise Fault("a field of no bits, or beyond the register")
    up = (bits - start - length).astype(a.dtype)
    run.put(i.one(0), (a << up) >> (bits - length).astype(a.dtype))


@action("bfi")
def _bfi(run: Run, i: Instruction) -> None:
    """Insert the lowest bits of a into b."""
    a, b = (run.get(i.one(n), i.op[-1]) for n in (1, 2))
    start, length = ((run.get(i.one(n), "u32") & 255).astype(a.dtype) for n in (3, 4))
    if np.any(start + length >= 8 * a.dtype.itemsize + (start == 0)):
        raise Fault("a field that reaches the register's end")
    mask = ((np.ones_like(a) << length) - np.ones_like(a)) << start
    run.put(i.one(0), b & ~mask | a << start & mask)


@action("prmt")
def _prmt(run: Run, i: Instruction) -> None:
    a, b, order = (run.get(i.one(n), "b32").astype(np.uint64) for n in (1, 2, 3))
    both, result = a | b << np.uint64(32), np.zeros(run.size, np.uint64)
    for byte in range(4):
        digit = order >> np.uint64(4 * byte) & np.uint64(15)
        value = both >> (digit & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(value & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= np.where(digit & np.uint64(8), sign, value) << np.uint64(8 * byte)
    run.put(i.one(0), result.astype(np.uint32))


# ---- conversions
_ROUNDING: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _to_integer(x: Array, target: np.dtype[Any]) -> Array:
    """Convert with saturation; NaN becomes 0, or the lowest number of 64 bits."""
    info = np.iinfo(target)
    inside = np.clip(x.astype(np.float64), float(info.min), float(info.max))
    whole = np.where(np.isnan(x), 0.0, inside)
    large = whole >= 2.0 ** 63
    result = np.where(large, 0, whole).astype(np.int64).astype(target)
    result = np.where(large, info.max, result).astype(target)
    nothing = info.min if target.itemsize == 8 and target.kind == "i" else 1 << 63 if target.itemsize == 8 else 0
    return np.where(np.isnan(x), np.array(nothing, target), result)


def _halves(x: Array, kind: str) -> Array:
    """Convert to the bits of float16 or bfloat16 in 32-bit words; NaN is 0x7FFF."""
    if kind == "f16x2":
        bits = x.astype(np.float16).view(np.uint16).astype(np.uint32)
    else:
        whole = x.view(np.uint32)
        bits = whole + (whole >> 16 & 1) + 0x7FFF >> 16
    return np.where(np.isnan(x), np.uint32(0x7FFF), bits.astype(np.uint32))


@action("cvt", modifiers="rn rni rzi rmi rpi bf16 f16x2 bf16x2 sat")
def _cvt(run: Run, i: Instruction) -> None:
    to, source = i.op[-2:]
    if to in ("f16x2", "bf16x2"):
        with np.errstate(over="ignore"):
            upper, lower = (_halves(run.get(i.one(n), "f32"), to) for n in (1, 2))
        run.put(i.one(0), upper << 16 | lower)
        return
    if "sat" in i.op or "bf16" in (to, source):
        raise Fault("this conversion is not known here")
    x = run.get(i.one(1), source)
    if words := [word for word in i.op[1:-2] if word in _ROUNDING]:
        x = _ROUNDING[words[0]](x)
    target = TYPES[to]
    with np.errstate(over="ignore"):
        run.put(i.one(0), _to_integer(x, target) if x.dtype.kind == "f" and target.kind in "iu" else x.astype(target))


@action("mov")
def _mov(run: Run, i: Instruction) -> None:
    to, source = i.operands
    if isinstance(source, tuple):       # pack
        parts = [run.get(part, f"b{int(i.op[-1][1:]) // len(source)}") for part in source]
        run.put(i.one(0), np.stack(parts, 1).view(TYPES[i.op[-1]])[:, 0])
    elif isinstance(to, tuple):         # unpack
        whole = np.ascontiguousarray(run.get(source, i.op[-1]))
        parts_of = whole.view(f"u{whole.dtype.itemsize // len(to)}").reshape(run.size, len(to))
        for n, name in enumerate(to):
            run.put(name, parts_of[:, n].copy())
    else:
        run.put(to, run.get(source, i.op[-1]).copy())
