"""The compiler and its runtime. Importing this package imports nothing else: `load_engine` is fetched when asked."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.loading import load_engine
    from engines.runtime.engine import Engine, ExecutionContext

__all__ = ["Engine", "ExecutionContext", "load_engine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engines' has no attribute '{name}'")
    from engines import loading
    from engines.runtime import engine
    return getattr(loading if name == "load_engine" else engine, name)
