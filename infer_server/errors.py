"""The errors of serving. Endpoints map each class to a status of their protocol; the message is for the client.

    ServeError
    ├── InvalidRequestError ── MalformedMessageError, ContentTypeError, UnknownRegionError, RegionExistsError,
    │                       UnopenedRegionError
    ├── UnavailableError ── QueueFullError, RequestExpiredError
    ├── RepositoryError ── ModelConfigError, FetchError, NotBuiltError
    ├── MemoryLimitError ── TooLargeError
    ├── DeadlineExceededError ── SlowMessageError
    └── UnknownModelError, UnknownServiceError, RestrictedError, NotServedError, ExecutionError, UnexplainedError,
        ExistsError, CancelledError
"""
from __future__ import annotations


class ServeError(Exception):
    """The root: whatever a client or the owner of a repository can be told."""


class InvalidRequestError(ServeError):
    """What was sent does not fit the protocol or the model."""


class ContentTypeError(InvalidRequestError):
    """The body of a call over HTTP is of a type that is not taken."""


class MalformedMessageError(InvalidRequestError):
    """The bytes that were sent are not a message of the protocol at all."""


class UnknownRegionError(InvalidRequestError):
    """No region of shared memory is registered under that name."""


class RegionExistsError(InvalidRequestError):
    """A region of shared memory is registered under that name already."""


class UnopenedRegionError(InvalidRequestError):
    """There is no shared memory of that name here: client and server may not see the same."""


class UnknownModelError(ServeError):
    """The repository has no model (or version) of that name."""


class UnknownServiceError(ServeError):
    """There is no gRPC service of that name, whose health was asked for."""


class RestrictedError(ServeError):
    """The call is only for clients that have a secret."""


class UnavailableError(ServeError):
    """The model is known, but cannot answer now: it is loading, unloading, draining, or failed to load."""

    @staticmethod
    def closed(model: str) -> UnavailableError:
        return UnavailableError(
            f"model '{model}' takes no more requests: it is being unloaded, or the server is stopping")


class QueueFullError(UnavailableError):
    """As many requests as max_queue_size wait already."""


class RequestExpiredError(UnavailableError):
    """The request's timeout passed while it waited."""


class DeadlineExceededError(ServeError):
    """The client's deadline passed, or is so near that no execution ends before it."""


class SlowMessageError(DeadlineExceededError):
    """A message arrives more slowly than the minimum rate."""


class MemoryLimitError(ServeError):
    """The server holds as much of requests and answers as it may."""


class TooLargeError(MemoryLimitError):
    """The request is larger than any may be: to repeat it does not help."""


class NotServedError(ServeError):
    """A part of the protocol that this server does not implement."""


class ExecutionError(ServeError):
    """The engine failed."""


class UnexplainedError(ServeError):
    """A Python model ended the request, and does not say of what kind that is."""


class ExistsError(ServeError):
    """What a Python model was to make is there already."""


class CancelledError(ServeError):
    """A Python model gave the request up."""


class RepositoryError(ServeError):
    """A model cannot be loaded; the message is the reason that the index shows."""


class ModelConfigError(RepositoryError):
    """A config.pbtxt is wrong, or does not fit the model. Its arguments are the reasons, each a text."""

    def __str__(self) -> str:
        return "; ".join(self.args)


class NotBuiltError(RepositoryError):
    """A model cannot be built for a target that has no kernel of a node; for another it may."""
    STATUS = 3      # that build-engine exits with then


class FetchError(RepositoryError):
    """A model could not be copied from where it is, which may go better the next time."""
