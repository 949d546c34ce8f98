"""Tracing options of infer-server, as in Triton: to files, or to an OpenTelemetry collector."""
from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from infer_server.errors import InvalidRequestError
from infer_server.observing import spans, trace_settings
from infer_server.observing.spans import SpanSettings
from infer_server.observing.trace_settings import TraceSettings, number
from infer_server.observing.traces import LEVELS, OFF, TENSORS, TIMESTAMPS

_MODES = (trace_settings.MODE, spans.MODE)
# Triton's older options: setting of --trace-config that each stands for.
_OLDER = {"trace-file": "triton,file", "trace-level": "level", "trace-rate": "rate", "trace-count": "count",
          "trace-log-frequency": "triton,log-frequency"}
_FORMER_LEVELS = {"MIN": TIMESTAMPS, "MAX": TIMESTAMPS}
# Setting with a number: (field of TraceSettings, minimum).
_NUMBERS = {"rate": ("rate", 0), "count": ("count", -1), "triton,log-frequency": ("log_frequency", 0)}


def add_tracing(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument("--trace-config", action="append", default=[], metavar="SETTING",
                        help="trace setting; can be repeated. level=TIMESTAMPS or TENSORS with triton,file=FILE writes "
                             "traces to a JSON file; level=OFF disables tracing; rate=N traces one request in N "
                             "(default 1000); count=N traces N requests; triton,log-frequency=N writes N traces to "
                             "each of FILE.0, FILE.1, ...; mode=opentelemetry sends spans to a collector, with "
                             "opentelemetry,url=URL and opentelemetry,resource=KEY=VALUE; its rate applies to requests "
                             "without a client's span (0: none of these)")
    for option, setting in _OLDER.items():
        parser.add_argument(f"--{option}", dest="trace_config", action="append", type=f"{setting}={{}}".format,
                            help=argparse.SUPPRESS)


def tracing_of(options: argparse.Namespace) -> SpanSettings | TraceSettings | None:
    """Return the tracing settings of the options, or None if tracing is not enabled. Raises ValueError."""
    try:
        return parsed(options.trace_config)
    except (ValueError, InvalidRequestError) as error:
        raise ValueError(f"--trace-config {error}") from error


def parsed(texts: list[str]) -> SpanSettings | TraceSettings | None:
    """Parse the values of --trace-config in Triton's format. Raises ValueError or InvalidRequestError."""
    settings = [(setting, value) for setting, _, value in (text.partition("=") for text in texts)]
    span_settings, file_settings, levels = SpanSettings(), TraceSettings(), list[str]()
    for setting, value in settings:
        if setting == "level":
            levels.append(_level(value))
        elif setting == "triton,file":
            file_settings = replace(file_settings, file=value)
        elif setting in _NUMBERS:
            name, least = _NUMBERS[setting]
            field: dict[str, Any] = {name: number(f"'{setting}'", value, least)}
            file_settings = replace(file_settings, **field)
        elif setting.startswith(f"{spans.MODE},"):
            span_settings = _set_span_setting(span_settings, setting, value)
        elif setting != "mode" or value not in _MODES:
            raise ValueError(f"{setting}={value}: expected mode={' or '.join(_MODES)}, level, rate, count, "
                             f"triton,file, triton,log-frequency, {spans.MODE},url or {spans.MODE},resource")
    enabled = () if OFF in levels else tuple(level for level in LEVELS if level in levels)
    if _mode(settings) == trace_settings.MODE:
        return _checked_file(replace(file_settings, levels=enabled))
    if levels and not enabled:
        return None
    return _checked_spans(replace(span_settings, rate=file_settings.rate, count=file_settings.count), enabled)



def _mode(settings: list[tuple[str, str]]) -> str:
    """Return the last mode setting; by default Triton's mode, unless all mode-specific settings are OpenTelemetry's."""
    of_modes = {setting.partition(",")[0] for setting, _ in settings if "," in setting}
    return next((value for setting, value in reversed(settings) if setting == "mode"),
                spans.MODE if of_modes == {spans.MODE} else trace_settings.MODE)


def _level(text: str) -> str:
    level = _FORMER_LEVELS.get(text.upper(), text.upper())
    if level not in (OFF, *LEVELS):
        raise ValueError(f"level={text}: expected {OFF}, {' or '.join(LEVELS)}")
    return level


def _set_span_setting(settings: SpanSettings, setting: str, value: str) -> SpanSettings:
    name = setting.partition(",")[2]
    if name == "url":
        return replace(settings, url=value if "://" in value else f"http://{value}")
    if name == "resource":
        key, _, of = value.partition("=")
        return replace(settings, resource={**settings.resource, key: of})
    raise ValueError(f"{setting}={value}: expected {spans.MODE},url=URL or {spans.MODE},resource=KEY=VALUE; use "
                     "OpenTelemetry's own variables, such as OTEL_BSP_SCHEDULE_DELAY, for other settings")


def _checked_file(settings: TraceSettings) -> TraceSettings | None:
    if reason := settings.why_not():
        raise ValueError(f"level={settings.levels[0]}: {reason}")
    if not settings.file:
        return None
    folder = Path(settings.file).absolute().parent
    if Path(settings.file).is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(f"triton,file={settings.file}: expected a file in a folder that can be written to")
    return settings


def _checked_spans(settings: SpanSettings, levels: tuple[str, ...]) -> SpanSettings:
    if TENSORS in levels:
        raise ValueError(f"level={TENSORS}: spans have no tensors; write level={TIMESTAMPS}, or mode=triton and "
                         "triton,file=FILE")
    if not spans.is_installed():
        raise ValueError("OpenTelemetry is not installed: install infer-server[otel]")
    return settings
