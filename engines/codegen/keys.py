"""Sort keys: signed integers that order as the numbers they stand for, compared by TopK and searches."""
from __future__ import annotations

from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import FLOATING, I32, I64, element_of, overload


def lowest_of(bits: int) -> int:
    """Return the smallest signed integer of so many bits."""
    return -(1 << bits - 1)


def key_of(number: Value, rising: bool = True) -> Value:
    """Return the sort key of a number.

    Both zeros have one key. The smallest integer gets the key of the one above it, so that no key equals
    lowest_of(bits).

    Parameters
    ----------
    number : float32, float64, int32 or int64, or a vector of them.
    rising : the order of keys is that of the numbers; else the opposite one.

    Returns
    -------
    Value
        Signed integers of the number's width.
    """
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
