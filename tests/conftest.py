"""For every test: engines that are built by default are kept in a folder of this run, not in the user's cache."""
from __future__ import annotations

import os
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Before any test or fixture builds; subprocesses inherit it."""
    folder = tempfile.TemporaryDirectory(prefix="infer-server-tests-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_CACHE_HOME"] = folder.name
