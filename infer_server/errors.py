"""Errors of serving. Endpoints map each class to a status of their protocol; the message is for the client.

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
    """Base class of errors that clients or the owner of a repository may see."""


class InvalidRequestError(ServeError):
    """Raised if a request does not match the protocol or the model."""


class ContentTypeError(InvalidRequestError):
    """Raised if the content type of an HTTP body is not accepted."""


class MalformedMessageError(InvalidRequestError):
    """Raised if the received bytes are not a message of the protocol."""


class UnknownRegionError(InvalidRequestError):
    """Raised if no shared memory region is registered under a name."""


class RegionExistsError(InvalidRequestError):
    """Raised if a shared memory region is already registered under a name."""


class UnopenedRegionError(InvalidRequestError):
    """Raised if shared memory cannot be opened; client and server may not share a namespace."""


class UnknownModelError(ServeError):
    """Raised if the repository has no such model or version."""


class UnknownServiceError(ServeError):
    """Raised if the health of an unknown gRPC service is requested."""


class RestrictedError(ServeError):
    """Raised if a call needs a secret that the client did not send."""


class UnavailableError(ServeError):
    """Raised if a model cannot answer now: it is loading, unloading or draining, or has failed to load."""

    @staticmethod
    def closed(model: str) -> UnavailableError:
        """Return the error for a model that accepts no more requests."""
        return UnavailableError(
            f"model '{model}' takes no more requests: it is being unloaded, or the server is stopping")


class QueueFullError(UnavailableError):
    """Raised if max_queue_size requests already wait."""


class RequestExpiredError(UnavailableError):
    """Raised if the timeout of a request passed while it waited."""


class DeadlineExceededError(ServeError):
    """Raised if the client's deadline has passed, or would pass before an execution ends."""


class SlowMessageError(DeadlineExceededError):
    """A message arrives more slowly than the minimum rate."""


class MemoryLimitError(ServeError):
    """Raised if the requests and responses in memory have reached the limit."""


class TooLargeError(MemoryLimitError):
    """Raised if a request exceeds a size limit, so that a retry fails, too."""


class NotServedError(ServeError):
    """Raised for a part of the protocol that this server does not implement."""


class ExecutionError(ServeError):
    """Raised if the engine failed."""


class UnexplainedError(ServeError):
    """Raised if a Python model failed a request with the code UNKNOWN."""


class ExistsError(ServeError):
    """Raised if a Python model failed a request with the code ALREADY_EXISTS."""


class CancelledError(ServeError):
    """Raised if a Python model cancelled a request."""


class RepositoryError(ServeError):
    """Raised if a model cannot be loaded; the repository index shows the message."""


class ModelConfigError(RepositoryError):
    """Raised if a config.pbtxt is invalid or contradicts the model. Each argument is a reason."""

    def __str__(self) -> str:
        return "; ".join(self.args)


class NotBuiltError(RepositoryError):
    """Raised if a model cannot be built for a target that lacks a kernel; another target may have it."""
    STATUS = 3      # exit status of build-engine for this error


class FetchError(RepositoryError):
    """Raised if a model could not be copied from remote storage; a retry may succeed."""


class UnreachableError(FetchError):
    """Raised if remote storage does not answer, or refuses this server."""
