"""One file a family of operators: how a node becomes a kernel. Importing this package fills RULES."""
from engines.lowering.rules import (  # noqa: F401
    attention,
    contraction,
    copies,
    cumulative,
    gather,
    layout,
    pointwise,
    pool,
    recurrence,
    resize,
    rows,
    top_k,
    transposed,
)
