"""The kernels of the CPU, a folder a family. Importing any of them registers all: see kernel.solves."""
from engines.backends.llvm.kernels.contraction import (  # noqa: F401
    direct,
    paired,
    widen,
    winograd,
    winograd_weights,
)
from engines.backends.llvm.kernels.depthwise import depthwise  # noqa: F401
from engines.backends.llvm.kernels.elementwise import cumulative, integers, pointwise, top_k  # noqa: F401
from engines.backends.llvm.kernels.matmul import attention, product  # noqa: F401
from engines.backends.llvm.kernels.movement import gather, halo, permute, resize  # noqa: F401
from engines.backends.llvm.kernels.pooling import global_pool, pool  # noqa: F401
from engines.backends.llvm.kernels.recurrent import recurrence  # noqa: F401
from engines.backends.llvm.kernels.rows import kernels  # noqa: F401
