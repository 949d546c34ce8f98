"""GPU kernels by family. Importing this package imports all modules, which register themselves in kernel.KERNELS."""
from importlib import import_module
from pkgutil import walk_packages

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
