"""Access to TensorRT's Python module: TensorRT 10 and 11, or TensorRT-RTX, which share one interface.

Features that one of them lacks are detected by name (hasattr), never by version.
"""
from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

TARGETS = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}      # target and module name -> extra of the wheel


class LibraryMissing(Exception):
    """The library is not installed, or cannot be loaded here."""


def library(target: str) -> Any:
    """Import and return the module of a target. Raises LibraryMissing with the command that installs it."""
    try:
        return import_module(target)
    except (ImportError, OSError) as error:
        raise LibraryMissing(f"{target} is not installed ({error}): pip install 'infer-server[{TARGETS[target]}]'") \
            from error


class Message(NamedTuple):
    """Message of TensorRT's log."""
    severity: str       # VERBOSE, INFO, WARNING, ERROR, INTERNAL_ERROR
    text: str


def logger_of(module: Any) -> Any:
    """Return an ILogger that keeps every Message in its list `messages`."""
    class KeptMessages(module.ILogger):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.messages: list[Message] = []

        def log(self, severity: Any, text: str) -> None:
            self.messages.append(Message(str(severity).rpartition(".")[2], text))
    return KeptMessages()


def logged_errors(logger: Any) -> str:
    """Return up to three error messages of the log in one line."""
    errors = [message.text for message in logger.messages if message.severity in ("ERROR", "INTERNAL_ERROR")]
    return "; ".join(errors[:3]) or "no error in its log"
