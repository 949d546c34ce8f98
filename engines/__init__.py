"""The compiler and its runtime: `build_engine` makes an engine plan of a model, `load_engine` runs one.

Importing this package imports nothing else: names are resolved on first access, so that serving imports no compiler.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer_server.engines.compiler.build import EngineBuild, build_engine
    from infer_server.engines.compiler.engine_cache import EngineCache
    from infer_server.engines.loading import load_engine
    from infer_server.engines.runtime.context import ExecutionContext
    from infer_server.engines.runtime.engine import Engine

_HOMES = {"build_engine": "infer_server.engines.compiler.build", "EngineBuild": "infer_server.engines.compiler.build",
          "EngineCache": "infer_server.engines.compiler.engine_cache", "Engine": "infer_server.engines.runtime.engine",
          "ExecutionContext": "infer_server.engines.runtime.context", "load_engine": "infer_server.engines.loading"}
__all__ = ["Engine", "EngineBuild", "EngineCache", "ExecutionContext", "build_engine", "load_engine"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
