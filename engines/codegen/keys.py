"""Numbers as integers of the same order: what sorts and searches compare."""
from __future__ import annotations

from engines.codegen.ir_builder import Value
from engines.codegen.types import FLOATING, I32, I64, element_of, overload


def lowest_of(bits: int) -> int:
    return -(1 << bits - 1)


def key_of(number: Value, rising: bool = True) -> Value:
    """A signed integer of as many bits; not rising: of the opposite order. Both zeros are one number; of integers the
    least counts as the one above it, so that no key is the lowest there is."""
    bits = 64 if element_of(number.type) in (I64, "double") else 32
    lowest = lowest_of(bits)
    if element_of(number.type) not in FLOATING:
        ordered = number if rising else number.binary("xor", -1)
        return number.f.call(number.type, f"llvm.smax.{overload(number.type)}", ordered, ordered.like(lowest + 1),
                             hint="ordered")
    value = number + 0 if rising else number.like(0) - number
    type_ = number.type.replace(element_of(number.type), I64 if bits == 64 else I32)
    found = number.f.cast("bitcast", value, type_, "bits")
    return found.binary("xor", found.binary("ashr", bits - 1).binary("and", -1 - lowest))
