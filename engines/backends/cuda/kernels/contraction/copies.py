"""Copies of a contraction's input and weights from global to shared memory, one stage of K at a time.

A thread copies one column of 16-byte chunks, in every `step`-th row of the stage: first pixels, then couts. Chunks are
swizzled within rows, so that one column of eight rows covers eight groups of banks.
"""
from __future__ import annotations

from infer_server.engines.backends.cuda.codegen.copies import CHUNK, commit, copy_async, copy_by_register, copy_chunk
from infer_server.engines.backends.cuda.codegen.gpu import Gpu
from infer_server.engines.backends.cuda.codegen.module import elements, number_if, shared, vector_of, wide
from infer_server.engines.backends.cuda.kernels.access import pixel_offset
from infer_server.engines.backends.cuda.kernels.contraction.packing import Depth
from infer_server.engines.backends.cuda.kernels.contraction.tile import Tile
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import I32, I64, vector


def swizzled(chunk: Value, row: Value, depth: int) -> Value:
    """Return the position of a chunk in a row of a stage."""
    turned = row & 7 if depth == 128 else row.binary("lshr", 1) & 3
    return chunk ^ turned


class Copies:
    """Emitter of the copies.

    `pixel0` and `cout0` are the block's first; `channel` is the offset in bytes of the group's first channel in x.
    """

    def __init__(self, depth: Depth, tile: Tile, gpu: Gpu, x: Value, weights: Value, walk: Value | None,
                 thread: Value, pixel0: Value, cout0: Value, channel: Value, rows: Value) -> None:
        self.depth, self.tile, self.gpu, self.f, self.walk = depth, tile, gpu, thread.f, walk
        columns = tile.depth // CHUNK
        self.column, row = thread.remainder(columns), thread.divided(columns)
        self.to = row * tile.depth + swizzled(self.column, row, tile.depth) * CHUNK
        self.pixels: list[Value] = []       # addresses
        problem = depth.problem
        strides = [s * n for s, n in zip(problem.stride, problem.x.strides, strict=False)]
        for i in range(tile.pixels // tile.step):
            # Rows past the end copy the last pixel; their sums are never stored.
            pixel = (pixel0 + (row + i * tile.step)).at_most(rows - 1)
            at = pixel_offset(pixel, problem.y.shape[:-1], strides, problem.x.item)
            self.pixels.append(x + at + channel)
        self.row_bytes = depth.turns(tile) * tile.depth
        self.weights = weights + (wide(cout0 + row) * self.row_bytes + wide(self.column * CHUNK))

    def copy(self, turn: Value, stage: Value) -> None:
        """Copy stage `turn` of K to the offset `stage` of shared memory. Stages past the end of K are zeros."""
        tile, first = self.tile, shared(self.f) + (stage + self.to)
        at, taken = self._chunk(turn)
        for i, pixel in enumerate(self.pixels):
            self._copy_pixel(first + i * tile.step * tile.depth, pixel + at, taken)
        first = first + tile.pixels * tile.depth
        whole = number_if(turn.below(self.depth.turns(tile)), CHUNK)
        source = self.weights + wide(turn * tile.depth)
        for i in range(tile.couts // tile.step):
            copy_chunk(self.gpu, first + i * tile.step * tile.depth, source + i * tile.step * self.row_bytes, whole)
        if self.gpu.async_copy:
            commit(self.f)

    def _chunk(self, turn: Value) -> tuple[Value, Value]:
        """Return the offset of this thread's chunk from its pixel, and the number of valid bytes."""
        f, depth = self.f, self.depth
        chunk = turn * (self.tile.depth // CHUNK) + self.column
        if self.walk is not None:
            pair = elements(f.load(vector(2, I32), self.walk + wide(chunk * 8), 8, "walk"))
            return f.cast("sext", pair[0], I64, "walk"), pair[1]
        last = len(depth.walk) - 1
        taken = number_if(chunk.below(len(depth.walk)), CHUNK)
        if depth.ragged:
            taken = f.select(chunk.compare("eq", last), taken.like(depth.bytes - last * CHUNK), taken, "taken")
        return wide(chunk * CHUNK), taken

    def _copy_pixel(self, to: Value, source: Value, taken: Value) -> None:
        """Copy `taken` bytes of a chunk of x, and fill the rest with zeros."""
        grain = self.depth.grain
        if self.gpu.async_copy and grain >= 4:
            for at in range(0, CHUNK, grain):
                there = taken if grain == CHUNK else _between(taken, at, grain)
                copy_async(to + at, source + at, grain, there)
        elif grain == CHUNK and not self.depth.ragged:
            copy_by_register(to, source, taken)
        else:
            self._copy_pieces(to, source, taken, grain)

    def _copy_pieces(self, to: Value, source: Value, taken: Value, grain: int) -> None:
        """Copy a chunk in smaller pieces, for unaligned x or partial chunks. Missing pieces are zeros."""
        f = self.f
        size = min(grain, self.depth.size) if self.depth.ragged else grain
        type_ = f"i{8 * size}"
        pieces = {i: f.constant(0, type_) for i in range(CHUNK // size)}
        with f.when_carrying(taken.compare("ne", 0), pieces):
            for i in pieces:
                there = taken.compare("ugt", i * size)
                # A missing piece reads the first one instead, to stay in bounds.
                at = f.select(there, f.constant(i * size, I64), f.constant(0, I64), "place")
                piece = f.load(type_, source + at, size, "piece")
                pieces[i] = f.select(there, piece, piece.like(0), "piece")
        f.store(f.cast("bitcast", vector_of([*pieces.values()]), vector(4, I32), "chunk"), to, CHUNK)


def _between(taken: Value, at: int, size: int) -> Value:
    """Return how many of the bytes at..at + size - 1 are among the first `taken`."""
    f = taken.f
    behind = f.call(I32, "llvm.umax.i32", taken, taken.like(at), hint="most") - at
    return behind.at_most(size)
