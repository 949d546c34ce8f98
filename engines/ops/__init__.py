"""One class per ONNX operator. Importing this package imports all its modules, which fills OPS; nothing here needs the
onnx package until a Fallback node runs.

A new operator, CumSum say, is: its class here, with its traits (ops/op.py); how its ONNX forms are read and how it is
written (frontend/operators); a rule of lowering (lowering/rules), and a kernel where those that are there do not do.
Without the last two it runs on its reference; a pointwise one has a line in lowering/epilogue/from_onnx.py instead.
"""
from importlib import import_module
from pkgutil import iter_modules

from engines.ops.fallback import Fallback
from engines.ops.op import OPS, LayoutOp, Op, Stored, describe

__all__ = ["OPS", "LayoutOp", "Op", "Stored", "describe", "op_of"]


def op_of(name: str) -> type[Op]:
    """The operator's class; Fallback for one that we do not write ourselves."""
    return OPS.get(name, Fallback)


for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
