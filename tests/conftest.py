"""Caches of a test run: engines are kept in its own folder, compiled kernels in pytest's cache, not in the user's.

All workers of a run share the folder of kernels, and the next run finds those whose code has not changed: an entry's
key is all that LLVM's output depends on. `--cache-clear` removes them; $INFER_OBJECT_CACHE names another folder, or
disables the cache ("off").

Where $PYTHONDONTWRITEBYTECODE keeps the checkout free of bytecode, each of the hundreds of processes that tests start
would compile all modules. They keep bytecode in pytest's cache, too.
"""
from __future__ import annotations

import os
import sys
import tempfile

import pytest

from infer_server.engines.machine.object_cache import VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    """Set the cache folders before any test builds; subprocesses and pytest-xdist's workers inherit them."""
    os.environ.pop("KUBERNETES_SERVICE_HOST", None)     # set where tests run in a cluster, and changes defaults
    os.environ["XDG_CACHE_HOME"] = _temporary_folder(config)
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = _kept_folder(config, "kernels")
    if sys.dont_write_bytecode and os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ["PYTHONPYCACHEPREFIX"] = _kept_folder(config, "bytecode")


def _kept_folder(config: pytest.Config, name: str) -> str:
    """Return a folder in pytest's cache, or a temporary one if pytest runs without it."""
    if config.cache is None:
        return _temporary_folder(config)
    folder = config.cache.mkdir(name)
    folder.chmod(0o700)             # the object cache refuses a folder that others may write to
    return str(folder)


def _temporary_folder(config: pytest.Config) -> str:
    folder = tempfile.TemporaryDirectory(prefix="infer-server-tests-")
    config.add_cleanup(folder.cleanup)
    return folder.name
