from __future__ import annotations

import pytest

from engines import schedule


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny chunks that count as late at once: most of what a bad day brings, all the time."""
    monkeypatch.setattr(schedule, "SHORTEST_US", 1e-3)
    monkeypatch.setattr(schedule, "CHUNK_US", 0.2)
    monkeypatch.setattr(schedule, "LATE_FACTOR", 0.5)
    monkeypatch.setattr(schedule, "LATE_SLACK_US", 0.0)
