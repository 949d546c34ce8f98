"""The kernels of the CPU, a folder a family. Importing any of them registers all: see kernel.solves."""
from engines.backends.llvm.kernels.rows import lrn, norm, reduce, softmax  # noqa: F401
