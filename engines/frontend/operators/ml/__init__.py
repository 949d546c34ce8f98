"""Lower ONNX's operators of classical machine learning (ai.onnx.ml) to tensor operators, one module per family."""
from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
