"""Which requests are traced, and which file a trace goes to: of all models, and of one.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_trace.md
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infer_server.errors import InvalidRequestError, NotServedError
from infer_server.observing.traces import LEVELS, OFF

MODE = "triton"
_MOST = (1 << 32) - 1
# Setting -> (the field of TraceSettings, the least that it may be); trace_level has words.
_NUMBERS = {"trace_rate": ("rate", 0), "trace_count": ("count", -1), "log_frequency": ("log_frequency", 0)}


@dataclass(frozen=True)
class TraceSettings:
    file: str = ""                      # "": nothing can be traced into files
    levels: tuple[str, ...] = ()        # of LEVELS; none: nothing is traced
    rate: int = 1000                    # one of so many requests is; 0: none
    count: int = -1                     # so many more are; -1: any number
    log_frequency: int = 0              # so many traces are in each of the files FILE.0, FILE.1, ...; 0: all in FILE

    def why_not(self) -> str:
        """Why nothing can be traced like this, in Triton's words; "": it can be, or is not to be."""
        if not self.levels:
            return ""
        if not self.rate:
            return "sample rate must be non-zero"
        return "" if self.file else ("trace file name is not given; start the server with --trace-config "
                                     "triton,file=FILE")

    def texts(self) -> dict[str, list[str]]:
        """As clients see them."""
        return {"trace_level": list(self.levels) or [OFF], "trace_rate": [str(self.rate)],
                "trace_count": [str(self.count)], "log_frequency": [str(self.log_frequency)],
                "trace_file": [self.file], "trace_mode": [MODE]}


@dataclass(eq=False)
class Sampler:
    """Of the requests that settings are for: which are traced, and the traces that are not written yet."""
    settings: TraceSettings
    is_retired: bool = False                        # other settings have taken its place
    open: int = 0                                   # traces of requests that have not ended
    ended: list[Any] = field(default_factory=list)
    tensor_bytes: int = 0                           # that these keep

    def __post_init__(self) -> None:
        self.remaining = self.settings.count
        self._seen = 0

    def takes(self) -> bool:
        """Whether the next request is traced."""
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
    """What is not said of a model is as for all models, and what is not said of all is as on the command line."""

    def __init__(self, initial: TraceSettings, retired: Callable[[Sampler], None]) -> None:
        """retired: told of a sampler in whose place there is another, or none."""
        self._initial, self._retired = initial, retired
        self._said: dict[str, dict[str, Any]] = {"": {}}        # by model; "": of all
        self._samplers = {"": Sampler(initial)}

    def of(self, model: str) -> Sampler:
        return self._samplers.get(model) or self._samplers[""]

    def all(self) -> list[Sampler]:
        return list(self._samplers.values())

    def update(self, model: str, settings: Mapping[str, Sequence[str]]) -> None:
        """No value: it is said no longer. Raises ServeErrors, and changes nothing then."""
        said = {name: dict(fields) for name, fields in self._said.items()}
        for name, sampler in self._samplers.items():
            if "count" in said[name]:
                said[name]["count"] = sampler.remaining
        mine = said.setdefault(model, {})
        for setting, values in settings.items():
            name, value = _parsed(setting, list(values))
            mine.pop(name, None)
            if values:
                mine[name] = value
        self._change(model, {name: fields for name, fields in said.items() if fields or not name})

    def _change(self, changed: str, said: dict[str, dict[str, Any]]) -> None:
        """Takes what is said now; counts of other models than the changed one go on, if it is one."""
        of_all = replace(self._initial, **said[""]) if not changed else self._samplers[""].now()
        settings = {name: replace(of_all, **fields) if name else of_all for name, fields in said.items()}
        affected = {changed} if changed else said.keys()
        for name in affected & said.keys():
            if reason := settings[name].why_not():
                raise InvalidRequestError(f"Attempting to set invalid trace setting :{reason}")
        self._said = said
        for name in sorted(affected | (self._samplers.keys() - said.keys())):
            if former := self._samplers.pop(name, None):
                former.is_retired = True
                self._retired(former)
            if name in said:
                self._samplers[name] = Sampler(settings[name])


def _parsed(setting: str, values: list[str]) -> tuple[str, Any]:
    """The field of TraceSettings, and its value. Raises NotServedError, InvalidRequestError."""
    if setting == "trace_file":
        raise NotServedError("trace file location can not be updated through network protocol")
    if setting == "trace_level":
        if OFF in values and values != [OFF]:
            raise InvalidRequestError("Expect only one trace level 'OFF' is specified")
        if unknown := set(values) - {OFF, *LEVELS}:
            raise InvalidRequestError(f"there is no trace level '{min(unknown)}'; there are {OFF}, {', '.join(LEVELS)}")
        return "levels", tuple(level for level in LEVELS if level in values)
    if setting not in _NUMBERS:
        raise InvalidRequestError(f"there is no trace setting '{setting}' to be updated; there are trace_level, "
                                  f"{', '.join(_NUMBERS)}")
    name, least = _NUMBERS[setting]
    return name, number(f"'{setting}'", values[0], least) if values else None


def number(what: str, text: str, least: int) -> int:
    """Raises InvalidRequestError, in Triton's words."""
    try:
        value = int(text)
    except ValueError:
        raise InvalidRequestError(f"Unable to parse {what}, got: {text}") from None
    if not least <= value <= _MOST:
        raise InvalidRequestError(f"Unable to parse {what}, value is out of range [ {least}, {_MOST} ], got: {text}")
    return value
