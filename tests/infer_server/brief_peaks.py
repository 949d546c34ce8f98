"""Peaks of the machine in little time, for tests that do not compare them."""
from __future__ import annotations

import pytest

from infer_server.engines.backends.llvm.tuning import peaks


def measure_briefly(patch: pytest.MonkeyPatch) -> None:
    """Measure each loop in one round instead of eight, and reads from main memory in 16 MiB instead of 256 MiB."""
    patch.setattr(peaks, "ROUNDS", 1)
    patch.setattr(peaks, "MOST_BYTES", 1 << 24)
