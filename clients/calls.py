"""The calls of inference.GRPCInferenceService: their paths, and their answers or errors."""
from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

import protos
from clients.channels import StatusError
from clients.errors import ClientError, ResponseError, error_of

Response = TypeVar("Response", bound=Message)
METHODS = {method.response: method for method in protos.methods(protos.INFERENCE_SERVICE)}


def parse(kind: type[Response], data: bytes, url: str) -> Response:
    """Return the message of a response. Raises ResponseError."""
    try:
        response: Response = kind.FromString(data)
        return response
    except DecodeError as error:
        raise ResponseError(f"{url}: {METHODS[kind].name}: the answer is not a {kind.__name__}: {error}") from error


def error_from_status(error: StatusError, url: str, kind: type[Message]) -> ClientError:
    """Build the named error for a call that is answered by messages of this class."""
    return error_of(error.status, url, METHODS[kind].name, error.details)
