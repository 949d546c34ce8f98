"""Sketch of a model: each node is run as it is added, for two batch sizes, so that shapes are known."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from hypothesis import reject
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from tests.net.evaluation import EXACT, OPSET, Array, Evaluator, Unsupported, evaluate, evaluator

ITEMS = 3               # items of the drawn inputs; smaller batches are the first of these
FEWER = 2
LARGEST = 1e4           # largest float drawn: float16 overflows soon beyond
MOST_ELEMENTS = 4000
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = (*SIGNED, *UNSIGNED)
FLOATS = ("float32", "float16", "bfloat16", "float64")
EXTENTS = st.sampled_from([1, 2, 3, 4, 5, 8, 17, 1, 2, 3, 0])
Draw = Callable[[Any], Any]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclass(frozen=True)
class Tensor:
    """Tensor of the sketch; `value` has ITEMS items, `fewer` FEWER."""
    name: str
    value: Array
    fewer: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def rank(self) -> int:
        return self.value.ndim

    @property
    def dtype(self) -> str:
        return self.value.dtype.name

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def batch(self) -> int | None:
        """Axis of the batch."""
        return next((axis for axis, (a, b) in enumerate(zip(self.shape, self.fewer.shape, strict=True)) if a != b),
                    None)

    def axes(self) -> list[int]:
        """Return the axes other than the batch."""
        return [axis for axis in range(self.rank) if axis != self.batch]


@dataclass
class Sketch:
    """Model being drawn. draw: hypothesis's. seed: of all numbers. floats, integers: dtypes of the computation."""
    draw: Draw
    seed: int
    floats: str
    integers: str
    batched: bool
    inputs: dict[str, Array] = field(default_factory=dict)          # ITEMS items
    symbolic: set[str] = field(default_factory=set)                 # inputs whose leading extent is the batch
    constants: dict[str, Array] = field(default_factory=dict)
    evaluators: list[Evaluator] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    # ---- tensors
    def numbers(self, dtype: str, shape: Sequence[int], kind: str = "grid") -> Array:
        """Draw numbers. grid: quarters from -3 to 3, with ties; positive: at least 1/4; any: all integers."""
        random = np.random.default_rng([self.seed, len(self.inputs), len(self.constants)])
        if dtype == "bool":
            return random.integers(0, 2, shape).astype(bool)
        if dtype in INTEGERS:
            info = np.iinfo(dtype)
            low, high = (info.min, info.max) if kind == "any" else (max(info.min, -6), 7)
            return random.integers(1 if kind == "positive" else low, high, shape, dtype=np.dtype(dtype), endpoint=True)
        low = 1 if kind == "positive" else -12
        return (random.integers(low, 12, shape, endpoint=True) / 4).astype(dtype_of(dtype))

    def input(self, dtype: str, shape: Sequence[int], kind: str = "grid", batched: bool | None = None) -> Tensor:
        """Add an input. Its leading axis becomes the batch if the graph has one."""
        batched = bool(shape) and (self.batched if batched is None else batched)
        name = f"x{len(self.inputs)}"
        array = self.numbers(dtype, (ITEMS, *shape[1:]) if batched else shape, kind)
        self.inputs[name] = array
        if batched:
            self.symbolic.add(name)
        return self._added(Tensor(name, array, array[:FEWER] if batched else array))

    def constant(self, array: Any, dtype: str = "", kind: str = EXACT) -> Tensor:
        """Add a constant that parametrises a node, or with another `kind` one that it computes with."""
        array = np.asarray(array)
        array = array.astype(dtype_of(dtype)) if dtype else array
        name = f"{kind}{len(self.constants)}"
        self.constants[name] = array
        return self._added(Tensor(name, array, array))

    def weight(self, *shape: int, kind: str = "grid", dtype: str = "") -> Tensor:
        return self.constant(self.numbers(dtype or self.floats, shape, kind), kind="w")

    def integers64(self, *numbers: int) -> Tensor:
        return self.constant(np.array(numbers, np.int64))

    def any(self, wanted: Callable[[Tensor], bool], make: Callable[[], Tensor]) -> Tensor:
        """Return one of the newest suitable tensors, or a new one."""
        actual = [t for name, t in self.tensors.items() if name not in self.constants and wanted(t)][-3:]
        if actual and (choice := self.draw(st.integers(0, len(actual)))) < len(actual):
            return actual[-1 - choice]
        return make()

    def float(self, low: int = 0, high: int = 5, kind: str = "grid") -> Tensor:
        """Return a float tensor with a rank between these."""
        return self.any(lambda t: t.dtype == self.floats and low <= t.rank <= high and kind == "grid",
                        lambda: self.input(self.floats, self.shape(low, high), kind))

    def shape(self, low: int = 0, high: int = 5) -> tuple[int, ...]:
        rank = self.draw(st.integers(low, high))
        return tuple(self.draw(EXTENTS if rank < 4 else EXTENTS.filter(lambda e: e < 8)) for _ in range(rank))

    # ---- nodes
    def add(self, op: str, *inputs: Tensor | None, outputs: int = 1, **attrs: Any) -> Tensor:
        """Add a node and return its first output.

        Rejects the example if the reference has no answer, or one beyond float16.
        """
        return self.add_all(op, *inputs, outputs=outputs, **attrs)[0]

    def add_all(self, op: str, *inputs: Tensor | None, outputs: int = 1, **attrs: Any) -> list[Tensor]:
        place = len(self.evaluators)
        names = [f"{op.lower()}{place}" + (f"_{i}" if outputs > 1 else "") for i in range(outputs)]
        sources = [t.name if t else "" for t in inputs]
        node = helper.make_node(op, sources, names, name=f"{op.lower()}{place}", **attrs)
        try:
            each = evaluator(node, [t.value if t else None for t in inputs])
            values, fewer = (each.run([getattr(t, which) if t else None for t in inputs]) for which in
                             ("value", "fewer"))
        except Unsupported:
            reject()
        for array in values:
            if array.size > MOST_ELEMENTS or array.dtype.name in FLOATS and not (
                    np.abs(np.nan_to_num(array.astype(np.float64), posinf=0, neginf=0)) < LARGEST).all():
                reject()
        self.evaluators.append(each)
        self.used.update(sources)
        return [self._added(Tensor(name, a, b)) for name, a, b in zip(names, values, fewer, strict=True)]

    def _added(self, tensor: Tensor) -> Tensor:
        if any(a != b and a - b != ITEMS - FEWER for a, b in zip(tensor.shape, tensor.fewer.shape, strict=True)):
            reject()            # an extent that is a multiple of the batch
        self.tensors[tensor.name] = tensor
        return tensor

    # ---- the model
    def case(self, precision: str) -> Case:
        built = {name: t for name, t in self.tensors.items() if name not in self.inputs and name not in self.constants}
        outputs = [name for name in built if name not in self.used]
        if extra := [name for name in built if name in self.used]:
            outputs += self.draw(st.lists(st.sampled_from(extra), max_size=1))
        used = {name: array for name, array in self.inputs.items() if name in self.used}
        return Case(used, self.symbolic & used.keys(), {n: a for n, a in self.constants.items() if n in self.used},
                    tuple(self.evaluators), tuple(outputs), precision)


@dataclass(frozen=True, eq=False, repr=False)
class Case:
    """Finished model with its inputs (ITEMS items) and build options."""
    inputs: dict[str, Array]
    symbolic: set[str]
    constants: dict[str, Array]
    evaluators: tuple[Evaluator, ...]
    outputs: tuple[str, ...]
    precision: str

    def model(self) -> onnx.ModelProto:
        infos = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), (
            "N", *array.shape[1:]) if name in self.symbolic else array.shape) for name, array in self.inputs.items()]
        values = evaluate(self.evaluators, {**self.inputs, **self.constants})
        results = [helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(values[name].dtype), None) for name in self.outputs]
        graph = helper.make_graph([each.node for each in self.evaluators], "net", infos, results,
                                  [numpy_helper.from_array(array, name) for name, array in self.constants.items()])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)

    def feeds(self, items: int) -> dict[str, Array]:
        return {name: array[:items] if name in self.symbolic else array for name, array in self.inputs.items()}

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the case as hypothesis asks."""
        printer.text(repr(self))

    def __repr__(self) -> str:
        """Return the model in ONNX's text form, and its inputs and constants."""
        with np.printoptions(threshold=64, linewidth=160):
            fed = "\n".join(f"{name} = {array!r}" for name, array in {**self.inputs, **self.constants}.items())
        return f"--precision {self.precision}\n{onnx.printer.to_text(self.model())}\n{fed}"
