"""The errors a user can meet. Each says what is wrong, where, and what to do.

    EngineError
    ├── ModelError ── UnknownValueError
    ├── GraphError ── UnknownTensorError
    ├── ConfigError ── NoKernelError
    ├── CalibrationError, InputError, CompilerFault
    └── PlanError ── PlanCorruptError, PlanVersionError, PlanTargetError
"""
from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: "; did you mean 'size'?", or all that is known if none is near."""
    from difflib import get_close_matches  # here, for serving imports this module and hardly ever errs
    known = list(known)
    if near := get_close_matches(name, known, n=1):
        return f"; did you mean '{near[0]}'?"
    return f"; known are {', '.join(known)}"


class EngineError(Exception):
    """The root: catch this to catch everything that the compiler and the engine raise on purpose."""


class ModelError(EngineError):
    """An ONNX file cannot be read or compiled."""


class UnknownValueError(ModelError):
    """A shape follows from the value of `inputs`, inputs of the graph: a build must be told them. `node`: its first
    output."""

    def __init__(self, message: str, inputs: Iterable[str], node: str = "") -> None:
        super().__init__(message)
        self.inputs, self.node = tuple(inputs), node


class GraphError(EngineError):
    """A graph breaks its own rules: our bug, or a bad pass."""


class UnknownTensorError(GraphError):
    """A shape follows from the value of `tensors`, which are not known before run time."""

    def __init__(self, message: str, tensors: Iterable[str]) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class ConfigError(EngineError):
    """Options make no sense, alone or together."""


class NoKernelError(ConfigError):
    """The target cannot run a node; another target may."""


class CalibrationError(EngineError):
    """Ranges cannot be had from the calibration data or the table."""


class CompilerFault(EngineError):
    """The compiler raised an exception that it should not have (our bug); the message names the node it was at."""


class InputError(EngineError):
    """A feed does not fit the engine."""


class PlanError(EngineError):
    """A plan file cannot be used."""


class PlanCorruptError(PlanError):
    """The plan file is truncated, tampered with, or no plan at all."""


class PlanVersionError(PlanError):
    """The plan was written by a newer (or too old) compiler."""


class PlanTargetError(PlanError):
    """The plan was made for a machine that this one is not."""
