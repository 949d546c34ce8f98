from __future__ import annotations

import pytest

from engines.backends.llvm.runtime import chunks


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny chunks that count as late at once: most of what a bad day brings, all the time."""
    monkeypatch.setattr(chunks, "SHORTEST_US", 1e-3)
    monkeypatch.setattr(chunks, "CHUNK_US", 0.2)
    monkeypatch.setattr(chunks, "LATE_FACTOR", 0.5)
    monkeypatch.setattr(chunks, "LATE_SLACK_US", 0.0)
