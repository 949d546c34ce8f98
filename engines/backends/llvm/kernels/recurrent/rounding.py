"""Dynamic quantisation of a state by its own range, before each step.

It computes what by_own_range (engines/lowering/problems/recurrence.py) defines:

    step = (max(h, 0) - min(h, 0)) / 255, or 1        zero = round(-min(h, 0) / step)
    integers[k] = clip(round(h[k] / step) + zero, 0, 255) - zero            16 bits
    or bytes[k] = clip(round(h[k] / step) + zero, 0, 255)                   followed by copies of crowded units

The step and -zero are stored behind them; a sum of products of bytes needs -zero times the sum of all weights.
"""
from __future__ import annotations

from dataclasses import dataclass

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import FLOAT, I8, I16, I32, I64, vector

NUMBERS = 8             # bytes of step and -zero


@dataclass(frozen=True)
class Crowded:
    """Units whose bytes are stored a second time: their int32 numbers in memory, and the offset of the copies.

    The copies are at every second byte from `offset` on.
    """
    units: Value
    count: int
    offset: int


def round_state(f: Function, isa: Isa, hidden: int, state: Value, integers: Value, numbers: Value,
                crowded: Crowded | None) -> None:
    """Quantise a state by its own range, and store its step and -zero.

    Parameters
    ----------
    hidden : units of the state.
    state : address of its floats.
    integers : address of the result: bytes if `crowded` is given, else 16-bit integers.
    numbers : address for the step (float32) and -zero (int32).
    crowded : units whose bytes are stored a second time.
    """
    nothing = f.constant(0, isa.floats)
    ends = {"low": nothing, "high": nothing}
    for at, count in f.tiles("unit", hidden, isa.lanes, ends=ends):
        h = _load(isa, state + at * 4, count)
        ends |= {"low": isa.min(ends["low"], h), "high": isa.max(ends["high"], h)}
    low, high = (_across(isa, ends[key], key) for key in ("low", "high"))
    step = (high - low) / 255.0
    step = f.select(isa.compare(step, "oeq", 0.0), step.like(1.0), step)
    zero = isa.max(isa.min(isa.unary("rint", (nothing - low) / step), 255.0), 0.0)
    f.store(f.op(FLOAT, f"extractelement {step}, i32 0", "unit"), numbers, 4)
    f.store(f.op(I32, f"extractelement {isa.round(nothing - zero)}, i32 0", "shift"), numbers + 4, 4)
    element, size = (I8, 1) if crowded else (I16, 2)
    for at, count in f.tiles("unit", hidden, isa.lanes):
        shifted = isa.unary("rint", _load(isa, state + at * 4, count) / step) + zero
        whole = isa.max(isa.min(shifted, 255.0), 0.0)
        narrow = f.cast("trunc", isa.round(whole if crowded else whole - zero), vector(isa.lanes, element), "integers")
        f.store(narrow, integers + at * size, size * isa.lanes)
    if crowded and crowded.count:
        for i in f.loop("crowded", crowded.count):
            unit = f.cast("zext", f.load(I32, crowded.units + i * 4, 4, "crowded"), I64, "crowded")
            f.store(f.load(I8, integers + unit, 1, "byte"), integers + crowded.offset + i * 2, 1)


def load_shift(isa: Isa, numbers: Value) -> Value:
    """Load -zero into all lanes."""
    return numbers.f.splat(numbers.f.load(I32, numbers + 4, 4, "shift"), isa.lanes)


def load_unit(isa: Isa, address: Value) -> Value:
    """Load the step of a state's integers into all lanes."""
    return address.f.splat(address.f.load(FLOAT, address, 4, "unit"), isa.lanes)


def _load(isa: Isa, address: Value, count: int) -> Value:
    """Load floats; lanes past the last unit are 0."""
    return Lanes(isa, count, packed=False).load_natural("float32", address, 0)


def _across(isa: Isa, value: Value, which: str) -> Value:
    """Return the least or greatest lane, in all lanes."""
    pick, size = isa.min if which == "low" else isa.max, isa.lanes
    while size > 1:
        size //= 2
        value = pick(value, value.f.shuffle(value, None, [lane ^ size for lane in range(isa.lanes)], which))
    return value
