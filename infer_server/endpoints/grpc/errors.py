"""Mapping from errors to gRPC statuses."""
from __future__ import annotations

import logging
from itertools import accumulate
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from infer_server import errors
from infer_server.endpoints.grpc.compression import plain_control
from infer_server.errors import MalformedMessageError, ServeError, TooLargeError
from infer_server.protocol.redaction import public_text

log = logging.getLogger(__name__)
Request = TypeVar("Request", bound=Message)


class GrpcStatusError(Exception):
    """Raised for a call that has ended with a gRPC status other than OK.

    Attributes
    ----------
    code : grpc.StatusCode
        Status of the call.
    details : str
        Message for the client.
    """

    def __init__(self, code: int, details: str) -> None:
        super().__init__(details)
        self.code, self.details = _CODES[code], details


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

# Triton's statuses, so that clients retry the calls that they would retry with Triton.
_STATUS: dict[type[ServeError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownRegionError: grpc.StatusCode.NOT_FOUND,
    errors.RegionExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.UnopenedRegionError: grpc.StatusCode.INTERNAL,
    errors.UnknownModelError: grpc.StatusCode.NOT_FOUND,
    errors.UnknownServiceError: grpc.StatusCode.NOT_FOUND,
    errors.RestrictedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.MemoryLimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotServedError: grpc.StatusCode.UNIMPLEMENTED,
    errors.ExecutionError: grpc.StatusCode.INTERNAL,
    errors.UnexplainedError: grpc.StatusCode.UNKNOWN,
    errors.ExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.CancelledError: grpc.StatusCode.CANCELLED,
    errors.RepositoryError: grpc.StatusCode.INVALID_ARGUMENT,
}

_MAX_REQUEST_BYTES = 256 << 10          # limit of messages other than inference, which protobuf expands up to 20 times
_MAX_BYTES = 6000               # limit of a status message, in metadata of 8 KiB


def status_of(error: ServeError) -> grpc.StatusCode:
    """Return the status of an error: that of its nearest base class that has one."""
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


def parsed(message: type[Request], data: bytes, max_bytes: int = _MAX_REQUEST_BYTES) -> Request:
    """Parse a message, which may be compressed.

    Raises MalformedMessageError, InvalidRequestError, MemoryLimitError, or TooLargeError.
    """
    try:
        data = plain_control(data)
        if len(data) > max_bytes:
            raise TooLargeError(f"a {message.DESCRIPTOR.name} of {len(data)} bytes; it may have {max_bytes}")
        return message.FromString(data)
    except DecodeError as error:
        raise MalformedMessageError(f"not a {message.DESCRIPTOR.name}: {error}") from error


def described(error: Exception, peer: str) -> tuple[grpc.StatusCode, str]:
    """Return the status and message that end a call; log unexpected exceptions and malformed messages."""
    if isinstance(error, GrpcStatusError):
        return error.code, error.details
    if not isinstance(error, ServeError):       # a bug: the client gets the class only, the log has the rest
        log.error("a call failed", exc_info=error)
        return grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}"
    if isinstance(error, MalformedMessageError):        # not sent by clients of the protocol
        log.warning("%s: %s", peer, error)
    return status_of(error), _clipped(public_text(error))


def _clipped(text: str) -> str:
    """Shorten a message to the size of metadata that gRPC clients accept by default."""
    if len(text) <= _MAX_BYTES and text.isascii() and text.isprintable() and "%" not in text:
        return text
    sizes = accumulate(map(_escaped_bytes, text[:_MAX_BYTES]))
    most = sum(size <= _MAX_BYTES for size in sizes)
    return text if most == len(text) else f"{text[:most]} ..."


def _escaped_bytes(character: str) -> int:
    """Return the bytes of a character in gRPC metadata, which percent-encodes all but printable ASCII."""
    return 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode(errors="replace"))
