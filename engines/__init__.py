"""The compiler and its runtime. Importing this package imports nothing else: `load_engine` is fetched when asked."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.runtime.engine import Engine, ExecutionContext, load_engine

__all__ = ["Engine", "ExecutionContext", "load_engine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engines' has no attribute '{name}'")
    from engines.runtime import engine
    return getattr(engine, name)
