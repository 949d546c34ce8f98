"""The kernels of the CPU, a folder a family. Importing any of them registers all: see kernel.solves."""
from engines.backends.llvm.kernels.contraction import (  # noqa: F401
    direct,
    paired,
    widen,
    winograd,
    winograd_weights,
)
from engines.backends.llvm.kernels.depthwise import depthwise  # noqa: F401
from engines.backends.llvm.kernels.matmul import product  # noqa: F401
