from __future__ import annotations

from pathlib import Path

import pytest

from tests.infer_server.cli.commands import Workshop


@pytest.fixture
def workshop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Workshop:
    return Workshop(tmp_path, capsys)
