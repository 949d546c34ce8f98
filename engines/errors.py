"""The errors a user can meet. Each says what is wrong, where, and what to do.

    EngineError
    ├── ModelError            an ONNX file that cannot be read or compiled
    │   └── UnknownValueError a shape follows from the value of inputs, which a build must be told
    ├── GraphError            a graph that breaks its own rules (our bug, or a bad pass)
    │   └── UnknownTensorError    a shape follows from the value of tensors that are not known before run time
    ├── ConfigError           options that make no sense, alone or together
    ├── CalibrationError      data or a table that cannot give ranges
    ├── CompilerFault         an exception that the compiler should not have raised, and the node it was at (our bug)
    ├── InputError            a feed that does not fit the engine
    └── PlanError             a plan file that cannot be used
        ├── PlanCorruptError  truncated, tampered with, or no plan at all
        ├── PlanVersionError  written by a newer (or too old) compiler
        └── PlanTargetError   made for a machine that this one is not
"""


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
    pass


class UnknownValueError(ModelError):
    """`inputs`: the graph's inputs whose values would have to be known."""

    def __init__(self, message: str, inputs: Iterable[str]) -> None:
        super().__init__(message)
        self.inputs = tuple(inputs)


class GraphError(EngineError):
    pass


class UnknownTensorError(GraphError):
    """`tensors`: those whose values would have to be known, of the graph that is being read."""

    def __init__(self, message: str, tensors: Iterable[str]) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class ConfigError(EngineError):
    pass


class CalibrationError(EngineError):
    pass


class CompilerFault(EngineError):
    pass


class InputError(EngineError):
    pass


class PlanError(EngineError):
    pass


class PlanCorruptError(PlanError):
    pass


class PlanVersionError(PlanError):
    pass


class PlanTargetError(PlanError):
    pass
