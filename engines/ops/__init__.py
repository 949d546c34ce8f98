"""Operators, one class per ONNX operator. Importing this package imports all modules, which fills OPS.

The onnx package is imported only when an OnnxReferenceOp node is inferred or run. A new operator needs its class here,
with its traits (ops/op.py); the conversion of its ONNX forms (frontend/operators); and for speed a lowering rule
(lowering/rules) and possibly a kernel. Without these it runs on its reference. A pointwise operator has a line in
lowering/epilogue/from_onnx.py instead of a rule.
"""
from importlib import import_module
from pkgutil import iter_modules

from infer_server.engines.ops.fallback import OnnxReferenceOp
from infer_server.engines.ops.op import OPS, LayoutOp, Op, Stored, describe

__all__ = ["OPS", "LayoutOp", "Op", "Stored", "describe", "op_of"]


def op_of(name: str) -> type[Op]:
    """Return the class of an operator, or OnnxReferenceOp if it has none."""
    return OPS.get(name, OnnxReferenceOp)


for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
