"""Tilings of a contraction: pixels and couts per block and per warp, and pipeline stages."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infer_server.engines.backends.cuda.codegen.copies import CHUNK
from infer_server.engines.backends.cuda.codegen.gpu import WARP, Gpu
from infer_server.engines.backends.cuda.kernels.kernel import Tactic


@dataclass(frozen=True)
class Tile(Tactic):
    """Tiling of a thread block of pixels x couts into warps[0] x warps[1] warp tiles."""
    pixels: int
    couts: int
    warps: tuple[int, int]
    depth: int = 64         # bytes of K per stage: 64 or 128
    stages: int = 4
    grouped: bool = False   # wgmma: four warps multiply 64 pixels; warps[1] is 1 and depth 128

    @property
    def threads(self) -> int:
        return self.warps[0] * self.warps[1] * WARP

    @property
    def part(self) -> tuple[int, int]:
        """Pixels and couts per warp."""
        return self.pixels // self.warps[0], self.couts // self.warps[1]

    @property
    def lanes(self) -> int:
        """Neighbouring couts per thread."""
        return self.part[1] // 4

    @property
    def stage_bytes(self) -> int:
        return (self.pixels + self.couts) * self.depth

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def step(self) -> int:
        """Rows of a stage that the threads copy at once, one chunk each."""
        return self.threads // (self.depth // CHUNK)

    def __str__(self) -> str:
        return (f"{self.pixels}x{self.couts}x{self.depth} warps {self.warps[0]}x{self.warps[1]} stages {self.stages}"
                + " grouped" * self.grouped)


_SHAPES = ((128, 128, (2, 2)), (128, 64, (2, 2)), (256, 64, (4, 1)), (64, 128, (2, 2)), (256, 128, (4, 2)),
           (128, 256, (2, 4)), (64, 64, (2, 2)), (32, 64, (1, 2)), (32, 128, (1, 4)))
_BY_LANE = ((64, 64, (2, 2)), (32, 64, (1, 2)), (64, 32, (2, 1)))
_GROUPED = ((128, 128), (128, 256), (128, 64), (256, 128), (64, 64), (64, 128), (64, 256))


def tiles(gpu: Gpu, precision: str, couts: int) -> Iterator[Tile]:
    """Yield the candidate tilings for a number of couts, the usual winner for large layers first."""
    shapes = _SHAPES if gpu.has_mma(precision) else _BY_LANE
    for pixels, columns, warps in shapes:
        for depth, stages in ((64, 4), (128, 3)) if gpu.async_copy else ((64, 2),):
            tile = Tile(pixels, columns, warps, depth, stages)
            if _fits(tile, gpu, couts):
                yield tile
    for pixels, columns in _GROUPED if gpu.grouped and gpu.by_warp(precision) else ():
        tile = Tile(pixels, columns, (pixels // 16, 1), 128, 3, grouped=True)
        if _fits(tile, gpu, couts):
            yield tile


def _fits(tile: Tile, gpu: Gpu, couts: int) -> bool:
    return (tile.couts <= max(64, couts) and tile.shared_bytes <= gpu.shared
            and not tile.pixels % tile.step and not tile.couts % tile.step)
