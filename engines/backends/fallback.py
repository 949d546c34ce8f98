"""Fallback steps: nodes without a kernel, which infer_server.engines.ops.reference evaluates in Python in floats.

Inputs are dequantised or widened first, and results are stored in the plan's dtypes.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from infer_server.engines.errors import PlanCorruptError, PlanError
from infer_server.engines.ir.dtypes import as_in_memory, as_named, from_bfloat16, to_bfloat16
from infer_server.engines.ir.graph import Array, QParams
from infer_server.engines.plan.plan import Fallback, TensorView


class FallbackStep:
    """Runnable fallback: the node is decoded, its constants are dequantised, and the reference is imported."""

    def __init__(self, fallback: Fallback, constants: Mapping[str, Array]) -> None:
        """Prepare a fallback. constants: Plan.weights. Raises PlanCorruptError if it cannot be decoded."""
        from infer_server.engines.ir.serialize import node_from_json
        from infer_server.engines.ops.reference import run_node
        self._run_node, self._node, self._fallback = run_node, node_from_json(fallback.node), fallback
        quants = fallback.constant_quant or (None,) * len(fallback.inputs)
        self._constants = {name: self._constant(name, constants[name], quant)
                           for name, quant in zip(fallback.inputs, quants, strict=True)
                           if isinstance(name, str) and name}

    def _constant(self, name: str, stored: Array, quant: QParams | None) -> Array:
        if quant is None:
            return stored
        try:
            return to_real(stored, quant)
        except (ValueError, IndexError) as error:
            raise PlanCorruptError(f"the constant '{name}' of {self._node.op} '{self._node.name}' is no {quant} "
                                   f"({error}); build the plan again") from error

    def run(self, array: Callable[[TensorView], Array], batch: int) -> None:
        """Run the step. array: returns the array of a view.

        Raises PlanError if the reference rejects the values or returns another shape than the plan declares.
        """
        self.ready(array, batch)()

    def ready(self, array: Callable[[TensorView], Array], batch: int) -> Callable[[], None]:
        """Return a function that runs the step repeatedly on the same arrays."""
        sources = [(source, array(source)) if isinstance(source, TensorView) else
                   (None, self._constants[source] if source else None) for source in self._fallback.inputs]
        return partial(self._run, sources, [(view, array(view)) for view in self._fallback.outputs], batch)

    def _run(self, sources: Sequence[tuple[TensorView | None, Array | None]],
             targets: Sequence[tuple[TensorView, Array]], batch: int) -> None:
        try:
            inputs = [array if view is None or array is None else to_real(array, view.quant, view.dtype)
                      for view, array in sources]
            results = self._run_node(self._node, inputs, batch)
            for (view, target), result in zip(targets, results, strict=True):
                _store(target, np.asarray(result), view)
        except Exception as error:      # any error of an operator is attributed to its values or the plan
            name = self._node.name or self._fallback.outputs[0].name
            raise PlanError(f"the reference cannot run {self._node.op} '{name}' on these values "
                            f"({type(error).__name__}: {error}); where it runs on no others either, build the "
                            "plan again") from error


def _store(target: Array, result: Array, view: TensorView) -> None:
    if result.shape != target.shape:
        raise ValueError(f"'{view.name}' {list(result.shape)} is to be stored as {list(target.shape)}")
    target[...] = to_stored(result, view.quant, view.dtype)


def to_real(stored: Array, quant: QParams | None, dtype: str = "") -> Array:
    """Return a copy of a stored tensor as real numbers.

    It is dequantised, float32 for "bfloat16" (stored as bits in uint16), or of ml_dtypes' type if NumPy has none.
    """
    if quant is not None:
        from infer_server.engines.ops.reference import dequantize
        return dequantize(stored, quant)
    if dtype == "bfloat16":
        return from_bfloat16(stored)
    return as_named(stored.copy(), dtype)


def to_stored(real: Array, quant: QParams | None, dtype: str) -> Array:
    """Convert real numbers to the stored dtype: rounded half to even, integers saturated."""
    if quant is not None:
        from infer_server.engines.ops.reference import quantize
        return quantize(real, quant)
    if dtype == "bfloat16":
        return to_bfloat16(real)
    return as_in_memory(real)
