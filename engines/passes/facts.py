"""Questions that passes ask about a graph."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engines.ir import Array, Dim, Graph, Node
from engines.ops import OPS


def is_pointwise(node: Node) -> bool:
    return node.op in OPS and OPS[node.op].pointwise and len(node.outputs) == 1


def scalar(graph: Graph, name: str) -> float | None:
    """The number, if the tensor is a constant of one element."""
    constant = graph.constants.get(name)
    return float(constant.reshape(())) if constant is not None and constant.size == 1 else None


def reader(graph: Graph, name: str) -> Node | None:
    """The one node that reads the tensor, if no other does and it is no graph output."""
    readers = graph.consumers.get(name, ())
    return readers[0] if len(readers) == 1 and name not in graph.outputs else None


def per_channel(constant: Array, rank: int, channels: int, axis: int = 1) -> Array | None:
    """[channels], if the constant, broadcast to a tensor of that rank, varies along `axis` at most; else None."""
    if constant.ndim > rank:
        return None
    shape = (*(1,) * (rank - constant.ndim), *constant.shape)
    if shape[axis] not in (1, channels) or any(extent != 1 for i, extent in enumerate(shape) if i != axis):
        return None
    return np.broadcast_to(constant.reshape(-1), (channels,))


def spatial(node: Node, rank: int, key: str, default: int) -> tuple[int, ...]:
    """strides, dilations, ... of a window over `rank` spatial axes."""
    return tuple(node.attrs.get(key, (default,) * rank))


def pads(node: Node, rank: int) -> tuple[int, ...]:
    """Before each spatial axis, then after each."""
    return tuple(node.attrs.get("pads", (0,) * (2 * rank)))


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    return tuple(a) == tuple(b)
