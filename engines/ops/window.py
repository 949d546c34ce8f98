"""Sliding window of convolutions and pools.

Output pixel o of an axis reads the padded input at o * stride + t * dilation for each tap t of the kernel. The
references iterate over taps instead of pixels: one tap of all pixels is a strided view.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node


@dataclass(frozen=True)
class Window:
    """Kernel, strides, dilations and pads (before, after) per spatial axis."""
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, node: Node, rank: int) -> Window:
        """Return the window of a node's kernel_shape, and optional strides, dilations and pads."""
        attrs = node.attrs
        kernel = tuple(attrs["kernel_shape"])
        pads = tuple(attrs.get("pads", (0,) * 2 * rank))
        window = cls(kernel, tuple(attrs.get("strides", (1,) * rank)), tuple(attrs.get("dilations", (1,) * rank)),
                     tuple(zip(pads[:rank], pads[rank:], strict=True)))
        if {len(window.kernel), len(window.strides), len(window.dilations), len(window.pads)} != {rank}:
            raise GraphError(f"kernel_shape, strides, dilations and pads must be for the input's {rank} axes")
        return window

    @property
    def spans(self) -> tuple[int, ...]:
        """Input pixels from the first tap to the last, per axis."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    def outputs(self, sizes: tuple[int, ...], ceil: bool = False) -> tuple[int, ...]:
        """Return the output extents. `ceil` keeps a last partial window that begins before the padding at the end."""
        result = []
        for size, span, stride, (before, after) in zip(sizes, self.spans, self.strides, self.pads, strict=True):
            room = size + before + after - span
            count = (-(-room // stride) if ceil else room // stride) + 1
            if ceil and (count - 1) * stride >= size + before:
                count -= 1
            if count < 1:
                raise GraphError(f"a window of {span} does not fit an extent of {size} with padding {before} + {after}")
            result.append(count)
        return tuple(result)

    def padded(self, x: Array, fill: float, outputs: tuple[int, ...]) -> Array:
        """Pad x [N, C, *sizes], also for the reads of a last partial window."""
        widths = [(0, 0), (0, 0)]
        for size, count, stride, span, (before, after) in zip(x.shape[2:], outputs, self.strides, self.spans,
                                                             self.pads, strict=True):
            widths.append((before, max(after, (count - 1) * stride + span - size - before)))
        return np.pad(x, widths, constant_values=fill) if any(map(any, widths)) else x

    def taps(self, padded: Array, outputs: tuple[int, ...]) -> Iterator[Array]:
        """Yield, for each tap in row-major order, a view [N, C, *outputs] of what all output pixels read."""
        for tap in np.ndindex(*self.kernel):
            cuts = [slice(t * d, t * d + (count - 1) * s + 1, s) for t, d, s, count in
                    zip(tap, self.dilations, self.strides, outputs, strict=True)]
            yield padded[(Ellipsis, *cuts)]     # type: ignore[arg-type]  # NumPy's stubs know no such index
