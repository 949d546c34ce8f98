"""Steps that no kernel runs: engines.reference computes them in Python, in real numbers.

What lies in the arena is dequantised or widened first, and the results are stored as the plan says.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from engines.ir import Array
from engines.plan import Fallback, TensorView


class FallbackStep:
    """A fallback made ready to run: the node decoded, its constants at hand, the reference imported."""

    def __init__(self, fallback: Fallback, constants: Mapping[str, Array]) -> None:
        from engines.reference import run_node
        from engines.serialize import node_from_json
        self._run_node, self._node, self._fallback = run_node, node_from_json(fallback.node), fallback
        names = {name for name in fallback.inputs if isinstance(name, str) and name}
        self._constants = {name: np.asarray(constants[name]) for name in names}

    def run(self, array: Callable[[TensorView], Array]) -> None:
        """`array` gives the memory of a tensor."""
        inputs = [self._value(source, array) for source in self._fallback.inputs]
        for view, result in zip(self._fallback.outputs, self._run_node(self._node, inputs), strict=True):
            array(view)[...] = to_stored(np.asarray(result), view)

    def _value(self, source: TensorView | str, array: Callable[[TensorView], Array]) -> Array | None:
        if isinstance(source, TensorView):
            return to_real(array(source), source)
        return self._constants[source] if source else None


def to_real(stored: Array, view: TensorView) -> Array:
    """What a stored tensor means: real = scale * (stored - zero_point); bfloat16 as float32. The result is a copy."""
    if view.quant is not None:
        scale, zero_point = _quant_columns(view)
        return ((stored.astype(np.float32) - zero_point) * scale).astype(np.float32)
    if view.dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.copy()


def to_stored(real: Array, view: TensorView) -> Array:
    """The inverse: rounded half to even, saturated."""
    if view.quant is not None:
        scale, zero_point = _quant_columns(view)
        limits = np.iinfo(view.dtype)
        stored: Array = np.clip(np.rint(real / scale) + zero_point, limits.min, limits.max).astype(view.dtype)
        return stored
    if view.dtype == "bfloat16":
        bits = np.ascontiguousarray(real, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(real), 0x7FC0, rounded).astype(np.uint16)
    return real


def _quant_columns(view: TensorView) -> tuple[Array, Array]:
    """Scale and zero point, shaped to broadcast along the quantised axis (of the tensor with its batch axis)."""
    assert view.quant is not None
    scale, zero_point = np.array(view.quant.scale, np.float32), np.array(view.quant.zero_point, np.float32)
    if view.quant.axis is None:
        return scale[0], zero_point[0]
    shape = [1] * (len(view.shape) + view.batched)
    shape[view.quant.axis] = -1
    return scale.reshape(shape), zero_point.reshape(shape)
