"""CPU kernels, one folder for each family.

Importing this package imports all its modules, which fill kernel.KERNELS.
"""
from importlib import import_module
from pkgutil import walk_packages

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
