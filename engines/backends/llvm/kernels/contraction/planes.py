"""Convolutions of volumes (3-D) as sums of convolutions of image planes.

    y[n, k] = program(sum over r of the convolution of x[n, k * stride + r * dilation] by w[:, :, r])

The sum over r is one more loop around a tile's accumulators, so that a tile is stored once. The outer loops treat a
plane of y like an item of a batch.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.view import View


@dataclass(frozen=True)
class Planes:
    """Planes of a convolution; `image` is the convolution within one plane.

    A 2-D convolution has one plane and one tap.
    """
    image: Contraction
    count: int = 1                  # planes of y
    taps: int = 1                   # taps along the plane axis
    tap_step: int = 0               # bytes of x from one tap to the next
    steps: Sequence[int] = ()       # byte distance of two planes of y: in x, in the operands, in y; () for images

    @classmethod
    def of(cls, problem: Contraction) -> Planes:
        if len(problem.taps) == 2:
            return cls(problem)
        x, *others = views = (*problem.inputs, problem.y)
        of_x, *operands, y = map(_plane, views)
        image = replace(problem, x=of_x, y=y, operands=tuple(operands), taps=problem.taps[1:],
                        stride=problem.stride[1:], dilation=problem.dilation[1:])
        return cls(image, problem.y.shape[0], problem.taps[0], x.strides[0] * problem.dilation[0],
                   (x.strides[0] * problem.stride[0], *(view.strides[0] for view in others)))

    @property
    def of_volumes(self) -> bool:
        return bool(self.steps)

    def offsets(self, plane: Value, views: Sequence[View]) -> list[Value]:
        """Return the byte offset in each view of a plane of y, numbered over all items of the batch."""
        if not self.of_volumes:
            return [plane * view.item for view in views]
        item, inside = plane.divided(self.count), plane.remainder(self.count)
        return [item * view.item + inside * step for view, step in zip(views, self.steps, strict=True)]


def _plane(view: View) -> View:
    return replace(view, shape=view.shape[1:], strides=view.strides[1:])
