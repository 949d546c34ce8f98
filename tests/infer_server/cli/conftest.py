from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infer_server.brief_peaks import measure_briefly
from tests.infer_server.cli.commands import Workshop


@pytest.fixture
def workshop(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))      # tests build the same, and mean to build it
    return Workshop(tmp_path, capsys)


@pytest.fixture(scope="package", autouse=True)
def brief_peaks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        measure_briefly(patch)
        yield
