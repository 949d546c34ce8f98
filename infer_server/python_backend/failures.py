"""Errors on their way between a Python model and the server: as the codes of pb_utils.TritonError."""
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


def refusal(error: Exception) -> dict[str, Any]:
    """The head of the answer to a model that asked for what failed."""
    code = next((code for code, kind in _ERRORS.items() if isinstance(error, kind)), _INTERNAL)
    return {"final": True, "error": str(error) or type(error).__name__, "code": code}


def error_of(head: Mapping[str, Any]) -> ServeError:
    """Return the error in the head of a model's response, without paths of this machine."""
    return _ERRORS[head["code"]](redacted(legible(head["error"])))


def legible(text: object) -> str:
    """A text of a model's, for people: halves of surrogate pairs, as in names of files, are none in any protocol."""
    return str(text).encode(errors="backslashreplace").decode()
