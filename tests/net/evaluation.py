"""Expected results of a model by onnx.reference, with their uncertainty.

A node on float16 or bfloat16 computes in float32 and rounds its results. An element is as certain as it is stable: the
nodes are run again with every float of the graph moved at random by as much as the precision rounds it.
"""
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper
from onnx.reference import ReferenceEvaluator

Array = NDArray[Any]
OPSET = 21
# Relative rounding of what computes or stores so, with the errors of its functions.
ROUNDING = {"float64": 1e-12, "float32": 4e-6, "float16": 1e-3, "bfloat16": 8e-3,
            "fp32": 4e-6, "best": 8e-3, "fp16": 1e-3, "bf16": 8e-3, "int8": 4e-6}
STEPS = 127             # steps of int8 over the range of a tensor
SAMPLES = 2             # perturbed evaluations, each also with the opposite sign, so that ties differ in one of them
FUNCTIONS = 4e-6        # absolute errors of kernels' functions; float64 has none, for it has no kernels
MARGIN = 8              # how much more than the largest of the samples' moves an element may differ
EXACT = "c"             # names of constants that say what to do begin so: they are not rounded
WIDE = {"float16": np.float32, "bfloat16": np.float32}


class Unsupported(Exception):
    """onnx.reference has no result."""


@dataclass(frozen=True)
class Evaluator:
    """Executable node."""
    node: onnx.NodeProto
    session: ReferenceEvaluator
    dtypes: tuple[np.dtype[Any], ...]       # dtypes of the outputs

    def run(self, arrays: Sequence[Array | None]) -> list[Array]:
        feeds = {name: widened(array) for name, array in zip(self.node.input, arrays, strict=True) if array is not None}
        with quiet():
            try:
                results = self.session.run(None, feeds)
            except Exception as error:
                raise Unsupported(f"{self.node.op_type}: {error!r}") from error
            return [np.asarray(y).astype(dtype) for y, dtype in zip(results, self.dtypes, strict=True)]


@contextmanager
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def widened(array: Array) -> Array:
    return array.astype(WIDE.get(array.dtype.name, array.dtype))


def evaluator(node: onnx.NodeProto, arrays: Sequence[Array | None]) -> Evaluator:
    """Return the evaluator of a node with inputs of these dtypes and ranks. Raises Unsupported."""
    given = [(name, array) for name, array in zip(node.input, arrays, strict=True) if array is not None]
    infos = dict.fromkeys(name for name, _ in given)
    typed = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
             for name, array in given if infos.pop(name, 0) is None]
    outputs = [name for name in node.output if name]
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(helper.make_graph(
        [node], "node", typed, [helper.make_empty_tensor_value_info(name) for name in outputs]),
        opset_imports=opsets, ir_version=10)
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except Exception as error:
        raise Unsupported(f"{node.op_type}: {error}") from error
    actual = {info.name: info.type.tensor_type.elem_type for info in inferred.graph.output}
    dtypes = tuple(helper.tensor_dtype_to_np_dtype(actual[name]) for name in outputs)
    return Evaluator(node, ReferenceEvaluator(model), dtypes)


Move = Callable[[str, Array], Array]


def evaluate(evaluators: Sequence[Evaluator], values: Mapping[str, Array],
             move: Move | None = None) -> dict[str, Array]:
    """Return all tensors. values: inputs and constants. move: applied to every tensor before it is read."""
    def settled(name: str, array: Array) -> Array:
        moves = move and name[0] != EXACT and np.issubdtype(widened(array).dtype, np.floating)
        return move(name, array) if move and moves else array

    known = {name: settled(name, array) for name, array in values.items()}
    for each in evaluators:
        results = each.run([known[name] if name else None for name in each.node.input])
        created = [name for name in each.node.output if name]
        known.update({name: settled(name, array) for name, array in zip(created, results, strict=True)})
    return known


def mover(precision: str, exact: Mapping[str, Array], seed: int, way: int) -> Move:
    """Return a function that moves each float by its rounding error, up or down at random, or the opposite `way`."""
    random = np.random.default_rng(seed)

    def move(name: str, array: Array) -> Array:
        wide = array.astype(np.float64)
        step = max(ROUNDING[array.dtype.name], ROUNDING[precision]) * np.abs(wide)
        if precision == "int8" and array.dtype.name != "float64" and array.size:
            reference = exact[name].astype(np.float64)
            step = step + (max(reference.max(), 0) - min(reference.min(), 0)) / STEPS
        with quiet():
            return (wide + way * step * random.uniform(-1, 1, wide.shape)).astype(array.dtype)
    return move


@dataclass(frozen=True)
class Expected:
    """Expected output with the tolerance of each element, infinite if it is undefined."""
    value: Array
    tolerance: Array

    def wrong(self, got: Array) -> Array:
        """Return a mask of the elements that differ by more than the tolerance."""
        if self.value.dtype.kind in "iub":
            return (got != self.value) & (self.tolerance < np.inf)
        value, found = self.value.astype(np.float64), got.astype(np.float64)
        with quiet():
            same = (found == value) | (np.isnan(found) & np.isnan(value)) | (np.abs(found - value) <= self.tolerance)
        return ~same & (self.tolerance < np.inf)


def expected(evaluators: Sequence[Evaluator], values: Mapping[str, Array], outputs: Sequence[str],
             precision: str) -> dict[str, Expected]:
    """Return the expected outputs by name."""
    exact = evaluate(evaluators, values)
    moved = [evaluate(evaluators, values, mover(precision, exact, seed, way))
             for seed in range(SAMPLES) for way in (1, -1)]
    return {name: _expected(exact[name], [sample[name] for sample in moved], precision) for name in outputs}


def _expected(value: Array, moved: Sequence[Array], precision: str) -> Expected:
    if any(sample.shape != value.shape for sample in moved):
        return Expected(value, np.full(value.shape, np.inf))
    if value.dtype.kind in "iub":
        unstable = np.any([sample != value for sample in moved], axis=0)
        return Expected(value, np.where(unstable, np.inf, 0.0))
    wide = value.astype(np.float64)
    with quiet():
        moves = np.max([_distance(sample.astype(np.float64), wide) for sample in moved], axis=0)
        rounding = max(ROUNDING[value.dtype.name], ROUNDING[precision])
        largest = np.abs(wide[np.isfinite(wide)]).max(initial=0.0)
        tolerance = MARGIN * moves + rounding * largest + (FUNCTIONS if value.dtype != np.float64 else 0)
        if precision == "int8":
            tolerance = tolerance + 2 * largest / STEPS
    return Expected(value, np.where(np.isfinite(moves), tolerance, np.inf))


def _distance(a: Array, b: Array) -> Array:
    """Return the distance, 0 between equal infinities and between NaNs."""
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf))
