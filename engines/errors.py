"""The errors a user can meet. Each says what is wrong, where, and what to do.

    EngineError
    ├── ModelError            an ONNX file that cannot be read or compiled
    ├── GraphError            a graph that breaks its own rules (our bug, or a bad pass)
    ├── ConfigError           options that make no sense, alone or together
    ├── CalibrationError      data or a table that cannot give ranges
    ├── InputError            a feed that does not fit the engine
    └── PlanError             a plan file that cannot be used
        ├── PlanCorruptError  truncated, tampered with, or no plan at all
        ├── PlanVersionError  written by a newer (or too old) compiler
        └── PlanTargetError   made for a machine that this one is not
"""


class EngineError(Exception):
    """The root: catch this to catch everything that is not a bug of ours."""


class ModelError(EngineError):
    pass


class GraphError(EngineError):
    pass


class ConfigError(EngineError):
    pass


class CalibrationError(EngineError):
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
