"""Backends by name: each is a module with `compile_graph`, imported when it is chosen."""
from __future__ import annotations

import importlib
from types import ModuleType

from engines.errors import ConfigError

BACKENDS = {"llvm": "engines.backends.llvm.backend"}


def backend_named(name: str) -> ModuleType:
    """The backend's module. ConfigError names the known ones."""
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend '{name}'; known backends: {', '.join(BACKENDS)}")
    return importlib.import_module(BACKENDS[name])
