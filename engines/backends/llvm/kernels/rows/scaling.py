"""Code that divides a row by its scale, for row kernels and for kernels that compute rows."""
from __future__ import annotations

from infer_server.engines.backends.llvm.kernels.rows.passes import RowCode, combine
from infer_server.engines.codegen.types import FLOAT
from infer_server.engines.ir.rounding import LEAST_SCALE
from infer_server.engines.lowering.problems.rows import ScaledRows


def scale_row(row: RowCode, problem: ScaledRows) -> None:
    """Emit two passes over a row: its largest number, and the division of all by the scale."""
    largest = row.reduce("largest", lambda at: row.isa.unary("fabs", row.x(at)))
    scale = combine(row.isa, "largest", largest * (1 / problem.steps), largest.like(LEAST_SCALE))
    inverse = 1 / scale
    row.store(lambda at: row.x(at) * inverse + problem.shift)
    row.f.store(row.f.op(FLOAT, f"extractelement {scale}, i32 0", "scale"), row.others[0])
