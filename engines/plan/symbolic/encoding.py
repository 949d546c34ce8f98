"""Encoding of symbolic plans as bytes, for plan files and the engine cache: JSON and arrays, nothing pickled.

    content = encode([symbolic], base)          # base: the plan whose code and constants are referred to, not copied
    [symbolic] = decode(content, base)

A symbolic plan is a list of values, each of which refers to earlier ones: tuples, dataclasses, arrays, numbers of the
trace. Classes and functions are written by name, those of this package and of NumPy only. Like machine code, an
encoded plan is as trusted as a program.
"""
from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from infer_server.engines.errors import PlanCorruptError, PlanError
from infer_server.engines.ir.dtypes import dtype_in_file, name_in_file
from infer_server.engines.ir.graph import Array
from infer_server.engines.ir.shapes import SymbolicDim
from infer_server.engines.ir.symbolic import ShapeEnv, SymbolicInt
from infer_server.engines.plan.plan import Plan
from infer_server.engines.plan.records import read_record, to_plain
from infer_server.engines.plan.sections import deflate, inflate
from infer_server.engines.plan.symbolic.plans import CompiledKernel, DynamicKernel, SymbolicPlan
from infer_server.engines.version import COMPILER_VERSION

VERSION = 2
_SHARED_BYTES = 1 << 10         # smallest array that is looked for among the constants of the base
_PACKAGE = "infer_server.engines."
_LIBRARIES = ("numpy", "operator", "_operator")
_PLAIN = (int, float, bool, str, type(None))        # values that JSON holds
_WHAT = "a symbolic plan"

T = TypeVar("T")
_Reference = Any        # a plain value, or [index of an earlier value]


class NotEncodable(PlanError):
    """A symbolic plan holds a value that has no encoding."""


def encode(symbolics: Sequence[SymbolicPlan], base: Plan, kernels: Sequence[CompiledKernel] = ()) -> bytes:
    """Return the encoding of symbolic plans of `base`, which needs it to decode them. Raises NotEncodable.

    kernels: dynamic kernels; of those that the symbolic plans use, the guards are encoded, too, for later traces.
    """
    writer = _Writer(base)
    plans = [writer.plan(one) for one in symbolics]
    used = {step.symbol for one in symbolics for step in one.traced.machine.steps}
    document = {"version": VERSION, "compiler": COMPILER_VERSION, "plans": plans,
                "kernels": [writer.kernel(one) for one in kernels if one.kernel.symbol in used]}
    text = json.dumps(document, separators=(",", ":")).encode()
    return deflate(b"".join([len(text).to_bytes(8, "little"), text, *writer.blob]), _WHAT)


def decode(content: bytes | memoryview, base: Plan) -> list[SymbolicPlan]:
    """Return encoded symbolic plans; [] if another version of the compiler made them. Raises PlanCorruptError."""
    return _decoded(content, base, lambda document, blob: [
        _Reader(base, blob, one).plan() for one in document["plans"]])


def decode_kernels(content: bytes | memoryview, base: Plan) -> list[CompiledKernel]:
    """Return the dynamic kernels of encoded symbolic plans, as `decode` returns these. Raises PlanCorruptError."""
    return _decoded(content, base, lambda document, blob: [
        CompiledKernel(read_record(DynamicKernel, record), bytes(blob[offset:offset + size]))
        for record, offset, size in document["kernels"]])


def _decoded(content: bytes | memoryview, base: Plan,
             read: Callable[[Mapping[str, Any], memoryview], list[T]]) -> list[T]:
    if not content:
        return []
    data = memoryview(inflate(content, _WHAT))
    size = int.from_bytes(data[:8], "little")
    try:
        document = json.loads(bytes(data[8:8 + size]))
        if (document["version"], document["compiler"]) != (VERSION, COMPILER_VERSION):
            return []
        return read(document, data[8 + size:])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError) as error:
        raise PlanCorruptError(f"{base.name}: its symbolic plans cannot be read ({error!r})") from error


class _Writer:
    """Writer of the values of several symbolic plans; bytes and arrays are written once."""

    def __init__(self, base: Plan) -> None:
        self.blob: list[bytes] = []
        self._size = 0
        self._at: dict[bytes, int] = {}         # offset of bytes in the blob
        self._code = {code: index for index, code in enumerate(base.machine.code)}
        self._base = base
        self._values: list[list[Any]] = []
        self._known: dict[Any, int] = {}        # ids, or the content of a number -> index of the value
        self._held: list[Any] = []              # keeps values alive, so that their ids stay unique

    def plan(self, symbolic: SymbolicPlan) -> dict[str, Any]:
        """Return the JSON document of a symbolic plan."""
        self._values, self._known, self._held = [], {}, []
        env = symbolic.env
        document = {
            "traced": self.reference(symbolic.traced), "atoms": self.reference(env.atoms),
            "guards": self.reference(env.guards), "checks": self.reference([*env.checks.values()]),
            "hints": env.hints, "least": env.least, "extents": self.reference(symbolic.of_shape),
            "names": self.reference(symbolic.names), "fixed": self.reference(symbolic.fixed)}
        return {**document, "values": self._values}

    def kernel(self, one: CompiledKernel) -> tuple[Any, int, int]:
        """Return the record of a dynamic kernel, and the offset and size of its code."""
        return to_plain(one.kernel), self._blob(one.code), len(one.code)

    def reference(self, value: Any) -> _Reference:
        """Return a plain value, or the reference to another one, which is written first."""
        if type(value) in _PLAIN:
            return value
        key = (value.hint, value.expr) if type(value) is SymbolicInt else id(value)
        if key not in self._known:
            entry = self._entry(value)
            self._known[key] = len(self._values)
            self._values.append(entry)
            self._held.append(value)
        return [self._known[key]]

    def _entry(self, value: Any) -> list[Any]:
        """Return the kind of a value, and what it is made of."""
        kind = type(value)
        if kind is SymbolicInt:
            return ["int", value.hint, value.expr]
        if kind in (bytes, memoryview):
            content = bytes(value)
            code = self._code.get(content)
            return ["bytes", self._blob(content), len(content)] if code is None else ["code", code]
        if kind in (tuple, list):
            return [kind.__name__, *map(self.reference, value)]
        if kind in (set, frozenset):
            return [kind.__name__, *map(self.reference, sorted(value, key=repr))]       # in an order that never differs
        if kind in (dict, types.MappingProxyType):
            return [kind.__name__, *(self.reference(part) for item in value.items() for part in item)]
        if kind is SymbolicDim:
            return ["dim", self.reference(value.extent)]
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.generic):
            return ["scalar", *self._array(np.asarray(value))[1:]]
        if isinstance(value, np.dtype):
            return ["dtype", "" if value.hasobject else name_in_file(value)]
        if kind is slice:
            return ["slice", *map(self.reference, (value.start, value.stop, value.step))]
        if kind is partial:
            return ["partial", *map(self.reference, (value.func, value.args, value.keywords))]
        if kind is types.MethodType:
            return ["method", self.reference(value.__self__), value.__name__]
        if dataclasses.is_dataclass(kind):
            return ["object", self.reference(kind), *(self.reference(getattr(value, field.name))
                                                      for field in dataclasses.fields(kind))]
        if isinstance(value, tuple):        # a NamedTuple
            return ["named", self.reference(kind), *map(self.reference, value)]
        return ["name", *_name_of(value)]

    def _array(self, array: Array) -> list[Any]:
        if array.dtype == object:
            return ["objects", array.shape, *map(self.reference, array.ravel())]
        content = np.ascontiguousarray(array)
        record = [name_in_file(array.dtype), array.shape]
        shared = self._shared(content) if array.nbytes >= _SHARED_BYTES else None
        return ["array", *record, self._blob(content.tobytes())] if shared is None else ["constant", *record, shared]

    def _shared(self, array: Array) -> int | None:
        """Return the offset of an array in the constants of the base, or None."""
        machine, content = self._base.machine, array.reshape(-1).view(np.uint8).data
        return next((offset for offset in machine.weight_offsets.values()
                     if machine.constants[offset:offset + array.nbytes] == content), None)

    def _blob(self, content: bytes) -> int:
        if content not in self._at:
            self._at[content] = self._size
            self.blob.append(content)
            self._size += len(content)
        return self._at[content]


def _name_of(value: Any) -> tuple[str, str]:
    """Return module and name of a class or function. Raises NotEncodable if it has none, or is of another library."""
    module: str = getattr(value, "__module__", None) or "numpy"          # a ufunc has none
    name: str = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or ""
    try:
        if _named(module, name) is value:
            return module, name
    except (ImportError, AttributeError, ValueError):
        pass
    raise NotEncodable(f"a symbolic plan holds a {type(value).__name__}, {str(value)[:60]}, which has no encoding")


def _named(module: str, name: str) -> Any:
    """Return a class or function of this package or NumPy. Raises ValueError, ImportError, AttributeError."""
    if not module.startswith(_PACKAGE) and module.partition(".")[0] not in _LIBRARIES:
        raise ValueError(f"'{module}.{name}' is not a part of the compiler")
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


class _Reader:
    """Reader of one symbolic plan."""

    def __init__(self, base: Plan, blob: memoryview, document: Mapping[str, Any]) -> None:
        self._base, self._blob, self._document = base, blob, document
        self._env = ShapeEnv()
        self._values: list[Any] = []

    def plan(self) -> SymbolicPlan:
        """Return the symbolic plan. Raises errors of a malformed document."""
        for kind, *parts in self._document["values"]:
            self._values.append(self._KINDS[kind](self, *parts))
        atoms, guards, checks, traced, extents, names, fixed = (self._value(self._document[name]) for name in (
            "atoms", "guards", "checks", "traced", "extents", "names", "fixed"))
        self._env.restore(atoms, guards, checks, self._document["hints"], self._document["least"])
        made = object.__new__(SymbolicPlan)
        vars(made).update(traced=traced, env=self._env, of_shape=extents, names=names, fixed=fixed)
        return made

    def _value(self, reference: _Reference) -> Any:
        return self._values[reference[0]] if type(reference) is list else reference

    def _items(self, references: Sequence[_Reference]) -> list[Any]:
        return [self._value(one) for one in references]

    def _number(self, hint: int, expression: Sequence[Sequence[Any]]) -> SymbolicInt:
        return SymbolicInt(self._env, hint, tuple((tuple(monomial), factor) for monomial, factor in expression))

    def _mapping(self, *parts: _Reference) -> dict[Any, Any]:
        values = self._items(parts)
        return dict(zip(values[::2], values[1::2], strict=True))

    def _bytes(self, offset: int, size: int) -> bytes:
        return bytes(self._blob[offset:offset + size])

    def _array(self, dtype: str, shape: Sequence[int], offset: int) -> Array:
        return np.ndarray(tuple(shape), dtype_in_file(dtype), self._blob, offset)

    def _constant(self, dtype: str, shape: Sequence[int], offset: int) -> Array:
        return np.ndarray(tuple(shape), dtype_in_file(dtype), self._base.machine.constants, offset)

    def _objects(self, shape: Sequence[int], *parts: _Reference) -> Array:
        array = np.empty(len(parts), object)
        array[:] = self._items(parts)
        return array.reshape(tuple(shape))

    def _object(self, kind: _Reference, *parts: _Reference) -> Any:
        cls = self._value(kind)
        made = object.__new__(cls)          # skips __post_init__: the original's fields have been checked
        for field, value in zip(dataclasses.fields(cls), self._items(parts), strict=True):
            object.__setattr__(made, field.name, value)
        return made

    _KINDS: Mapping[str, Callable[..., Any]] = {
        "int": _number, "bytes": _bytes, "array": _array, "constant": _constant, "objects": _objects,
        "object": _object, "dict": _mapping,
        "code": lambda self, index: self._base.machine.code[index],
        "mappingproxy": lambda self, *parts: types.MappingProxyType(self._mapping(*parts)),
        "tuple": lambda self, *parts: tuple(self._items(parts)),
        "list": lambda self, *parts: self._items(parts),
        "set": lambda self, *parts: set(self._items(parts)),
        "frozenset": lambda self, *parts: frozenset(self._items(parts)),
        "dim": lambda self, part: SymbolicDim(self._value(part)),
        "scalar": lambda self, dtype, shape, offset: self._array(dtype, shape, offset)[()],
        "dtype": lambda self, name: dtype_in_file(name) if name else np.dtype(object),
        "slice": lambda self, *parts: slice(*self._items(parts)),
        "partial": lambda self, function, arguments, keywords: partial(
            self._value(function), *self._value(arguments), **self._value(keywords)),
        "method": lambda self, owner, name: getattr(self._value(owner), name),
        "named": lambda self, kind, *parts: self._value(kind)(*self._items(parts)),
        "name": lambda self, module, name: _named(module, name)}
