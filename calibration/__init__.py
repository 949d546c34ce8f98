"""INT8 ranges from data: `Calibration` is what build_engine takes them from; fetched when it is asked for."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer_server.calibration.workflow import Calibration

__all__ = ["Calibration"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from infer_server.calibration import workflow
    return getattr(workflow, name)
