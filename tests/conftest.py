"""Caches of a test run: engines and compiled kernels are kept in its own folders, not in the user's cache.

All workers of the run share the folder of kernels, since different tests compile the same code. $INFER_OBJECT_CACHE, if
set, names another folder, or disables it ("off").
"""
from __future__ import annotations

import os
import tempfile

import pytest

from infer_server.engines.machine.object_cache import VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    """Set the cache folders before any test builds; subprocesses and pytest-xdist's workers inherit them."""
    os.environ.pop("KUBERNETES_SERVICE_HOST", None)     # set where tests run in a cluster, and changes defaults
    for variable in ("XDG_CACHE_HOME", VARIABLE):
        if variable == VARIABLE and os.environ.get(VARIABLE):
            continue
        folder = tempfile.TemporaryDirectory(prefix="infer-server-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ[variable] = folder.name
