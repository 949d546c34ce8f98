"""Operations of a loop-nest program on LLVM values: loads, arithmetic, casts and stores.

Floats are vectors of all lanes even if all lanes are equal, as the functions of a target expect. Integers and truth
values that are equal in all lanes (uniform) are scalars. A Ramp is an index that grows by a fixed step from lane to
lane. With one lane everything is a scalar.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import (
    DOUBLE,
    ELEMENTS,
    FLOAT,
    I1,
    I32,
    I64,
    element_of,
    literal,
    overload,
    vector,
)
from infer_server.engines.codegen.words import Primitives
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.lowering.epilogue.functions import FUNCTIONS
from infer_server.engines.lowering.nest.program import COMPARISONS, FLOATING, KINDS, Operation
from infer_server.engines.lowering.problems.view import SIZES

TYPES: Mapping[str, str] = {"f32": FLOAT, "f64": DOUBLE, "i32": I32, "i64": I64, "u64": I64, "i1": I1}
NEAR = 4        # greatest stride in elements at which one contiguous load fetches all lanes
SIGNED = ("int8", "int16", "int32")
_ORDERS = {"eq": ("oeq", "eq", "eq"), "ne": ("une", "ne", "ne"), "lt": ("olt", "slt", "ult"),
           "le": ("ole", "sle", "ule")}


@dataclass(frozen=True)
class Ramp:
    """Index base + lane * step in each lane, an i64."""
    base: Value
    step: int

    def vector(self, lanes: int) -> Value:
        numbers = ", ".join(f"i64 {lane * self.step}" for lane in range(lanes))
        return self.base.f.splat(self.base, lanes) + Value(self.base.f, vector(lanes, I64), f"<{numbers}>")


LaneValue = Value | Ramp


def is_vector(value: Value) -> bool:
    return value.type.startswith("<")


def plain(machine: Primitives, value: LaneValue) -> Value:
    return value.vector(machine.lanes) if isinstance(value, Ramp) else value


def spread(machine: Primitives, value: LaneValue) -> Value:
    """Return a value as a vector of all lanes."""
    value = plain(machine, value)
    return value if is_vector(value) or machine.lanes == 1 else value.f.splat(value, machine.lanes)


def together(machine: Primitives, values: Sequence[LaneValue]) -> list[Value]:
    """Return all values as scalars if none is a vector, else all as vectors."""
    found = [plain(machine, value) for value in values]
    return [spread(machine, value) for value in found] if any(map(is_vector, found)) else found


def number(machine: Primitives, one: Operation, of: Value) -> Value:
    what = one.what or 0
    if one.kind in FLOATING:
        return of.f.constant(float(what), machine.of(TYPES[one.kind]))
    if isinstance(what, SymbolicInt):
        return of.f.constant(what, TYPES[one.kind])
    whole = int(what)
    return of.f.constant(whole - (1 << 64) * (whole >= 1 << 63), TYPES[one.kind])


# ---- memory
def load(machine: Primitives, dtype: str, address: Value, stride: int, count: int) -> Value:
    """Load `count` elements that are `stride` bytes apart into the first lanes, in the kind that they are computed in.

    Other lanes repeat the last one. A stride of 0 loads one element: a scalar of the integer kinds, a splat of floats.
    """
    f, element = address.f, ELEMENTS[dtype]
    if stride == 0 or machine.lanes == 1:
        return _widened_alike(machine, dtype, f.load(element, address, machine.align(SIZES[dtype]), "stored"))
    if stride == SIZES[dtype]:
        stored = f.load(vector(count, element), address, hint="stored")
        if count < machine.lanes:
            stored = f.shuffle(stored, None, [min(i, count - 1) for i in range(machine.lanes)], "filled")
        return widened(machine, dtype, stored)
    gap = stride // SIZES[dtype]
    if 1 < abs(gap) <= NEAR and count > 1 or gap == -1:       # load the whole span and shuffle
        stored = f.load(vector((count - 1) * abs(gap) + 1, element), address + min((count - 1) * stride, 0), hint="run")
        first = 0 if gap > 0 else (count - 1) * -gap
        picks = [first + min(i, count - 1) * gap for i in range(machine.lanes)]
        return widened(machine, dtype, f.shuffle(stored, None, picks, "picked"))
    return gathered(machine, dtype, [address + lane * stride for lane in range(count)])


def gathered(machine: Primitives, dtype: str, addresses: Sequence[Value]) -> Value:
    """Load an element for each lane from its own address; lanes without an address repeat the last one."""
    f, element = addresses[0].f, ELEMENTS[dtype]
    stored = f.constant(0, vector(machine.lanes, element))
    for lane, address in enumerate(addresses):
        one = f.load(element, address, hint="stored")
        stored = f.op(stored.type, f"insertelement {stored}, {one}, i32 {lane}", "gathered")
    if len(addresses) < machine.lanes:
        mask = [min(i, len(addresses) - 1) for i in range(machine.lanes)]
        stored = f.shuffle(stored, None, mask, "filled")
    return widened(machine, dtype, stored)


def _widened_alike(machine: Primitives, dtype: str, stored: Value) -> Value:
    if KINDS[dtype] in FLOATING:
        return widened(machine, dtype, spread(machine, stored))
    return widened(machine, dtype, stored)


def widened(machine: Primitives, dtype: str, stored: Value) -> Value:
    """Convert stored elements to the kind that they are computed in."""
    f, kind = stored.f, KINDS[dtype]
    if dtype == "float16":
        return machine.half_to_float(stored)
    if dtype == "bfloat16":
        return machine.bfloat_to_float(stored)
    if kind == "i1":
        return stored.compare("ne", 0)
    type_ = vector(machine.lanes, TYPES[kind]) if is_vector(stored) else TYPES[kind]
    if type_ == stored.type:
        return stored
    return f.cast("sext" if dtype in SIGNED else "zext", stored, type_, "wide")


def store(machine: Primitives, dtype: str, value: LaneValue, address: Value, stride: int, count: int) -> None:
    """Store the first `count` lanes.

    Parameters
    ----------
    dtype : stored dtype; integers are truncated to its width.
    address, stride : address of lane 0, and bytes from a lane to the next.
    """
    f = address.f
    if stride == SIZES[dtype] or count == 1:
        found = narrowed(machine, dtype, spread(machine, value))
        found = f.shuffle(found, None, range(count), "part") if count < machine.lanes else found
        f.store(found, address, machine.align(SIZES[dtype]))
        return
    scattered(machine, dtype, value, [address + lane * stride for lane in range(count)])


def scattered(machine: Primitives, dtype: str, value: LaneValue, addresses: Sequence[Value]) -> None:
    """Store each of the first lanes to its own address."""
    found, element = narrowed(machine, dtype, spread(machine, value)), ELEMENTS[dtype]
    for lane, address in enumerate(addresses):
        address.f.store(address.f.op(element, f"extractelement {found}, i32 {lane}", "element"), address)


def narrowed(machine: Primitives, dtype: str, value: Value) -> Value:
    """Convert values to the type of a stored element."""
    f, type_ = value.f, machine.of(ELEMENTS[dtype])
    if dtype == "float16":
        return machine.float_to_half(value)
    if dtype == "bfloat16":
        return machine.float_to_bfloat(value)
    if type_ == value.type:
        return value
    return f.cast("zext" if KINDS[dtype] == "i1" else "trunc", value, type_, "narrow")


# ---- arithmetic
def computed(machine: Primitives, one: Operation, kind: str, args: Sequence[LaneValue]) -> LaneValue:
    """Emit an operation on its arguments, which are of `kind`."""
    if (ramp := _along(one, args)) is not None:
        return ramp
    if one.op == "cast":
        return cast(machine, plain(machine, args[0]), kind, one.kind)
    if one.op == "bits":
        value = spread(machine, args[0])
        return value.f.cast("bitcast", value, machine.of(TYPES[one.kind]), "bits")
    if one.op == "where":
        test, a, b = plain(machine, args[0]), *together(machine, args[1:])
        if is_vector(test) or is_vector(a):
            a, b = spread(machine, a), spread(machine, b)
        return a.f.select(test, a, b)
    values = together(machine, args)
    if one.op in COMPARISONS:
        return compared(kind, one.op, *values)
    if one.op in FUNCTIONS:
        result: Value = FUNCTIONS[one.op](machine, *values)
        return result
    if one.kind in FLOATING and one.op in _FLOATS:
        return _FLOATS[one.op](machine, *values)
    return _BITS[one.op](one.kind, *values)


def _along(one: Operation, args: Sequence[LaneValue]) -> Ramp | None:
    """Return the sum, difference or product by a constant as a Ramp, or None if the result is not a Ramp."""
    if one.kind != "i64" or not any(isinstance(arg, Ramp) for arg in args):
        return None
    a, b = args if len(args) == 2 else (args[0], args[0])
    steps = [arg.step if isinstance(arg, Ramp) else 0 for arg in (a, b)]
    if any(isinstance(arg, Value) and is_vector(arg) for arg in (a, b)) or len(args) != 2:
        return None
    x, y = (arg.base if isinstance(arg, Ramp) else arg for arg in (a, b))
    if one.op == "add":
        return Ramp(x + y, steps[0] + steps[1])
    if one.op == "sub":
        return Ramp(x - y, steps[0] - steps[1])
    factor = y if isinstance(a, Ramp) else x
    if one.op == "mul" and not all(steps) and factor.name.lstrip("-").isdigit():
        return Ramp(x * y, sum(steps) * int(factor.name))
    return None


def multiplied(a: Value, b: Value, c: Value) -> Value:
    """Return a * b + c, with one rounding if the target has fused multiply-add."""
    return a.f.call(a.type, f"llvm.fmuladd.{overload(a.type)}", a, b, c, hint="sum")


def compared(kind: str, op: str, a: Value, b: Value) -> Value:
    column = 0 if kind in FLOATING else 2 if kind in ("u64", "i1") else 1
    return a.compare(_ORDERS[op][column], b)


def better(kind: str, a: Value, b: Value, greatest: bool) -> Value:
    """Return an i1 that is true if a is above b (greatest) or below it."""
    return compared(kind, "lt", *((b, a) if greatest else (a, b)))


def cast(machine: Primitives, value: Value, source: str, target: str) -> Value:
    f, floats = value.f, (source in FLOATING, target in FLOATING)
    value = spread(machine, value) if any(floats) else value
    type_ = vector(machine.lanes, TYPES[target]) if is_vector(value) else TYPES[target]
    if target == "i1":
        return compared(source, "ne", value, value.like(0))
    if value.type == type_:
        return value
    if all(floats):
        return f.cast("fpext" if target == "f64" else "fptrunc", value, type_, "float")
    if floats[0]:
        return f.cast("fptoui" if target == "u64" else "fptosi", value, type_, "truncated")
    if floats[1]:
        return f.cast("uitofp" if source in ("u64", "i1") else "sitofp", value, type_, "float")
    return f.cast("zext" if source == "i1" else "trunc" if target == "i32" else "sext", value, type_, "int")


def _extreme(greatest: bool) -> Callable[..., Value]:
    def choose(kind: str, a: Value, b: Value) -> Value:
        if kind == "i1":
            return a.binary("or" if greatest else "and", b)
        return a.f.select(better(kind, a, b, greatest), a, b)
    return choose


def _rint(machine: Primitives, x: Value) -> Value:
    """Round f64 to the nearest integer, ties to even.

    Numbers from 2**52 on are integers already; below, adding and subtracting 2**52 with the number's sign rounds.
    """
    far = x.like(2.0 ** 52)
    sign = x.f.select(x.compare("olt", 0), x.like(0.0) - far, far)
    near = _magnitude(x).compare("olt", 2.0 ** 52)
    return x.f.select(near, (x + sign) - sign, x)


def _magnitude(x: Value) -> Value:
    return x.f.call(x.type, f"llvm.fabs.{overload(x.type)}", x, hint="size")


def _rounded(word: str) -> Callable[..., Value]:
    def round_(machine: Primitives, x: Value) -> Value:
        if element_of(x.type) == FLOAT:
            return machine.unary(word, x)
        nearest = _rint(machine, x)
        if word == "floor":
            return x.f.select(nearest.compare("ogt", x), nearest - 1, nearest)
        if word == "ceil":
            return x.f.select(nearest.compare("olt", x), nearest + 1, nearest)
        return nearest
    return round_


def _root(machine: Primitives, x: Value) -> Value:
    return x.f.call(x.type, f"llvm.sqrt.{overload(x.type)}", x, hint="root")


_FLOATS: Mapping[str, Callable[..., Value]] = {
    "sqrt": _root, "floor": _rounded("floor"), "ceil": _rounded("ceil"), "rint": _rounded("rint"),
    "abs": lambda machine, x: _magnitude(x),
    "neg": lambda machine, x: x.f.op(x.type, f"fneg {x}", "negative"),
}


def _divided(word: str) -> Callable[..., Value]:
    """Return a division or remainder that gives 0 for a divisor of 0, and does not trap at INT_MIN / -1."""
    def divide(kind: str, a: Value, b: Value) -> Value:
        if kind in FLOATING:
            return a / b
        if kind == "u64":
            safe = b.f.select(b.compare("eq", 0), b.like(1), b)
            return a.f.select(b.compare("eq", 0), a.like(0), a.binary("u" + word, safe))
        special = b.compare("eq", 0).binary("or", b.compare("eq", -1))
        usual = a.binary("s" + word, b.f.select(special, b.like(1), b))
        if word == "rem":
            return usual        # the remainder by 1, which replaces 0 and -1, is 0
        usual = a.f.select(b.compare("eq", -1), a.like(0) - a, usual)
        return a.f.select(b.compare("eq", 0), a.like(0), usual)
    return divide


def _modulo(kind: str, a: Value, b: Value) -> Value:
    """Return the remainder with the sign of the divisor."""
    rest = _divided("rem")(kind, a, b)
    if kind == "u64":
        return rest
    opposed = rest.compare("ne", 0).binary("and", rest.binary("xor", b).compare("slt", 0))
    return a.f.select(opposed, rest + b, rest)


def _shifted(word: str) -> Callable[..., Value]:
    """Return a shift that is defined for any count: from the width on, only the sign of a right shift remains."""
    def shift(kind: str, a: Value, b: Value) -> Value:
        bits = 32 if kind == "i32" else 64
        inside = b.below(bits)
        if word == "shr" and kind != "u64":
            return a.binary("ashr", b.f.select(inside, b, b.like(bits - 1)))
        shifted = a.binary("lshr" if word == "shr" else "shl", b.f.select(inside, b, b.like(0)))
        return a.f.select(inside, shifted, a.like(0))
    return shift


def _sum(kind: str, a: Value, b: Value) -> Value:
    return a.binary("or", b) if kind == "i1" else a + b


def _product(kind: str, a: Value, b: Value) -> Value:
    return a.binary("and", b) if kind == "i1" else a * b


_BITS: Mapping[str, Callable[..., Value]] = {
    "add": _sum, "mul": _product, "sub": lambda kind, a, b: a - b,
    "div": _divided("div"), "rem": _divided("rem"), "mod": _modulo,
    "max": _extreme(True), "min": _extreme(False),
    "and": lambda kind, a, b: a.binary("and", b), "or": lambda kind, a, b: a.binary("or", b),
    "xor": lambda kind, a, b: a.binary("xor", b),
    "shl": _shifted("shl"), "shr": _shifted("shr"),
    "neg": lambda kind, x: x.like(0) - x,
    "abs": lambda kind, x: x.f.select(x.compare("slt", 0), x.like(0) - x, x) if kind != "u64" else x,
    "invert": lambda kind, x: x.binary("xor", -1 if kind != "i1" else 1),
}
COMBINED: Mapping[str, Callable[..., Value]] = {
    "sum": _sum, "product": _product, "add": _sum, "mul": _product, "max": _BITS["max"], "min": _BITS["min"]}


def identity(machine: Primitives, how: str, kind: str, of: Value) -> Value:
    """Return the neutral element of a reduction, in every lane.

    Parameters
    ----------
    how : "sum", "product", "max", "min", or "first_max" and the like.
    kind : kind of the elements (engines/lowering/nest/program.py).
    of : any value of the function.
    """
    low, high = {"f32": (float("-inf"), float("inf")), "f64": (float("-inf"), float("inf")), "i1": (0, 1),
                 "i32": (-2 ** 31, 2 ** 31 - 1), "i64": (-2 ** 63, 2 ** 63 - 1), "u64": (0, -1)}[kind]
    value = {"sum": 0, "product": 1}.get(how, low if how.endswith("max") else high)
    type_ = machine.of(TYPES[kind])
    return Value(of.f, type_, literal(value, type_))
