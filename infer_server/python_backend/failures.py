"""Convert errors between the server's exceptions and the codes of pb_utils.TritonError."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infer_server.errors import (
    CancelledError,
    ExecutionError,
    ExistsError,
    InvalidRequestError,
    NotServedError,
    ServeError,
    UnavailableError,
    UnexplainedError,
    UnknownModelError,
)
from infer_server.protocol.redaction import redacted

_ERRORS: dict[int, type[ServeError]] = {
    0: UnexplainedError, 1: ExecutionError, 2: UnknownModelError, 3: InvalidRequestError, 4: UnavailableError,
    5: NotServedError, 6: ExistsError, 7: CancelledError}
_INTERNAL = 1


def error_head(error: Exception) -> dict[str, Any]:
    """Return the head of the message that answers a model's call with an error."""
    code = next((code for code, kind in _ERRORS.items() if isinstance(error, kind)), _INTERNAL)
    return {"final": True, "error": str(error) or type(error).__name__, "code": code}


def error_of(head: Mapping[str, Any]) -> ServeError:
    """Return the exception for the error in the head of a model's response, without paths of this machine."""
    return _ERRORS[head["code"]](redacted(escape_surrogates(head["error"])))


def escape_surrogates(text: object) -> str:
    """Return a text with lone surrogates escaped, which may occur in file names and which no protocol can encode."""
    return str(text).encode(errors="backslashreplace").decode()
