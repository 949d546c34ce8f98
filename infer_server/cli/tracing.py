"""infer-server's options about tracing, which are Triton's: into files, or to a collector of OpenTelemetry."""
from __future__ import annotations

import argparse
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from infer_server.errors import InvalidRequestError
from infer_server.observing import spans, trace_settings
from infer_server.observing.spans import SpanSettings
from infer_server.observing.trace_settings import TraceSettings, number
from infer_server.observing.traces import LEVELS, OFF, TENSORS, TIMESTAMPS

_MODES = (trace_settings.MODE, spans.MODE)
# Triton's older options -> what each says of --trace-config.
_OLDER = {"trace-file": "triton,file", "trace-level": "level", "trace-rate": "rate", "trace-count": "count",
          "trace-log-frequency": "triton,log-frequency"}
_FORMER_LEVELS = {"MIN": TIMESTAMPS, "MAX": TIMESTAMPS}
# Setting -> (the field of TraceSettings, the least that it may be).
_NUMBERS = {"rate": ("rate", 0), "count": ("count", -1), "triton,log-frequency": ("log_frequency", 0)}


def add_tracing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace-config", action="append", default=[], metavar="SETTING",
                        help="level=TIMESTAMPS or TENSORS, with triton,file=FILE: traces of inferences, in a file of "
                             "JSON; rate=N: of one request in N (default 1000); count=N: of so many; "
                             "triton,log-frequency=N: so many in each of FILE.0, FILE.1, ...; mode=opentelemetry: "
                             "spans for a collector, of one request in N whose client does not say (0: of none of "
                             "these), with opentelemetry,url=URL, opentelemetry,resource=KEY=VALUE; level=OFF; can be "
                             "repeated")
    for option, setting in _OLDER.items():
        parser.add_argument(f"--{option}", dest="trace_config", action="append", type=partial(_said, setting),
                            help=argparse.SUPPRESS)


def tracing_of(given: argparse.Namespace) -> SpanSettings | TraceSettings | None:
    """None: nothing is traced, nor can be. Raises ValueError."""
    try:
        return parsed(given.trace_config)
    except (ValueError, InvalidRequestError) as error:
        raise ValueError(f"--trace-config {error}") from error


def parsed(texts: list[str]) -> SpanSettings | TraceSettings | None:
    """What --trace-config says, each as Triton has it. Raises ValueError, InvalidRequestError."""
    said = [(setting, value) for setting, _, value in (text.partition("=") for text in texts)]
    of_spans, of_files, levels = SpanSettings(), TraceSettings(), list[str]()
    for setting, value in said:
        if setting == "level":
            levels.append(_level(value))
        elif setting == "triton,file":
            of_files = replace(of_files, file=value)
        elif setting in _NUMBERS:
            name, least = _NUMBERS[setting]
            field: dict[str, Any] = {name: number(f"'{setting}'", value, least)}
            of_files = replace(of_files, **field)
        elif setting.startswith(f"{spans.MODE},"):
            of_spans = _of_spans(of_spans, setting, value)
        elif setting != "mode" or value not in _MODES:
            raise ValueError(f"{setting}={value}: expected mode={' or '.join(_MODES)}, level, rate, count, "
                             f"triton,file, triton,log-frequency, {spans.MODE},url or {spans.MODE},resource")
    wanted = () if OFF in levels else tuple(level for level in LEVELS if level in levels)
    if _mode(said) == trace_settings.MODE:
        return _of_files(replace(of_files, levels=wanted))
    if levels and not wanted:
        return None
    return _checked(replace(of_spans, rate=of_files.rate, count=of_files.count), wanted)


def _said(setting: str, text: str) -> str:
    return f"{setting}={text}"


def _mode(said: list[tuple[str, str]]) -> str:
    """Triton's is the default, but where all that is said of one is said of the other."""
    of_modes = {setting.partition(",")[0] for setting, _ in said if "," in setting}
    return next((value for setting, value in reversed(said) if setting == "mode"),
                spans.MODE if of_modes == {spans.MODE} else trace_settings.MODE)


def _level(text: str) -> str:
    level = _FORMER_LEVELS.get(text.upper(), text.upper())
    if level not in (OFF, *LEVELS):
        raise ValueError(f"level={text}: expected {OFF}, {' or '.join(LEVELS)}")
    return level


def _of_spans(settings: SpanSettings, setting: str, value: str) -> SpanSettings:
    name = setting.partition(",")[2]
    if name == "url":
        return replace(settings, url=value if "://" in value else f"http://{value}")
    if name == "resource":
        key, _, of = value.partition("=")
        return replace(settings, resource={**settings.resource, key: of})
    raise ValueError(f"{setting}={value}: expected {spans.MODE},url=URL or {spans.MODE},resource=KEY=VALUE; the rest "
                     "is said by OpenTelemetry's own variables, OTEL_BSP_SCHEDULE_DELAY and its like")


def _of_files(settings: TraceSettings) -> TraceSettings | None:
    if reason := settings.why_not():
        raise ValueError(f"level={settings.levels[0]}: {reason}")
    if not settings.file:
        return None
    folder = Path(settings.file).absolute().parent
    if Path(settings.file).is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(f"triton,file={settings.file}: expected a file in a folder that can be written to")
    return settings


def _checked(settings: SpanSettings, levels: tuple[str, ...]) -> SpanSettings:
    if TENSORS in levels:
        raise ValueError(f"level={TENSORS}: spans have no tensors; write level={TIMESTAMPS}, or mode=triton and "
                         "triton,file=FILE")
    if not spans.is_installed():
        raise ValueError("OpenTelemetry is not installed: install infer-server[otel]")
    return settings
