"""TensorRT's Python module: that of TensorRT 10 and 11, or of TensorRT-RTX, which have one interface.

What one of them lacks is asked for by its name (hasattr), not by its version.
"""
from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

TARGETS = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}      # target and module -> the extra that has it


class LibraryMissing(Exception):
    """It is not installed, or does not load here."""


def library(target: str) -> Any:
    """The module. Raises LibraryMissing, with what to do."""
    try:
        return import_module(target)
    except (ImportError, OSError) as error:
        raise LibraryMissing(f"{target} is not installed ({error}): pip install 'infer-server[{TARGETS[target]}]'") \
            from error


class Message(NamedTuple):
    severity: str       # VERBOSE, INFO, WARNING, ERROR, INTERNAL_ERROR
    text: str


def logger_of(module: Any) -> Any:
    """A logger for all that the library makes, which keeps every Message in `messages`."""
    class Kept(module.ILogger):         # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.messages: list[Message] = []

        def log(self, severity: Any, text: str) -> None:
            self.messages.append(Message(str(severity).rpartition(".")[2], text))
    return Kept()


def said(logger: Any) -> str:
    """The errors that it was told, in a line."""
    errors = [message.text for message in logger.messages if message.severity in ("ERROR", "INTERNAL_ERROR")]
    return "; ".join(errors[:3]) or "it does not say why"
