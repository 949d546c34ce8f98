"""Options of weight-only quantisation: the type of the weights, their groups, and how rows are multiplied.

    build_engine("m.onnx", weight_only=WeightOnly("int4", group_size=32))
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infer_server.engines.errors import ConfigError, did_you_mean

TYPES = ("int8", "int4")
GROUP_SIZES = (32, 64, 128)
USUAL_GROUP = 32
ROWS_AS_MODEL, ROWS_AS_INT8 = 0, 4      # accuracy_level of MatMulNBits
PRECISIONS = ("fp32", "bf16", "fp16")   # precisions of the rest of the model


@dataclass(frozen=True)
class WeightOnly:
    """Weight-only quantisation of a float model: products read packed integers and compute in float.

    Attributes
    ----------
    type
        "int8": a byte a weight and a scale per output channel. "int4": half a byte, and a scale per group.
    group_size
        Number of INT4 weights of an output channel that share a scale: 32, 64 or 128; 0 is 32. They are consecutive
        along the reduction axis.
    accuracy_level
        That of MatMulNBits. 0: rows are float. 4: rows are rounded to 8 bits in groups like the weights, and integers
        are multiplied; INT4 only.

    Raises
    ------
    ConfigError
        A value is unknown, or does not go with INT8.
    """
    type: str
    group_size: int = 0
    accuracy_level: int = ROWS_AS_MODEL

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise ConfigError(f"--weight-only {self.type}: there is no such type of weights"
                              f"{did_you_mean(str(self.type), TYPES)}")
        if self.type == "int8" and self.group_size:
            raise ConfigError(f"--group-size {self.group_size}: INT8 weights have one scale per output channel; groups "
                              "are of --weight-only int4")
        if self.group_size not in (0, *GROUP_SIZES):
            raise ConfigError(f"--group-size {self.group_size}: a group has {', '.join(map(str, GROUP_SIZES))} weights")
        if self.accuracy_level not in (ROWS_AS_MODEL, ROWS_AS_INT8):
            raise ConfigError(f"--accuracy-level {self.accuracy_level}: it is {ROWS_AS_MODEL} (rows are float) or "
                              f"{ROWS_AS_INT8} (rows are rounded to 8 bits)")
        if self.type == "int8" and self.accuracy_level == ROWS_AS_INT8:
            raise ConfigError(f"--accuracy-level {ROWS_AS_INT8} is of --weight-only int4; to compute by INT8 rows and "
                              "weights, build with --int8 --calib")

    @property
    def bits(self) -> int:
        return 4 if self.type == "int4" else 8

    @property
    def group(self) -> int:
        """Number of weights with a scale; 0: all of an output channel."""
        return (self.group_size or USUAL_GROUP) if self.type == "int4" else 0

    @staticmethod
    def checked(value: object, precision: str) -> WeightOnly:
        """Return an option's value. Raise ConfigError for another type, or a precision that does not go with it."""
        if not isinstance(value, WeightOnly):
            raise ConfigError('weight_only is a WeightOnly, such as WeightOnly("int4"); this is a '
                              f"{type(value).__name__}")
        if precision not in PRECISIONS:
            raise ConfigError(f"--weight-only {value.type} leaves activations in float, and --{precision} decides "
                              "about their precision itself: give one of the two. --weight-only goes with --fp32, "
                              "--bf16 and --fp16")
        return value

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> WeightOnly | None:
        """Return the scheme of a plan with this metadata, or None."""
        report = metadata.get("weights")
        return WeightOnly(report["type"], report["group_size"], report["accuracy_level"]) if report else None
