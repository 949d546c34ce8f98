"""The compiler and its runtime: `build_engine` makes an engine plan of a model, `load_engine` runs one.

Importing this package imports nothing else: names are resolved on first access, so that serving imports no compiler.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.compiler.build import EngineBuild, build_engine
    from engines.compiler.engine_cache import EngineCache
    from engines.loading import load_engine
    from engines.runtime.context import ExecutionContext
    from engines.runtime.engine import Engine

_HOMES = {"build_engine": "engines.compiler.build", "EngineBuild": "engines.compiler.build",
          "EngineCache": "engines.compiler.engine_cache", "Engine": "engines.runtime.engine",
          "ExecutionContext": "engines.runtime.context", "load_engine": "engines.loading"}
__all__ = ["Engine", "EngineBuild", "EngineCache", "ExecutionContext", "build_engine", "load_engine"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engines' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
