"""General rules, which lower to loop nests what other rules refuse. Importing this package fills FALLBACK_RULES."""
from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
