"""Maximum or minimum over a whole batch: one block, whose warps take the rows of all items in turn.

    warp: best = of rows warp, warp + 32, ...       in shared memory; then the first warp: y = program(best of all)
"""
from __future__ import annotations

from infer_server.engines.backends.cuda.codegen.gpu import WARP
from infer_server.engines.backends.cuda.codegen.module import (
    GpuModule,
    barrier,
    begin_kernel,
    shared,
    shuffle_xor,
    special_register,
    wide,
)
from infer_server.engines.backends.cuda.kernels.kernel import Grid, Tactic, solves
from infer_server.engines.backends.cuda.kernels.rows.rows import OverRows, Row
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import FLOAT, I32
from infer_server.engines.lowering.problems.rows import NEUTRAL, Extreme

WARPS = 32              # per block
UNCUT = 1 << 30         # rows of a block: all there are


@solves(Extreme)
class ExtremeByBlock(OverRows[Extreme]):
    """Kernel with a single block."""

    def grid(self, tactic: Tactic) -> Grid:
        return Grid(self.rows_of_item, UNCUT, WARPS * WARP, shared_bytes=4 * WARPS)

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        kind, threads = self.problem.kind, WARPS * WARP
        f, operands, rows = begin_kernel(module, name, threads, len(self.problem.inputs) + 3)
        thread = special_register(f, "tid.x")
        lane, warp = thread & WARP - 1, thread.binary("lshr", WARP.bit_length() - 1)
        best = {0: f.constant(NEUTRAL[kind], FLOAT)}
        for number in f.range("row", wide(warp), wide(rows), WARPS, best=best):
            row = Row(self, operands, f.cast("trunc", number, I32, "row"), lane)
            best[0] = row.combined(kind, best[0], row.reduce(kind, row.x))
        with f.when(lane.compare("eq", 0)):
            f.store(best[0], shared(f) + warp * 4, 4)
        barrier(f)
        with f.when(warp.compare("eq", 0)):
            result: Value = f.load(FLOAT, shared(f) + lane * 4, 4, "best")
            row = Row(self, operands, lane.like(0), lane)
            for distance in (16, 8, 4, 2, 1):
                result = row.combined(kind, result, shuffle_xor(result, distance))
            row.store_one(result)
