"""Calls of inference.GRPCInferenceService: their paths, responses and errors."""
from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from infer_server import protos
from infer_server.clients.channels import StatusError
from infer_server.clients.errors import ClientError, ResponseError, error_of

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
    """Return the client's error for a status of a call, named by the class of its response."""
    return error_of(error.status, url, METHODS[kind].name, error.details)
