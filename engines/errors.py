"""The errors a user can meet. Each says what is wrong, where, and what to do.

    EngineError
    ├── ModelError ── UnknownValueError
    ├── GraphError ── UnknownTensorError
    ├── ConfigError ── NoKernelError
    ├── InputError ── CapacityError
    ├── CalibrationError, CompilerFault
    └── PlanError ── PlanCorruptError, PlanVersionError, PlanTargetError
"""
from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: "; did you mean 'size'?", or all known names."""
    from difflib import get_close_matches  # imported here because serving rarely needs it
    known = list(known)
    if near := get_close_matches(name, known, n=1):
        return f"; did you mean '{near[0]}'?"
    return f"; known are {', '.join(known)}"


class EngineError(Exception):
    """Base class of all errors that the compiler and the engine raise on purpose."""


class ModelError(EngineError):
    """An ONNX file cannot be read or compiled."""


class UnknownValueError(ModelError):
    """A shape depends on the values of graph inputs, which the build must be given.

    inputs: their names. node: first output of the node that needs them.
    """

    def __init__(self, message: str, inputs: Iterable[str], node: str = "") -> None:
        super().__init__(message)
        self.inputs, self.node = tuple(inputs), node


class GraphError(EngineError):
    """A graph violates an invariant: a bug of the compiler or of a pass."""


class UnknownTensorError(GraphError):
    """A shape depends on the values of `tensors`, which are known at run time only."""

    def __init__(self, message: str, tensors: Iterable[str]) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class ConfigError(EngineError):
    """An option is invalid or contradicts another."""


class NoKernelError(ConfigError):
    """The target has no kernel for a node; another target may."""


class CalibrationError(EngineError):
    """Ranges cannot be obtained from the calibration data or table."""


class CompilerFault(EngineError):
    """Unexpected exception in the compiler, a bug; the message names the node being compiled."""


class InputError(EngineError):
    """Inputs do not match those that the engine declares."""


class CapacityError(InputError):
    """Tokens exceed the capacity of a context's caches."""


class PlanError(EngineError):
    """A plan file cannot be used."""


class PlanCorruptError(PlanError):
    """The plan file is truncated, altered, or not a plan."""


class PlanVersionError(PlanError):
    """The plan has the format of another version of the compiler."""


class PlanTargetError(PlanError):
    """The plan cannot run on this machine, and cannot be compiled again for it."""
