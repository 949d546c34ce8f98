from __future__ import annotations

from typing import Any

import pytest

from infer_server.engines.backends.llvm.runtime import chunks, workers
from infer_server.engines.backends.llvm.runtime.execution import time_steps

LEAST_SECS = 1e-7       # least time of a step in a schedule: shorter steps would not be divided among threads


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use tiny chunks that count as late at once, which provokes every rare interleaving of threads."""
    def measured(*args: Any, **options: Any) -> list[float]:
        return [max(secs, LEAST_SECS) for secs in time_steps(*args, **options)]

    monkeypatch.setattr(workers, "time_steps", measured)
    monkeypatch.setattr(chunks, "SHORTEST_US", 1e-3)
    monkeypatch.setattr(chunks, "LEAST_SAVED_US", 1e-3)
    monkeypatch.setattr(chunks, "CHUNK_US", 0.2)
    monkeypatch.setattr(chunks, "LATE_FACTOR", 0.5)
    monkeypatch.setattr(chunks, "LATE_SLACK_US", 0.0)
