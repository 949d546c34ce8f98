"""Integer operations of the elementwise problems, on scalars or vectors whose type holds the operands."""
from __future__ import annotations

from collections.abc import Callable, Mapping

from infer_server.engines.codegen.ir_builder import Value

Operation = Callable[..., Value]        # comparisons give 1 or 0


def _comparison(order: str) -> Operation:
    return lambda a, b: truth(a.compare(order, b), a)


def truth(test: Value, like: Value) -> Value:
    """Widen a test (i1) to 0 or 1 in the type of `like`."""
    return test.f.cast("zext", test, like.type, "truth")


def _binary(word: str) -> Operation:
    return lambda a, b: a.binary(word, b)


def _choice(order: str) -> Operation:
    return lambda a, b: a.f.select(a.compare(order, b), a, b)


# Division by 0 gives 0. x86 traps on division by 0 and on INT_MIN / -1, so both divisors are replaced by 1.
def _divisor(b: Value) -> Value:
    special = b.compare("eq", 0).binary("or", b.compare("eq", -1))
    return b.f.select(special, b.like(1), b)


def _quotient(a: Value, b: Value) -> Value:
    """Divide, rounding toward zero; division by 0 gives 0."""
    usual = a.binary("sdiv", _divisor(b))
    return a.f.select(b.compare("eq", 0), a.like(0), a.f.select(b.compare("eq", -1), a.like(0) - a, usual))


def _remainder(a: Value, b: Value) -> Value:
    """Return the remainder with the sign of the dividend."""
    return a.binary("srem", _divisor(b))


def _modulo(a: Value, b: Value) -> Value:
    """Return the remainder with the sign of the divisor."""
    rest = _remainder(a, b)
    opposed = rest.compare("ne", 0).binary("and", rest.binary("xor", b).compare("slt", 0))
    return a.f.select(opposed, rest + b, rest)


OPERATIONS: Mapping[str, Operation] = {
    "copy": lambda x: x,
    "not": lambda x: truth(x.compare("eq", 0), x),
    "negate": lambda x: x.like(0) - x,
    "invert": lambda x: x.binary("xor", -1),
    "absolute": lambda x: x.f.select(x.compare("slt", 0), x.like(0) - x, x),
    "add": _binary("add"),
    "subtract": _binary("sub"),
    "multiply": _binary("mul"),
    "divide": _quotient,
    "modulo": _modulo,
    "remainder": _remainder,
    "and": _binary("and"),
    "or": _binary("or"),
    "xor": _binary("xor"),
    "greatest": _choice("sgt"),
    "least": _choice("slt"),
    "equal": _comparison("eq"),
    "less": _comparison("slt"),
    "less_or_equal": _comparison("sle"),
    "greater": _comparison("sgt"),
    "greater_or_equal": _comparison("sge"),
    "where": lambda c, a, b: c.f.select(c.compare("ne", 0), a, b),
}
