"""Base classes of elementwise operators (after broadcasting): arithmetic, activations, logic."""
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.shapes import broadcast
from infer_server.engines.ops import items
from infer_server.engines.ops.op import Inputs, Op, Stored, Types


class Pointwise(Op, abstract=True):
    """Elementwise operator y = formula(*inputs, **attributes), with the dtype of the first input."""
    pointwise, along = True, ""

    formula: ClassVar[Callable[..., Array]]

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        """Take the attributes from the formula's parameters with defaults."""
        super().__init_subclass__(abstract=abstract)
        if not abstract and not isinstance(cls.formula, np.ufunc):
            parameters = inspect.signature(cls.formula).parameters.values()
            cls.attributes = tuple(p.name for p in parameters if p.default is not p.empty)

    @classmethod
    def result_dtype(cls, node: Node, dtypes: list[np.dtype[Any]]) -> np.dtype[Any]:
        return dtypes[0]

    @classmethod
    def types(cls, node: Node, *inputs: TensorType) -> Types:
        return (TensorType(cls.result_dtype(node, [t.dtype for t in inputs]), broadcast(*(t.shape for t in inputs))),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: items.ItemAxes) -> items.ItemAxes:
        return (items.broadcast(inputs, axes, len(outputs[0].shape)),)

    @classmethod
    def compute(cls, node: Node, *arrays: Array) -> Array:
        result = np.asarray(cls.formula(*arrays, **node.attrs))
        if result.dtype == object:
            return result
        return result.astype(cls.result_dtype(node, [a.dtype for a in arrays]), copy=False)


class Epilogue(Pointwise, abstract=True):
    """Elementwise operator that kernels can compute in an epilogue."""
    epilogue, stored = True, Stored.CONVERTED


class Predicate(Pointwise, abstract=True):
    """Elementwise operator with a boolean result."""

    @classmethod
    def result_dtype(cls, node: Node, dtypes: list[np.dtype[Any]]) -> np.dtype[Any]:
        return np.dtype(np.bool_)


def define(base: type[Pointwise], symbolic: bool = False, commutative: bool = False,
           **formulas: Callable[..., Any]) -> None:
    """Define operators that consist of a formula, such as Relu=lambda x: np.maximum(x, 0)."""
    for name, formula in formulas.items():
        type(name, (base,), {"formula": staticmethod(formula), "symbolic": symbolic, "commutative": commutative})
