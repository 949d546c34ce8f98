"""Bulk scoring: `Scorer` runs a plan on batches of rows, `score` on whole folders."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer_server.batch.scorer import Scorer

__all__ = ["Scorer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from infer_server.batch import scorer
    return getattr(scorer, name)
