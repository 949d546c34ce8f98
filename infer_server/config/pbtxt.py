"""config.pbtxt: a model's configuration as text, read with errors that name file, line and the nearest field."""
from __future__ import annotations

import re
from pathlib import Path

from google.protobuf import text_format

from infer_server.config.config import nearest
from infer_server.errors import ModelConfigError
from protos import model_config

_UNKNOWN_FIELD = re.compile(r'Message type "inference\.(?P<type>[\w.]+)" has no field named "(?P<name>\w+)"')


def read_config(path: Path) -> model_config.ModelConfig:
    """Parses a config.pbtxt. Raises ModelConfigError."""
    message = model_config.ModelConfig()
    try:
        text_format.Parse(path.read_text(encoding="utf-8"), message)
    except text_format.ParseError as error:
        line = error.GetLine()
        hint = _hint(str(error))
        # The parser's own text begins with line:column; the place is given once, as compilers do.
        what = re.sub(r"^\d+(:\d+)? : ", "", str(error))
        raise ModelConfigError(f"{path}:{line}: {what}{hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{path}: {error}") from error
    return message


def _hint(error: str) -> str:
    match = _UNKNOWN_FIELD.search(error)
    if not match:
        return ""
    message = model_config.ModelConfig.DESCRIPTOR.file
    first, *nested = match["type"].split(".")
    descriptor = message.message_types_by_name[first]
    for name in nested:
        descriptor = descriptor.nested_types_by_name[name]
    return nearest(match["name"], descriptor.fields_by_name)
