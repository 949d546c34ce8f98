"""Trace settings of all models and of single models: sampling and files.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_trace.md
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infer_server.errors import InvalidRequestError, NotServedError
from infer_server.observing.traces import LEVELS, OFF

MODE = "triton"
_MAX_NUMBER = (1 << 32) - 1
# Setting with a number: (field of TraceSettings, minimum).
_NUMBERS = {"trace_rate": ("rate", 0), "trace_count": ("count", -1), "log_frequency": ("log_frequency", 0)}


@dataclass(frozen=True)
class TraceSettings:
    """Settings of traces in files."""
    file: str = ""                      # path; "" if traces cannot be written to files
    levels: tuple[str, ...] = ()        # a subset of LEVELS; empty for no traces
    rate: int = 1000                    # trace one of `rate` requests; 0 for none
    count: int = -1                     # number of requests to trace; -1 for no limit
    log_frequency: int = 0              # number of traces in each of FILE.0, FILE.1, ...; 0 for all in FILE

    def why_not(self) -> str:
        """Return Triton's error message if the settings cannot be used; "" if they can."""
        if not self.levels:
            return ""
        if not self.rate:
            return "sample rate must be non-zero"
        return "" if self.file else ("trace file name is not given; start the server with --trace-config "
                                     "triton,file=FILE")

    def texts(self) -> dict[str, list[str]]:
        """Return the settings as clients see them."""
        return {"trace_level": list(self.levels) or [OFF], "trace_rate": [str(self.rate)],
                "trace_count": [str(self.count)], "log_frequency": [str(self.log_frequency)],
                "trace_file": [self.file], "trace_mode": [MODE]}


@dataclass(eq=False)
class Sampler:
    """Sampler of the requests that settings apply to, with their unwritten traces."""
    settings: TraceSettings
    is_retired: bool = False                        # True after its settings were replaced
    open: int = 0                                   # number of traces of requests that have not ended
    ended: list[Any] = field(default_factory=list)  # traces that are not written yet
    tensor_bytes: int = 0                           # size of the tensors in `ended`

    def __post_init__(self) -> None:
        self.remaining = self.settings.count
        self._seen = 0

    def sample(self) -> bool:
        """Return True if the next request is traced, and count it."""
        if not self.settings.levels or not self.remaining or not self.settings.rate:
            return False
        self._seen += 1
        if self._seen % self.settings.rate:
            return False
        if self.remaining > 0:
            self.remaining -= 1
        self.open += 1
        return True

    def now(self) -> TraceSettings:
        return replace(self.settings, count=self.remaining)


class SettingsByModel:
    """Trace settings by model, which default to those of all models, and these to the command line's."""

    def __init__(self, initial: TraceSettings, retired: Callable[[Sampler], None]) -> None:
        """Begin with settings for all models; `retired` is called with each sampler that is replaced or removed."""
        self._initial, self._retired = initial, retired
        self._overrides: dict[str, dict[str, Any]] = {"": {}}   # fields by model; "" for all models
        self._samplers = {"": Sampler(initial)}

    def of(self, model: str) -> Sampler:
        return self._samplers.get(model) or self._samplers[""]

    def all(self) -> list[Sampler]:
        return list(self._samplers.values())

    def update(self, model: str, settings: Mapping[str, Sequence[str]]) -> None:
        """Change settings of a model; one without values becomes the default again.

        Raises ServeError without a change.
        """
        overrides = {name: dict(fields) for name, fields in self._overrides.items()}
        for name, sampler in self._samplers.items():
            if "count" in overrides[name]:
                overrides[name]["count"] = sampler.remaining
        override = overrides.setdefault(model, {})
        for setting, values in settings.items():
            name, value = _parsed(setting, list(values))
            override.pop(name, None)
            if values:
                override[name] = value
        self._change(model, {name: fields for name, fields in overrides.items() if fields or not name})

    def _change(self, changed: str, overrides: dict[str, dict[str, Any]]) -> None:
        """Replace the overrides and the samplers of the changed model, or all samplers for ""."""
        of_all = replace(self._initial, **overrides[""]) if not changed else self._samplers[""].now()
        settings = {name: replace(of_all, **fields) if name else of_all for name, fields in overrides.items()}
        affected = {changed} if changed else overrides.keys()
        for name in affected & overrides.keys():
            if reason := settings[name].why_not():
                raise InvalidRequestError(f"Attempting to set invalid trace setting :{reason}")
        self._overrides = overrides
        for name in sorted(affected | (self._samplers.keys() - overrides.keys())):
            if former := self._samplers.pop(name, None):
                former.is_retired = True
                self._retired(former)
            if name in overrides:
                self._samplers[name] = Sampler(settings[name])


def _parsed(setting: str, values: list[str]) -> tuple[str, Any]:
    """Return the field of TraceSettings and its value. Raises NotServedError or InvalidRequestError."""
    if setting == "trace_file":
        raise NotServedError("trace file location can not be updated through network protocol")
    if setting == "trace_level":
        if OFF in values and values != [OFF]:
            raise InvalidRequestError("Expect only one trace level 'OFF' is specified")
        if unknown := set(values) - {OFF, *LEVELS}:
            raise InvalidRequestError(f"unknown trace level '{min(unknown)}'; expected {OFF}, {', '.join(LEVELS)}")
        return "levels", tuple(level for level in LEVELS if level in values)
    if setting not in _NUMBERS:
        raise InvalidRequestError(f"unknown trace setting '{setting}'; expected trace_level, {', '.join(_NUMBERS)}")
    name, least = _NUMBERS[setting]
    return name, number(f"'{setting}'", values[0], least) if values else None


def number(name: str, text: str, least: int) -> int:
    """Parse an integer of at least `least`. Raises InvalidRequestError with Triton's message."""
    try:
        value = int(text)
    except ValueError:
        raise InvalidRequestError(f"Unable to parse {name}, got: {text}") from None
    if not least <= value <= _MAX_NUMBER:
        raise InvalidRequestError(f"Unable to parse {name}, value is out of range [ {least}, {_MAX_NUMBER} ], got: "
                                  f"{text}")
    return value
