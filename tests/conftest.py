"""For every test: engines that are built by default are kept in a folder of this run, not in the user's cache.

So are compiled kernels, in a folder that all workers of the run share: tests of unlike things compile the same texts.
$INFER_OBJECT_CACHE, if it is set, names another folder, or disables that ("off").
"""
from __future__ import annotations

import os
import tempfile

import pytest

from engines.machine.object_cache import VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    """Before any test or fixture builds; subprocesses, and the workers of pytest-xdist, inherit it."""
    for variable in ("XDG_CACHE_HOME", VARIABLE):
        if variable == VARIABLE and os.environ.get(VARIABLE):
            continue
        folder = tempfile.TemporaryDirectory(prefix="infer-server-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ[variable] = folder.name
