"""NumPy interpreter of graphs: the oracle of numeric tests, and the fallback for nodes without a kernel.

A quantised tensor stands for scale * (stored - zero_point). Nodes read these real numbers; results are converted to
their stored form: half to even, saturated.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.errors import InputError
from infer_server.engines.ir.dtypes import NARROW
from infer_server.engines.ir.graph import Array, Graph, Node, QParams, TensorType
from infer_server.engines.ir.shapes import batch_of, bind
from infer_server.engines.ops import op_of


def run(graph: Graph, feeds: Mapping[str, Array], watch: Collection[str] | None = None) -> dict[str, Array]:
    """Run a graph in NumPy.

    Parameters
    ----------
    graph : Graph
        Graph to run.
    feeds : mapping from str to ndarray
        Inputs in their stored form, uint8 for types with `quant`.
    watch : collection of str, optional
        Tensors to return (inputs, constants and edges, also inside bodies); None: the outputs.

    Returns
    -------
    dict from str to ndarray
        Tensors in their stored form.

    Raises
    ------
    InputError
        A feed is missing, unknown, or has the wrong dtype or shape; a name in `watch` does not exist.
    """
    batch = _check(graph, feeds)
    wanted = tuple(graph.outputs if watch is None else watch)
    if missing := [name for name in wanted if name not in graph.types]:
        raise InputError(f"{graph.name} has no tensor '{missing[0]}' to watch")
    stored: dict[str, Array] = {**graph.constants, **feeds}
    readers = _last_readers(graph, wanted)
    for index, node in enumerate(graph.nodes):
        real = [_real(stored[name], graph.types[name].quant) if name else None for name in node.inputs]
        for name, array in zip(_outputs(node), _run_parts(node, real, batch), strict=True):
            stored[name] = _stored(array, graph.types[name])
        for name in readers.get(index, ()):
            del stored[name]
    return {name: stored[name] for name in wanted}


def run_node(node: Node, arrays: Sequence[Array | None], batch: int | None = None) -> tuple[Array, ...]:
    """Run one node, also a fused one, on real numbers: inputs and outputs are not quantised.

    `batch` is needed only for nodes that create a symbolic extent (ConstantOfShape).
    """
    if not node.body:
        return op_of(node.op).reference(_bound(node, batch), *arrays)[:len(node.outputs)]   # type: ignore[arg-type]
    made = dict(zip(_outputs(node), _run_parts(node, arrays, batch), strict=True))
    return tuple(made[name] for name in node.outputs)


def _outputs(node: Node) -> list[str]:
    return [name for part in node.body or (node,) for name in part.outputs]


def _run_parts(node: Node, arrays: Sequence[Array | None], batch: int | None) -> list[Array]:
    """Return the results of the node, or of each node of its body, in order."""
    known: dict[str, Array | None] = dict(zip(node.inputs, arrays, strict=True))
    results: list[Array] = []
    for part in node.body or (node,):
        inputs: list[Any] = [known[name] if name else None for name in part.inputs]
        made = op_of(part.op).reference(_bound(part, batch), *inputs)[:len(part.outputs)]
        known.update(zip(part.outputs, made, strict=True))
        results.extend(made)
    return results


def _bound(node: Node, batch: int | None) -> Node:
    """Replace symbolic extents in the node's attributes by numbers for a batch."""
    symbolic = {key: value for key, value in node.attrs.items()
                if isinstance(value, tuple) and any(isinstance(v, str) for v in value)}
    if not symbolic or batch is None:
        return node
    return replace(node, attrs={**node.attrs, **{key: bind(value, batch) for key, value in symbolic.items()}})


def _check(graph: Graph, feeds: Mapping[str, Array]) -> int | None:
    """Check the feeds and return their batch, or None if the graph has none."""
    if set(feeds) != set(graph.inputs):
        raise InputError(f"{graph.name} takes the inputs {sorted(graph.inputs)}, but got {sorted(feeds)}")
    batches: dict[int, str] = {}
    for name, array in feeds.items():
        kind = graph.types[name]
        expected = np.dtype(kind.quant.dtype) if kind.quant else kind.dtype
        if array.dtype != expected or len(array.shape) != len(kind.shape):
            raise InputError(f"input '{name}' is {kind}, but got {array.dtype}{list(array.shape)}")
        if (batch := batch_of(kind.shape, array.shape)) is not None:
            batches.setdefault(batch, name)
    if len(batches) > 1:
        batches_by_input = ", ".join(f"{batch} for '{name}'" for batch, name in batches.items())
        raise InputError(f"{graph.name}: the inputs have different batch sizes: {batches_by_input}")
    return next(iter(batches), None)


def _last_readers(graph: Graph, kept: Collection[str]) -> dict[int, list[str]]:
    """Map node indices to the edges that are not needed after them, so that activations are freed early."""
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        last.update(dict.fromkeys((*_outputs(node), *filter(None, node.inputs)), index))
    free: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in kept and name not in graph.constants and name not in graph.inputs:
            free.setdefault(index, []).append(name)
    return free


def _real(array: Array, quant: QParams | None) -> Array:
    """Return the real numbers of a stored tensor, in float32 for 16-bit floats, as kernels compute."""
    if quant is not None:
        return dequantize(array, quant)
    return array.astype(np.float32) if array.dtype.name in NARROW else array


def _stored(array: Array, kind: TensorType) -> Array:
    if kind.quant is not None:
        return quantize(array, kind.quant)
    return array.astype(kind.dtype, copy=False)


def dequantize(stored: Array, quant: QParams) -> Array:
    """Return scale * (stored - zero_point) in float32."""
    scale, zero_point = _columns(quant, stored.ndim)
    return np.asarray((stored.astype(np.float32) - zero_point) * scale, np.float32)


def quantize(real: Array, quant: QParams) -> Array:
    """Return saturate(round half to even(real / scale) + zero_point)."""
    scale, zero_point = _columns(quant, real.ndim)
    limits = np.iinfo(quant.dtype)
    return np.asarray(np.clip(np.rint(real / scale) + zero_point, limits.min, limits.max), quant.dtype)


def _columns(quant: QParams, rank: int) -> tuple[Array, Array]:
    """Return scale and zero point, shaped to broadcast along the axis."""
    shape = [1] * rank
    if quant.axis is not None:
        shape[quant.axis] = -1
    return np.array(quant.scale, np.float32).reshape(shape), np.array(quant.zero_point, np.float32).reshape(shape)
