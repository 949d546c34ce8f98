"""How a convolution is cut into tiles for Winograd's kernel, and how those are transformed."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engines.backends.llvm.kernels.common.arithmetic import FP32, INT16, Arithmetic
from engines.backends.llvm.kernels.contraction.planes import Planes
from engines.backends.llvm.kernels.kernel import Tactic
from engines.lowering.problems.convolution import Contraction
from engines.lowering.problems.view import SIZES

OUTPUT, PATCH, POSITIONS = 4, 6, 6 * 6      # pixels of a tile and of its patch, each way; of a whole patch
SCALE = 24 * 24             # by which the sums are too large
Plus = Callable[[Any, int, Any], Any]       # a, n, b -> a * n + b


def transform_input(x: Sequence[Any], plus: Plus) -> list[Any]:
    """B' x, six numbers to six."""
    a, b, c, d = plus(x[2], -4, x[4]), plus(x[1], -4, x[3]), x[4] - x[2], x[3] - x[1]
    return [plus(x[0] - x[2], 4, c), a + b, a - b, plus(d, 2, c), plus(d, -2, c), plus(d, -4, x[5] - x[3])]


def transform_output(m: Sequence[Any], plus: Plus) -> list[Any]:
    """A' m, six numbers to four."""
    s, d, t, u = m[1] + m[2], m[1] - m[2], m[3] + m[4], m[3] - m[4]
    return [m[0] + s + t, plus(u, 2, d), plus(t, 4, s), plus(plus(u, 2, m[5]), 4, d)]


@dataclass(frozen=True)
class Winograd(Tactic):
    """A block of `tiles`, of which `group` by `vectors` of couts are a micro-kernel."""
    group: int
    vectors: int
    tiles: int
    prefetch: bool = False      # ask for the next position's weights, or the next panel's

    def __str__(self) -> str:
        return f"Winograd 4x4, {self.tiles} tiles by {self.group}x{self.vectors}{' prefetch' if self.prefetch else ''}"


@dataclass(frozen=True)
class Tiling:
    """The tiles of a problem. Of volumes each plane of y has its own, and every plane of taps its channels of V."""
    problem: Contraction

    @property
    def arithmetic(self) -> Arithmetic:
        return INT16 if self.problem.precision == "int8" else FP32

    @cached_property
    def planes(self) -> Planes:
        return Planes.of(self.problem)

    @property
    def depth(self) -> int:
        """Channels of a tile in V: those of x at every plane of taps."""
        return self.planes.taps * self.problem.cin

    @property
    def across(self) -> int:
        """Tiles beside each other in an image."""
        return -(-self.problem.cols // OUTPUT)

    @property
    def of_plane(self) -> int:
        """Tiles of an image."""
        return -(-self.problem.rows // OUTPUT) * self.across

    @property
    def tiles(self) -> int:
        """Tiles of an item."""
        return self.planes.count * self.of_plane

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in V, at one position; and of a cout's weights there."""
        return self.depth * SIZES[self.arithmetic.dtype]
