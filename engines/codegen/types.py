"""LLVM IR types and constants as text."""
from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import zip_longest

I1, I8, I16, I32, I64, PTR, FLOAT, DOUBLE = "i1", "i8", "i16", "i32", "i64", "ptr", "float", "double"
FLOATING = (FLOAT, DOUBLE)
# NumPy's name of a stored dtype -> LLVM type of an element
ELEMENTS = {"uint8": I8, "int8": I8, "bool": I8, "int32": I32, "int64": I64, "float32": FLOAT,
            "float16": "half", "bfloat16": I16, "float64": DOUBLE, "int16": I16, "uint16": I16, "uint32": I32,
            "uint64": I64}


@cache
def vector(lanes: int, element: str) -> str:
    return f"<{lanes} x {element}>"


def pointer(space: int) -> str:
    """Return the type of a pointer into an address space other than the default one."""
    return f"{PTR} addrspace({space})"


def is_pointer(type_: str) -> bool:
    return type_.startswith(PTR)


@cache
def lanes_of(type_: str) -> int:
    return int(type_[1:].split(" x ")[0])


@cache
def element_of(type_: str) -> str:
    return type_[:-1].split(" x ")[1] if type_.startswith("<") else type_


@cache
def overload(type_: str) -> str:
    """Return the suffix of an overloaded intrinsic's name for a type: f32, v8f32."""
    element = {FLOAT: "f32", DOUBLE: "f64"}.get(element_of(type_), element_of(type_))
    return element if element_of(type_) == type_ else f"v{lanes_of(type_)}{element}"


def literal(number: int | float, type_: str) -> str:
    """Return the text of a constant; a vector type gets the number in all lanes."""
    return _written(number, type_) if number else _written.__wrapped__(number, type_)       # 0.0 equals -0.0


@lru_cache(1 << 12, typed=True)     # 1, 1.0 and True are equal, too
def _written(number: int | float, type_: str) -> str:
    element, text = element_of(type_), str(number)
    if element != type_ and number == 0:    # valid for every element type, half too
        return "zeroinitializer"
    if element in FLOATING:    # LLVM writes a float as the bits of the double of equal value
        exact, = struct.unpack("f", struct.pack("f", number)) if element == FLOAT else (number,)
        text = f"0x{struct.pack('>d', exact).hex().upper()}"
    return text if element == type_ else f"splat ({element} {text})"


def picks(mask: Sequence[int]) -> str:
    """Return the mask operand of a shufflevector; -1 in the mask is poison."""
    numbers = tuple(mask)
    # Equal numbers of other types, such as True and 1, are written differently: their texts are not kept.
    return _picked(numbers) if all(type(i) is int for i in numbers) else _picked.__wrapped__(numbers)


@lru_cache(1 << 12)
def _picked(mask: tuple[int, ...]) -> str:
    words = ", ".join(f"i32 {i}" if i >= 0 else "i32 poison" for i in mask)
    return f"{vector(len(mask), I32)} {f'<{words}>' if any(mask) else 'zeroinitializer'}"


@cache
def name_of(hint: str) -> str:
    """Turn a hint into characters that LLVM allows in a name."""
    return re.sub(r"\W+", "_", hint).strip("_")


def in_turns(parts: Sequence[Sequence[str]], strands: int) -> Iterator[str]:
    """Interleave the lines of `strands` parts at a time, taking one line of each in turn."""
    for first in range(0, len(parts), strands):
        for turn in zip_longest(*parts[first:first + strands]):
            yield from (line for line in turn if line is not None)
