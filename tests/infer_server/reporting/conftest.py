"""Fixture: peaks of the machine are measured in little time."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.infer_server.brief_peaks import measure_briefly


@pytest.fixture(scope="package", autouse=True)
def brief_peaks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        measure_briefly(patch)
        yield
