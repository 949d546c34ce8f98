"""Tiles of a convolution for Winograd's kernel, and their transforms."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from infer_server.engines.backends.llvm.kernels.common.arithmetic import FP32, INT16, Arithmetic
from infer_server.engines.backends.llvm.kernels.contraction.planes import Planes
from infer_server.engines.backends.llvm.kernels.kernel import Tactic
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.view import SIZES

OUTPUT, PATCH, POSITIONS = 4, 6, 6 * 6      # width of a tile, width of its patch, pixels of a patch
SCALE = 24 * 24             # factor by which the sums are too large
Plus = Callable[[Any, int, Any], Any]       # a, n, b -> a * n + b


def transform_input(x: Sequence[Any], plus: Plus) -> list[Any]:
    """Return B' x, six numbers to six."""
    a, b, c, d = plus(x[2], -4, x[4]), plus(x[1], -4, x[3]), x[4] - x[2], x[3] - x[1]
    return [plus(x[0] - x[2], 4, c), a + b, a - b, plus(d, 2, c), plus(d, -2, c), plus(d, -4, x[5] - x[3])]


def transform_output(m: Sequence[Any], plus: Plus) -> list[Any]:
    """Return A' m, six numbers to four."""
    s, d, t, u = m[1] + m[2], m[1] - m[2], m[3] + m[4], m[3] - m[4]
    return [m[0] + s + t, plus(u, 2, d), plus(t, 4, s), plus(plus(u, 2, m[5]), 4, d)]


@dataclass(frozen=True)
class Winograd(Tactic):
    """Tactic of Winograd's kernel: blocks of `tiles`, of which `group` by `vectors` of couts are a micro-kernel."""
    group: int
    vectors: int
    tiles: int
    prefetch: bool = False      # prefetch the weights of the next position or panel

    def __str__(self) -> str:
        return f"Winograd 4x4, {self.tiles} tiles by {self.group}x{self.vectors}{' prefetch' if self.prefetch else ''}"


@dataclass(frozen=True)
class Tiling:
    """Tiles of a problem.

    Each plane of y of a volume has its own tiles; V has the channels of x for every plane of taps.
    """
    problem: Contraction

    @property
    def arithmetic(self) -> Arithmetic:
        return INT16 if self.problem.precision == "int8" else FP32

    @cached_property
    def planes(self) -> Planes:
        return Planes.of(self.problem)

    @property
    def depth(self) -> int:
        """Return the channels of a tile in V: those of x for every plane of taps."""
        return self.planes.taps * self.problem.cin

    @property
    def across(self) -> int:
        """Return the tiles in a row of an image."""
        return -(-self.problem.cols // OUTPUT)

    @property
    def of_plane(self) -> int:
        """Return the tiles of an image."""
        return -(-self.problem.rows // OUTPUT) * self.across

    @property
    def tiles(self) -> int:
        """Return the tiles of an item."""
        return self.planes.count * self.of_plane

    @property
    def tile_bytes(self) -> int:
        """Return the bytes of a tile in V at one position, which are also those of a cout's weights there."""
        return self.depth * SIZES[self.arithmetic.dtype]
