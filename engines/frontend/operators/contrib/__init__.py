"""ONNX Runtime's own operators (com.microsoft), a file a family, written out by ONNX's; and ours, of programs."""
from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
