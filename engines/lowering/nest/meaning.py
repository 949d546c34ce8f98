"""NumPy interpreter of nest programs, which defines their results: each operation on an array over all loops."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.lowering.epilogue.functions import FUNCTIONS
from infer_server.engines.lowering.epilogue.program import NUMPY, load_meaning, store_meaning
from infer_server.engines.lowering.nest.program import KINDS, NestProgram, Operation

Array = NDArray[Any]
DTYPES = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64, "u64": np.uint64, "i1": np.bool_}


def load(dtype: str, stored: Array) -> Array:
    """Convert a stored tensor to the dtype of its kind."""
    kind = KINDS[dtype]
    return load_meaning(dtype, stored) if kind == "f32" else stored.astype(DTYPES[kind])


def store(dtype: str, value: Array) -> Array:
    """Convert a value to the stored dtype; integers are truncated to its bits."""
    return store_meaning(dtype, value) if KINDS[dtype] == "f32" else value.astype(dtype)


def evaluate(program: NestProgram, loops: Sequence[int], reduced: Sequence[int], operands: Sequence[Array],
             items: int) -> list[Array]:
    """Evaluate all operations of a program.

    Parameters
    ----------
    program : NestProgram
        Program to evaluate.
    loops, reduced : sequence of int
        Extents of the outer and inner loops.
    operands : sequence of ndarray
        Widened operands [items, ...]: those of reads over the loops, those of picks with their own axes.
    items : int
        Batch size.

    Returns
    -------
    list of ndarray
        Value of each operation, broadcastable to [items, *loops, *reduced].
    """
    extents, values = (items, *loops, *reduced), list[Array]()
    inner = tuple(range(1 + len(loops), len(extents)))
    with np.errstate(all="ignore"):
        for number, one in enumerate(program.operations):
            if one.op == "exit" and number == (cycle := program.cycles[int(one.what or 0)]).exits[0]:
                while np.any(values[cycle.test]):
                    for phi, step in zip(cycle.phis, cycle.steps, strict=True):
                        values[phi] = values[step]
                    for turn in cycle.body:
                        repeated = program.operations[turn]
                        args = [values[arg] for arg in repeated.args]
                        values[turn] = _value(repeated, args, extents, inner, operands)
            values.append(_value(one, [values[arg] for arg in one.args], extents, inner, operands))
    return values


def _value(one: Operation, args: list[Array], extents: tuple[int, ...], inner: tuple[int, ...],
           operands: Sequence[Array]) -> Array:
    dtype = DTYPES[one.kind]
    if one.op == "number":
        return np.full((1,) * len(extents), one.what, dtype)
    if one.op in ("index", "item"):
        axis = 0 if one.op == "item" else int(one.what or 0) + 1
        return np.arange(extents[axis], dtype=np.int64).reshape(*(-1 if i == axis else 1 for i in range(len(extents))))
    if one.op in ("phi", "exit"):
        return args[one.op == "exit"]
    if one.op == "read":
        return operands[int(one.what or 0)]
    if one.op == "pick":
        item = np.arange(extents[0]).reshape(-1, *(1,) * (len(extents) - 1))
        return np.asarray(operands[int(one.what or 0)][(item, *args)])
    if one.op == "reduce":
        whole = np.broadcast_to(args[0], (*args[0].shape[:inner[0]], *extents[inner[0]:])) if inner else args[0]
        return _reduced(str(one.what), whole, inner)
    if one.op == "bits":
        return args[0].view(dtype)
    if one.op in FUNCTIONS:
        return np.asarray(FUNCTIONS[one.op](NUMPY, args[0]))
    return np.asarray(MEANINGS[one.op](*args)).astype(dtype)


def _reduced(how: str, x: Array, inner: tuple[int, ...]) -> Array:
    order, _, extreme = how.rpartition("_")
    if not order:
        ufunc = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum}[how]
        if x.dtype == bool and how in ("sum", "product"):
            ufunc = {"sum": np.logical_or, "product": np.logical_and}[how]
        return np.asarray(ufunc.reduce(x, inner, keepdims=True)).astype(x.dtype)
    kept = x.shape[:len(x.shape) - len(inner)]
    rows = x.reshape(*kept, -1)
    search = np.argmax if extreme == "max" else np.argmin
    found = rows.shape[-1] - 1 - search(rows[..., ::-1], -1) if order == "last" else search(rows, -1)
    return np.asarray(found).astype(np.int64).reshape(*kept, *(1,) * len(inner))


def _quotient(a: Array, b: Array) -> Array:
    """Divide; integers are truncated toward zero, and x / 0 is 0."""
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    return np.where(b == 0, 0, (a - np.fmod(a, safe)) // safe)


def _shifted(left: bool) -> Callable[[Array, Array], Array]:
    """Return a shift. Shifts by all bits or more leave 0 or the sign."""
    def shift(a: Array, b: Array) -> Array:
        bits = 8 * a.itemsize
        inside = (b >= 0) & (b < bits)
        if not left and a.dtype.kind == "i":
            return np.asarray(np.right_shift(a, np.where(inside, b, bits - 1).astype(a.dtype)))
        by = np.where(inside, b, 0).astype(a.dtype)
        return np.where(inside, np.left_shift(a, by) if left else np.right_shift(a, by), 0)
    return shift


def _rest(rest: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Return a remainder that is 0 for integers modulo 0."""
    return lambda a, b: np.where((b == 0) & (a.dtype.kind != "f"), 0, rest(a, b))


MEANINGS: Mapping[str, Callable[..., Any]] = {
    "add": np.add, "mul": np.multiply, "sub": np.subtract, "div": _quotient, "mod": _rest(np.mod),
    "rem": _rest(np.fmod),
    # these follow CPUs: np.maximum differs for NaN
    "max": lambda a, b: np.where(a > b, a, b), "min": lambda a, b: np.where(a < b, a, b),
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "invert": np.invert,
    "shl": _shifted(left=True), "shr": _shifted(left=False),
    "neg": lambda x: 0 - x if x.dtype.kind == "u" else -x, "abs": np.abs, "sqrt": np.sqrt, "floor": np.floor,
    "ceil": np.ceil, "rint": np.rint,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "where": np.where, "cast": lambda x: x,
}
