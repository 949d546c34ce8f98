"""Caches of a test run: engines are kept in its own folder, compiled kernels in pytest's cache, not in the user's.

All workers of a run share the folder of kernels, and the next run finds those whose code has not changed: an entry's
key is all that LLVM's output depends on. `--cache-clear` removes them; $INFER_OBJECT_CACHE names another folder, or
disables the cache ("off").

Where $PYTHONDONTWRITEBYTECODE keeps the checkout free of bytecode, each of the hundreds of processes that tests start
would compile all modules. They keep bytecode in pytest's cache, too.

Builds compile in the test's own process: the workers of a run use all processors already, and starting a pool of
compilers takes longer than most builds of small models.
"""
from __future__ import annotations

import gc
import os
import sys
import tempfile
from contextlib import suppress
from importlib import import_module

import pytest

from infer_server.engines.codegen import compiler_pool
from infer_server.engines.machine.object_cache import VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    """Set the cache folders before any test builds; subprocesses and pytest-xdist's workers inherit them."""
    gc.disable()        # until all tests are collected: importing makes little garbage
    os.environ.pop("KUBERNETES_SERVICE_HOST", None)     # set where tests run in a cluster, and changes defaults
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")     # of workers, which use all processors already
    os.environ["XDG_CACHE_HOME"] = _temporary_folder(config)
    os.environ.setdefault("MPLCONFIGDIR", _kept_folder(config, "matplotlib"))       # its list of fonts takes a second
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = _kept_folder(config, "kernels")
    compiler_pool.ENOUGH = 1 << 60      # no build has so much text: none starts a pool
    if sys.dont_write_bytecode and os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ["PYTHONPYCACHEPREFIX"] = _kept_folder(config, "bytecode")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return one worker more than processors, because tests wait for servers and other processes."""
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None         # pytest-xdist reads it
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each of pytest-xdist's workers import its share of the modules first: it compiles them for the others, too.

    All workers collect the same modules in the same order, and would each compile all of them at the same time.
    """
    worker, count = (os.environ.get(f"PYTEST_XDIST_WORKER{what}", "") for what in ("", "_COUNT"))
    if not worker:
        return
    config = session.config
    folders = [path for name in config.args if (path := config.invocation_params.dir / name).is_dir()]
    paths = sorted({path.relative_to(config.rootpath) for folder in folders for path in folder.rglob("test_*.py")})
    for path in paths[int(worker.removeprefix("gw"))::int(count)]:
        with suppress(Exception, pytest.skip.Exception):        # collection reports them
            import_module(".".join(path.with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Exclude modules and tests from garbage collection: passes over millions of live objects free nothing."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000)       # builds make many objects and few cycles


def _kept_folder(config: pytest.Config, name: str) -> str:
    """Return a folder in pytest's cache, or a temporary one if pytest runs without it."""
    if getattr(config, "cache", None) is None:
        return _temporary_folder(config)
    folder = config.cache.mkdir(name)
    folder.chmod(0o700)             # the object cache refuses a folder that others may write to
    return str(folder)


def _temporary_folder(config: pytest.Config) -> str:
    folder = tempfile.TemporaryDirectory(prefix="infer-server-tests-")
    config.add_cleanup(folder.cleanup)
    return folder.name
