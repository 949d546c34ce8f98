"""Parse config.pbtxt, protobuf's text format, with errors that name the line and the nearest field."""
from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from google.protobuf import text_format

from infer_server.errors import ModelConfigError
from infer_server.protos import model_config

_UNKNOWN_FIELD = re.compile(r'Message type "inference\.(?P<type>[\w.]+)" has no field named "(?P<name>\w+)"')


def read_config(path: Path) -> model_config.ModelConfig:
    """Parse a config.pbtxt. Raises ModelConfigError."""
    message = model_config.ModelConfig()
    try:
        text_format.Parse(path.read_text(encoding="utf-8"), message)
    except text_format.ParseError as error:
        line = error.GetLine()
        hint = _hint(str(error))
        # The parser's message begins with line:column; remove it, since the path has the line number.
        reason = re.sub(r"^\d+(:\d+)? : ", "", str(error))
        raise ModelConfigError(f"{path}:{line}: {reason}{hint}") from error
    except (OSError, ValueError) as error:          # ValueError e.g. for a number out of the range of an enum
        raise ModelConfigError(f"{path}: {error}") from error
    return message


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return " Did you mean 'x'?" for the known word nearest to `word`, or "" if none is similar."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def _hint(error: str) -> str:
    match = _UNKNOWN_FIELD.search(error)
    if not match:
        return ""
    file = model_config.ModelConfig.DESCRIPTOR.file
    first, *nested = match["type"].split(".")
    descriptor = file.message_types_by_name[first]
    for name in nested:
        descriptor = descriptor.nested_types_by_name[name]
    return nearest(match["name"], descriptor.fields_by_name)
