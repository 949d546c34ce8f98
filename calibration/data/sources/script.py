"""A user's function: script.py:function, called without arguments for each pass over the data, yields feeds."""
from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibration.data.items import CalibrationData, Feed, Input, batched_inputs, split_items
from engines.errors import CalibrationError


def from_script(source: str, inputs: Sequence[Input]) -> CalibrationData:
    """The items that the function yields, as dicts {input: array of one or many items}; their number is not known.

    Raises CalibrationError: no such script or function, it fails, or it yields what is not the model's inputs.
    """
    function = _function(source)

    def read() -> Iterator[Feed]:
        for number, feed in enumerate(_guarded(source, function)):
            if not isinstance(feed, Mapping):
                raise CalibrationError(f"{source}: feed {number} is a {type(feed).__name__}; "
                                       "yield dicts {input name: array}")
            arrays = {name: np.asarray(value) for name, value in feed.items()}
            yield from split_items(f"{source}: feed {number}", arrays, inputs)

    return CalibrationData(source, read, None, batched_inputs(inputs))


def _function(source: str) -> Callable[[], Iterable[Any]]:
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
    function = getattr(module, name, None)
    if not callable(function):
        raise CalibrationError(f"calibration script {path} has no function '{name}'")
    return function     # type: ignore[no-any-return]


def _guarded(source: str, function: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """What the function yields; what goes wrong in it is told as its fault."""
    try:
        yield from function()
    except Exception as error:      # whatever the user's code raises
        raise CalibrationError(f"{source} failed: {type(error).__name__}: {error}") from error
