"""Runs any Graph with NumPy, node by node: the oracle of every numeric test, and what runs where no kernel does.

A tensor that is stored quantised means scale * (stored - zero_point). A node that reads one reads its meaning; what a
node makes is rounded to what its type can store: halves to even, saturated.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engines.errors import InputError
from engines.ir.dtypes import NARROW
from engines.ir.graph import Array, Graph, Node, QParams, TensorType
from engines.ir.shapes import batch_of, bind
from engines.ops import op_of


def run(graph: Graph, feeds: Mapping[str, Array], watch: Collection[str] | None = None) -> dict[str, Array]:
    """The graph's outputs, or the tensors named in `watch` (inputs, constants and edges; bodies' inner ones too).

    Tensors come as they are stored: uint8 where the type has `quant`. Raises InputError: a feed is missing, unknown, or
    of another dtype or shape than the input; a name in `watch` does not exist.
    """
    batch = _check(graph, feeds)
    wanted = tuple(graph.outputs if watch is None else watch)
    if missing := [name for name in wanted if name not in graph.types]:
        raise InputError(f"{graph.name} has no tensor '{missing[0]}' to watch")
    stored: dict[str, Array] = {**graph.constants, **feeds}
    readers = _last_readers(graph, wanted)
    for index, node in enumerate(graph.nodes):
        real = [_real(stored[name], graph.types[name].quant) if name else None for name in node.inputs]
        for name, array in zip(_made(node), _run_parts(node, real, batch), strict=True):
            stored[name] = _stored(array, graph.types[name])
        for name in readers.get(index, ()):
            del stored[name]
    return {name: stored[name] for name in wanted}


def run_node(node: Node, arrays: Sequence[Array | None], batch: int | None = None) -> tuple[Array, ...]:
    """One node, Fused ones too, in real numbers: inputs and outputs are not quantised.

    `batch` is needed only by nodes that make a symbolic extent from nothing (ConstantOfShape).
    """
    if not node.body:
        return op_of(node.op).reference(_bound(node, batch), *arrays)[:len(node.outputs)]   # type: ignore[arg-type]
    made = dict(zip(_made(node), _run_parts(node, arrays, batch), strict=True))
    return tuple(made[name] for name in node.outputs)


def _made(node: Node) -> list[str]:
    return [name for part in node.body or (node,) for name in part.outputs]


def _run_parts(node: Node, arrays: Sequence[Array | None], batch: int | None) -> list[Array]:
    """What the node makes, or each node of its body, in order."""
    known: dict[str, Array | None] = dict(zip(node.inputs, arrays, strict=True))
    results: list[Array] = []
    for part in node.body or (node,):
        inputs: list[Any] = [known[name] if name else None for name in part.inputs]
        made = op_of(part.op).reference(_bound(part, batch), *inputs)[:len(part.outputs)]
        known.update(zip(part.outputs, made, strict=True))
        results.extend(made)
    return results


def _bound(node: Node, batch: int | None) -> Node:
    """The node for one value of the batch: symbolic extents in its attributes become numbers."""
    symbolic = {key: value for key, value in node.attrs.items()
                if isinstance(value, tuple) and any(isinstance(v, str) for v in value)}
    if not symbolic or batch is None:
        return node
    return replace(node, attrs={**node.attrs, **{key: bind(value, batch) for key, value in symbolic.items()}})


def _check(graph: Graph, feeds: Mapping[str, Array]) -> int | None:
    """The batch of the feeds, or None if the graph has none."""
    if set(feeds) != set(graph.inputs):
        raise InputError(f"{graph.name} takes {sorted(graph.inputs)}, but was given {sorted(feeds)}")
    batches: dict[int, str] = {}
    for name, array in feeds.items():
        kind = graph.types[name]
        expected = np.dtype(kind.quant.dtype) if kind.quant else kind.dtype
        if array.dtype != expected or len(array.shape) != len(kind.shape):
            raise InputError(f"input '{name}' is {kind}, but was given {array.dtype}{list(array.shape)}")
        if (batch := batch_of(kind.shape, array.shape)) is not None:
            batches.setdefault(batch, name)
    if len(batches) > 1:
        told = ", ".join(f"{batch} for '{name}'" for batch, name in batches.items())
        raise InputError(f"{graph.name}: the inputs differ in batch: {told}")
    return next(iter(batches), None)


def _last_readers(graph: Graph, wanted: Collection[str]) -> dict[int, list[str]]:
    """Node index -> the edges that nobody needs after it: a large model's activations do not all stay in memory."""
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        last.update(dict.fromkeys((*_made(node), *filter(None, node.inputs)), index))
    free: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in wanted and name not in graph.constants and name not in graph.inputs:
            free.setdefault(index, []).append(name)
    return free


def _real(array: Array, quant: QParams | None) -> Array:
    """What a stored tensor means; float32 where it is stored in fewer bits, as kernels compute."""
    if quant is not None:
        return dequantize(array, quant)
    return array.astype(np.float32) if array.dtype.name in NARROW else array


def _stored(array: Array, kind: TensorType) -> Array:
    if kind.quant is not None:
        return quantize(array, kind.quant)
    return array.astype(kind.dtype, copy=False)


def dequantize(stored: Array, quant: QParams) -> Array:
    """float32: scale * (stored - zero_point)"""
    scale, zero_point = _columns(quant, stored.ndim)
    return np.asarray((stored.astype(np.float32) - zero_point) * scale, np.float32)


def quantize(real: Array, quant: QParams) -> Array:
    """saturate(round half to even(real / scale) + zero_point)"""
    scale, zero_point = _columns(quant, real.ndim)
    limits = np.iinfo(quant.dtype)
    return np.asarray(np.clip(np.rint(real / scale) + zero_point, limits.min, limits.max), quant.dtype)


def _columns(quant: QParams, rank: int) -> tuple[Array, Array]:
    """Scale and zero point, shaped to broadcast along the axis."""
    shape = [1] * rank
    if quant.axis is not None:
        shape[quant.axis] = -1
    return np.array(quant.scale, np.float32).reshape(shape), np.array(quant.zero_point, np.float32).reshape(shape)
