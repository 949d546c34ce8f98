"""Questions that passes ask about a graph."""
from __future__ import annotations

import numpy as np

from engines.ir.graph import BATCH, Array, Graph, Node
from engines.ops import op_of


def is_pointwise(node: Node) -> bool:
    return op_of(node.op).pointwise


def is_weighted(node: Node) -> bool:
    """Whether the node, or the anchor of its body, is a convolution or a matrix product, by weights if constant."""
    return op_of(node.anchor.op).output_axis is not None


def output_axis(node: Node) -> int:
    """The axis of a weighted node's weights that counts output channels."""
    axis = op_of(node.anchor.op).output_axis
    assert axis is not None
    return axis


def moved_from(node: Node) -> tuple[str, ...]:
    """The tensors whose elements are all that the node's results hold; none for a node that computes."""
    return op_of(node.op).data(node)


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


def pads_with_zeros(node: Node) -> bool:
    """Whether a Pad adds zeros: exact in every stored type, and what a convolution's own padding holds."""
    return node.op == "Pad" and node.attrs.get("mode", "constant") == "constant" and node.attrs.get("value", 0) == 0


NORMS = ("LayerNormalization", "RMSNormalization")         # from `axis` on; the inputs behind x are a scale, a bias
ATTENTION = "ScaledDotProductAttention"


# ---- products of two run-time tensors: their kernels read and write rows that are any number of bytes apart
def is_product(graph: Graph, node: Node) -> bool:
    """Whether the node multiplies by a tensor that is computed at run time."""
    anchor = node.anchor
    return anchor.op == ATTENTION or anchor.op == "MatMul" and not graph.is_constant(anchor.inputs[1])


def is_view_of_input(graph: Graph, node: Node) -> bool:
    """Whether a Transpose moves nothing: all its readers are products that read its input in the other order.

    A left factor needs its last axis to be contiguous, a right one that or the one before.
    """
    perm, (source,), (result,) = node.attrs["perm"], node.inputs, node.outputs
    contiguous = perm.index(len(perm) - 1) - len(perm)
    if BATCH in graph.shape(source)[-1:] or result in graph.outputs or contiguous < -2 or graph.is_constant(source):
        return False
    readers = graph.consumers[result]
    return bool(readers) and all(
        is_product(graph, reader) and all(
            place < (3 if reader.anchor.op == ATTENTION else 2) and (place > 0 or contiguous == -1)
            for place, name in enumerate(reader.anchor.inputs) if name == result)
        and result not in _epilogue_inputs(reader) for reader in readers)


def is_view_of_output(graph: Graph, node: Node) -> bool:
    """Whether a Transpose moves nothing because a product, whose only reader it is, writes in the other order."""
    source, perm = node.inputs[0], node.attrs["perm"]
    producer = graph.producer.get(source)
    return (producer is not None and is_product(graph, producer) and reader(graph, source) is node
            and BATCH not in graph.shape(source)[-1:] and perm[-1] == len(perm) - 1)


def _epilogue_inputs(node: Node) -> set[str]:
    """What the nodes after a body's anchor read."""
    return {name for part in node.body[1:] for name in part.inputs}
