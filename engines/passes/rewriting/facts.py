"""Predicates and small queries on graphs that several passes use."""
from __future__ import annotations

import numpy as np

from infer_server.engines.ir.graph import BATCH, Array, Graph, Node
from infer_server.engines.ops import op_of


def is_pointwise(node: Node) -> bool:
    return op_of(node.op).pointwise


def is_weighted(node: Node) -> bool:
    """Return True if the node's anchor is a convolution or a matrix product; its input 1 may be computed."""
    return op_of(node.anchor.op).output_axis is not None


def output_axis(node: Node) -> int:
    """Return the axis of the output channels in the weights of a weighted node."""
    axis = op_of(node.anchor.op).output_axis
    assert axis is not None
    return axis


def moved_from(node: Node) -> tuple[str, ...]:
    """Return the inputs whose elements a data-moving node copies to its outputs; () for a node that computes."""
    return op_of(node.op).data(node)


def scalar(graph: Graph, name: str) -> float | None:
    """Return the value of a constant of one element, else None."""
    constant = graph.constants.get(name)
    return float(constant.reshape(())) if constant is not None and constant.size == 1 else None


def reader(graph: Graph, name: str) -> Node | None:
    """Return the only reader of a tensor; None if there are others or the tensor is a graph output."""
    readers = graph.consumers.get(name, ())
    return readers[0] if len(readers) == 1 and name not in graph.outputs else None


def per_channel(constant: Array, rank: int, channels: int, axis: int = 1) -> Array | None:
    """Return a constant as an array [channels] if it broadcasts along all axes but `axis` of the rank, else None."""
    if constant.ndim > rank:
        return None
    shape = (*(1,) * (rank - constant.ndim), *constant.shape)
    if shape[axis] not in (1, channels) or any(extent != 1 for i, extent in enumerate(shape) if i != axis):
        return None
    return np.broadcast_to(constant.reshape(-1), (channels,))


def spatial(node: Node, rank: int, key: str, default: int) -> tuple[int, ...]:
    """Return a window's attribute `key` (strides, dilations, ...) for `rank` spatial axes."""
    return tuple(node.attrs.get(key, (default,) * rank))


def pads(node: Node, rank: int) -> tuple[int, ...]:
    """Return the pads in ONNX's order: the begins of all spatial axes, then the ends."""
    return tuple(node.attrs.get("pads", (0,) * (2 * rank)))


def pads_with_zeros(node: Node) -> bool:
    """Return True for a Pad by zeros, which are exact in every stored type and equal a convolution's own padding."""
    return node.op == "Pad" and node.attrs.get("mode", "constant") == "constant" and node.attrs.get("value", 0) == 0


NORMS = ("LayerNormalization", "RMSNormalization")         # over the axes from `axis` on; inputs: x, scale, bias
ATTENTION = "ScaledDotProductAttention"


# ---- products of two run-time tensors: their kernels read and write rows of any stride
def is_product(graph: Graph, node: Node) -> bool:
    """Return True for an attention, or a MatMul whose right factor is computed at run time."""
    anchor = node.anchor
    return anchor.op == ATTENTION or anchor.op == "MatMul" and not graph.is_constant(anchor.inputs[1])


def is_view_of_input(graph: Graph, node: Node) -> bool:
    """Return True if a Transpose copies nothing, since all its readers are products that read its input with strides.

    The last axis of a left factor must be contiguous; of a right one, its last axis or the one before it.
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
    """Return True if a Transpose copies nothing, since it is the only reader of a product that writes with strides."""
    source, perm = node.inputs[0], node.attrs["perm"]
    producer = graph.producer.get(source)
    return (producer is not None and is_product(graph, producer) and reader(graph, source) is node
            and BATCH not in graph.shape(source)[-1:] and perm[-1] == len(perm) - 1)


def _epilogue_inputs(node: Node) -> set[str]:
    """Return the tensors that the nodes after a body's anchor read."""
    return {name for part in node.body[1:] for name in part.inputs}
