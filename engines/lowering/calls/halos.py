"""Halos: padding that is kept in memory around images.

The input of a padded convolution has a halo of its zero point around each image. A transposed convolution reads the
halo where its phases exceed the input. A Pad with zeros is a view that includes the halo.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from infer_server.engines.ir.graph import Graph, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.phases import Phase, phases
from infer_server.engines.lowering.problems.view import Halo
from infer_server.engines.ops.window import Window
from infer_server.engines.passes.rewriting.facts import pads_with_zeros


def required_halos(graph: Graph, node: Node) -> Mapping[str, Halo]:
    """Map a node's inputs to the halo that a convolution, or the consumer of a Pad, reads around them."""
    if node.op == "Pad":
        return {node.inputs[0]: halo} if (halo := halo_of_pad(graph, node)) else {}
    conv = node.anchor
    if not conv.attrs.get("channels_last"):
        return {}
    if conv.op == "ConvTranspose" and conv.inputs[1] in graph.constants:
        return {conv.inputs[0]: Halo.of([_overhang(axis, as_int(extent)) for axis, extent in zip(
            phases(graph, conv), graph.types[conv.inputs[0]].shape[1:-1], strict=True)])}
    if conv.op != "Conv":
        return {}
    return {conv.inputs[0]: Halo.of(Window.of(conv, len(graph.types[conv.inputs[0]].shape) - 2).pads)}


def halo_of_pad(graph: Graph, node: Node) -> Halo:
    """Return the halo that replaces a Pad of NHWC images with zeros, or an empty one for any other Pad."""
    source, output, pads = node.inputs[0], node.outputs[0], tuple(as_int(p) for p in node.attrs["pads"])
    if (len(pads) != 8 or min(pads) < 0 or any((pads[0], pads[3], pads[4], pads[7])) or graph.is_constant(source)
            or not pads_with_zeros(node)
            or graph.types[source].quant != graph.types[output].quant):
        return Halo()
    return Halo(pads[1], pads[2], pads[5], pads[6])


def _overhang(axis: Sequence[Phase], extent: int) -> tuple[int, int]:
    """Return how far the phases of a transposed convolution read before and after an axis."""
    return max(0, *(-phase.first for phase in axis)), max(0, *(phase.end - extent for phase in axis))
