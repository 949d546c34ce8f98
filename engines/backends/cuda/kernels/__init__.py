"""Kernels, a folder or a file a family. Importing this package imports all its modules, which fills kernel.KERNELS."""
from importlib import import_module
from pkgutil import walk_packages

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
