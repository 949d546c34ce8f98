"""One class per ONNX operator. Importing this package fills OPS; nothing here needs the onnx package until a
Fallback node runs."""
from engines.ops import (  # noqa: F401  (each fills OPS)
    activations,
    arithmetic,
    attention,
    convolution,
    cumulative,
    generate,
    linear,
    logic,
    movement,
    normalization,
    pooling,
    quantization,
    recurrent,
    reduction,
    resize,
    shape,
)
from engines.ops.fallback import Fallback
from engines.ops.op import OPS, LayoutOp, Op, Stored, describe

__all__ = ["OPS", "LayoutOp", "Op", "Stored", "describe", "op_of"]


def op_of(name: str) -> type[Op]:
    """The operator's class; Fallback for one that we do not write ourselves."""
    return OPS.get(name, Fallback)
