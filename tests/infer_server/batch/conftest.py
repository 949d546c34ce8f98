from __future__ import annotations

from pathlib import Path

import pytest

from tests.infer_server.batch.models import CLASSES, plan_of

pytest.importorskip("pyarrow")


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a plan of CLASSES for batches of up to 4."""
    return plan_of(CLASSES, tmp_path_factory.mktemp("plan"), max_batch=4)
