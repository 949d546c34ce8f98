"""Lower ONNX Runtime's contrib operators (com.microsoft) to ONNX's, one module per family; and our own of programs."""
from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
