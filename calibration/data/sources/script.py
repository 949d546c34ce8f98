"""Calibration data from a user's function, script.py:function, called for each pass over the data; it yields feeds."""
from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from infer_server.calibration.data.sources.feeds import Feeds
from infer_server.engines.errors import CalibrationError


def is_script(source: str) -> bool:
    """Return True if a source has the form script.py:function and is not the path of a file."""
    return ".py:" in source and not Path(source).exists()


def feeds_of_script(source: str) -> Feeds:
    """Return the function of a script, which should yield dicts {input: array of one or many items}.

    Raises CalibrationError if there is no such script or function. Calling the function raises it if its code fails.
    """
    return partial(_guarded, source, function_of(source))


def function_of(source: str) -> Callable[..., Any]:
    """Return the function that script.py:function names. Raises CalibrationError if there is none."""
    path, _, name = source.rpartition(":")
    if not Path(path).is_file():
        raise CalibrationError(f"calibration script {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"calibration_script_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:      # whatever the user's code raises
        raise CalibrationError(f"calibration script {path} failed: {type(error).__name__}: {error}") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None or not callable(function):
        raise CalibrationError(f"calibration script {path} has no function '{name}'")
    return function


def _guarded(source: str, function: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Yield what the function yields; convert its exceptions to CalibrationError."""
    try:
        yield from function()
    except Exception as error:      # whatever the user's code raises
        raise CalibrationError(f"{source} failed: {type(error).__name__}: {error}") from error
