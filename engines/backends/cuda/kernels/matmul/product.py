"""Product of two run-time tensors: on tensor cores if possible, else one thread for a few outputs over all of K.

    y[n, ..., m, o] = program(sum over k of (a[n, ..., m, k] - za) * (b[n, ..., k, o] - zb))

INT8 is exact in int32; floats use fma in float32. On tensor cores large products go through shared memory
(shared_products.py), others read through the caches (product_tiles.py).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer_server.engines.backends.cuda.codegen.gpu import WARP, Gpu
from infer_server.engines.backends.cuda.codegen.module import GpuModule, begin_kernel, special_register, wide
from infer_server.engines.backends.cuda.cost import PLAIN, Card
from infer_server.engines.backends.cuda.kernels.access import offset_in, pixel_offset, to_float
from infer_server.engines.backends.cuda.kernels.elementwise.threads import ProgramKernel
from infer_server.engines.backends.cuda.kernels.kernel import Grid, Tactic, solves
from infer_server.engines.backends.cuda.kernels.matmul import product_tiles, shared_products
from infer_server.engines.backends.cuda.kernels.matmul.product_tiles import ProductTile, tiles_of
from infer_server.engines.backends.cuda.kernels.matmul.shared_products import SharedProduct
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import ELEMENTS, FLOAT, I32
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.matmul import Product
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.view import View

WARPS = 4               # per block
MIN_BLOCKS = 3          # minimum of resident blocks; without it ptxas may spill to fit more
MACS, SHARED_MACS = 8, 15       # multiply-adds per SASS instruction, by tiles and from shared memory


@dataclass(frozen=True)
class ByTiles(Tactic):
    """Tactic of product_tiles.py."""

    def __str__(self) -> str:
        return "16 x 32 a warp"


@dataclass(frozen=True)
class ByBlocks(Tactic):
    """Tactic of shared_products.py."""

    def __str__(self) -> str:
        return "64 x 64 a block, in shared memory"


@solves(Product)
class GpuProduct(ProgramKernel[Product]):
    """Kernel for products, with three tactics."""
    tables = 2

    def tactics(self) -> Sequence[Tactic]:
        of = self.problem, self.gpu, self.aligned
        able = {ByBlocks(): shared_products.suits(*of), ByTiles(): product_tiles.suits(*of), Tactic(): True}
        return [tactic for tactic, suits in able.items() if suits]

    def cost(self, tactic: Tactic, card: Card, items: int) -> float:
        problem = self.problem
        if isinstance(tactic, ByBlocks):
            blocks = shared_products.blocks_of(problem) * items
            instructions = blocks * shared_products.BLOCK ** 2 * problem.depth // SHARED_MACS
            threads = blocks * shared_products.THREADS
        elif isinstance(tactic, ByTiles):
            instructions, threads = problem.macs * items // MACS, tiles_of(problem) * items * WARP
        else:
            return super().cost(tactic, card, items)
        return max(card.copy_seconds(problem.bytes * items), card.scalar_seconds(instructions // PLAIN, threads))

    def grid(self, tactic: Tactic) -> Grid:
        if isinstance(tactic, ByBlocks):
            return Grid(shared_products.blocks_of(self.problem), 1, shared_products.THREADS,
                        shared_bytes=shared_products.shared_bytes(self.problem))
        if isinstance(tactic, ByTiles):
            return Grid(tiles_of(self.problem), WARPS, WARPS * WARP)
        return super().grid(tactic)

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        module.min_blocks[name] = MIN_BLOCKS
        if not isinstance(tactic, ByTiles | ByBlocks):
            super().emit(module, name, tactic)
            return
        f, operands, rows = begin_kernel(module, name, WARPS * WARP, len(self.problem.inputs) + 3)
        thread = special_register(f, "tid.x")
        if isinstance(tactic, ByBlocks):
            block = special_register(f, "ctaid.x")
            SharedProduct(self.problem, self.gpu, self.aligned, operands, block, thread).write(block.below(rows))
            return
        tile = special_register(f, "ctaid.x") * WARPS + thread.binary("lshr", WARP.bit_length() - 1)
        product = ProductTile(self.problem, self.gpu, self.aligned, operands, tile.at_most(rows - 1), thread & WARP - 1)
        product.write(tile.below(rows))

    @property
    def program(self) -> EpilogueProgram:
        return self.problem.program

    @property
    def vectors(self) -> Sequence[tuple[View, int]]:
        return list(super().vectors)[2:]

    def pack(self, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return the zero points, then the program's constants."""
        return (np.asarray(constants["numbers"], np.float32), *super().pack(tactic, constants))

    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        problem, gpu, inputs = self.problem, self.gpu, len(self.problem.inputs)
        a, b, integers = problem.a, problem.b, problem.precision == "int8"
        row = operands[0] + offset_in(a, pixel)
        matrix = pixel.divided(problem.y.shape[-2])
        column = operands[1] + pixel_offset(matrix, b.shape[:-2], b.strides[:-2], b.item)
        column = column + wide(channel) * b.strides[-1]
        zeros = [f.load(FLOAT, operands[inputs] + 4 * n, 4, "zero") for n in (0, 1)]
        if integers:
            zeros = [gpu.round(zero) for zero in zeros]
        acc = dict.fromkeys(range(self.each), f.constant(0, I32 if integers else FLOAT))
        for k in f.loop("k", problem.depth, acc=acc):
            factor = load_factor(gpu, a, row + k * a.strides[-1], zeros[0], integers)
            for c in acc:
                at = column + k * b.strides[-2] + c * b.strides[-1]
                acc[c] = added(gpu, acc[c], factor, load_factor(gpu, b, at, zeros[1], integers))
        sums = [gpu.to_float(s) if integers else s for s in acc.values()]
        self.finish(operands, pixel, channel, sums, range(2, inputs), inputs + 1)


def load_factor(gpu: Gpu, view: View, address: Value, zero: Value | int, integers: bool) -> Value:
    """Load an element minus its zero point, as i32 if `integers`, else as float32."""
    f = address.f
    stored = f.load(ELEMENTS[view.dtype], address, view.size, "stored")
    if integers:
        return f.cast("zext", stored, I32, "wide") - zero
    return to_float(gpu, view.dtype, stored) - zero


def added(gpu: Gpu, acc: Value, a: Value, b: Value) -> Value:
    """Return acc + a * b."""
    return acc + a * b if acc.type == I32 else gpu.fma(a, b, acc)
