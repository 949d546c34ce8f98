"""One file a family of operators: how a node becomes a kernel. Importing this package fills RULES."""
from engines.backends.llvm.rules import contraction, layout, pointwise  # noqa: F401
