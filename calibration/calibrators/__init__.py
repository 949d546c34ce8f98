"""Registry of calibrators by the name for --calibrator. A new one needs a module and a line here."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Protocol

from infer_server.calibration.calibrators.entropy import Entropy
from infer_server.calibration.calibrators.minmax import MinMax
from infer_server.calibration.calibrators.mse import MeanSquaredError
from infer_server.calibration.calibrators.percentile import Percentile
from infer_server.calibration.histogram import Histogram, Range
from infer_server.engines.errors import ConfigError, did_you_mean

__all__ = ["CALIBRATORS", "Calibrator", "Range", "make_calibrator"]


class Calibrator(Protocol):
    """Interface of a calibrator: an immutable rule that derives a tensor's quantisation range from its histogram."""

    def range(self, histogram: Histogram) -> Range:
        """Return (low, high) for a tensor, low <= 0 <= high; both are 0 if all values are 0."""
        ...


CALIBRATORS: Mapping[str, type[Calibrator]] = MappingProxyType({
    "entropy": Entropy,
    "percentile": Percentile,
    "minmax": MinMax,
    "mse": MeanSquaredError,
})


def make_calibrator(text: str) -> Calibrator:
    """Return the calibrator that `text` names; "percentile:99.9" sets its parameter.

    Raises ConfigError if there is no such calibrator, it has no parameter, or the value is invalid.
    """
    name, colon, value = text.partition(":")
    if name not in CALIBRATORS:
        raise ConfigError(f"no calibrator '{name}'{did_you_mean(name, CALIBRATORS)}")
    factory = CALIBRATORS[name]
    if not colon:
        return factory()
    parameters = [parameter.name for parameter in fields(factory)]     # type: ignore[arg-type]
    if not parameters:
        raise ConfigError(f"calibrator '{text}': {name} has no parameter to set; write '{name}'")
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"calibrator '{text}': '{value}' is not a number; write for instance "
                          f"'{name}:{getattr(factory(), parameters[0])}'") from None
    return factory(**{parameters[0]: number})
