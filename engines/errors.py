"""The errors a user can meet. Each says what is wrong, where, and what to do."""
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
    """An ONNX file that cannot be read or compiled."""


class UnknownValueError(ModelError):
    """A shape follows from the values of `inputs`, inputs of the graph, which a build must be told."""

    def __init__(self, message: str, inputs: Iterable[str]) -> None:
        super().__init__(message)
        self.inputs = tuple(inputs)


class GraphError(EngineError):
    """A graph that breaks its own rules (our bug, or a bad pass)."""


class UnknownTensorError(GraphError):
    """A shape follows from the values of `tensors`, of the graph that is read, which are not known before run time."""

    def __init__(self, message: str, tensors: Iterable[str]) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class ConfigError(EngineError):
    """Options that make no sense, alone or together."""


class CalibrationError(EngineError):
    """Data or a table that cannot give ranges."""


class CompilerFault(EngineError):
    """An exception that the compiler should not have raised, and the node it was at (our bug)."""


class InputError(EngineError):
    """A feed that does not fit the engine."""


class PlanError(EngineError):
    """A plan file that cannot be used."""


class PlanCorruptError(PlanError):
    """A plan that is truncated, tampered with, or no plan at all."""


class PlanVersionError(PlanError):
    """A plan written by a newer (or too old) compiler."""


class PlanTargetError(PlanError):
    """A plan made for a machine that this one is not."""
