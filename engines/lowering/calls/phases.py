"""Transposed convolution as one ordinary convolution per phase of its output.

Along an axis of stride s, output s * u + a gets x[i] * w[p] where i * s + p = s * u + a + pad. With q = (a + pad) % s
and b = (a + pad) // s the taps are p = q + s * m, at x[u + b - m]: every s-th tap, in reverse order. The outputs of
phase a are s apart, and no zeros are inserted between pixels.
"""
from __future__ import annotations

from dataclasses import dataclass

from infer_server.engines.ir.graph import Graph, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.ops.window import Window


@dataclass(frozen=True)
class Phase:
    """Phase of an axis: outputs start, start + step, ..., `outputs` of them.

    Output u of the phase reads `taps` of x from u + first on.
    """
    start: int
    step: int
    outputs: int
    first: int
    taps: tuple[int, ...]       # indices into the kernel, in the order of x

    @property
    def end(self) -> int:
        """One past the last element of x that is read."""
        return self.first + self.outputs + len(self.taps) - 1


def phases_of(kernel: int, stride: int, pad: int, outputs: int) -> tuple[Phase, ...]:
    """Return the phases of one axis. A phase without taps (kernel shorter than the stride) yields only the bias."""
    found = []
    for start in range(min(stride, outputs)):
        base, first_tap = divmod(start + pad, stride)
        taps = tuple(reversed(range(first_tap, kernel, stride)))
        found.append(Phase(start, stride, -(-(outputs - start) // stride), base - len(taps) + 1, taps))
    return tuple(found)


def phases(graph: Graph, node: Node) -> tuple[tuple[Phase, ...], ...]:
    """Return the phases along each spatial axis of an NHWC ConvTranspose."""
    extents = graph.types[node.outputs[0]].shape[1:-1]
    window = Window.of(node, len(extents))
    return tuple(phases_of(kernel, stride, before, as_int(extent)) for kernel, stride, (before, _), extent in zip(
        window.kernel, window.strides, window.pads, extents, strict=True))
