"""The errors of serving. Endpoints map each class to a status of their protocol; the message is for the client.

    ServeError
    ├── InvalidRequestError       what was sent does not fit the protocol or the model
    │   └── MalformedMessageError its bytes are not a message of the protocol at all
    ├── UnknownModelError         no model (or version) of that name in the repository
    ├── UnknownServiceError       no gRPC service of that name, whose health was asked for
    ├── UnavailableError          known, but not now: loading, unloading, failed to load, draining
    │   ├── QueueFullError        max_queue_size requests wait already
    │   └── RequestExpiredError   its timeout passed while it waited
    ├── DeadlineExceededError     its client's deadline passed, or is so near that no execution ends before it
    ├── MemoryLimitError          the server holds as much of requests and answers as it may
    ├── NotServedError            a part of the protocol that this server does not implement
    ├── ExecutionError            the engine failed
    └── RepositoryError           a model that cannot be loaded; the message is the reason that the index shows
        └── ModelConfigError      its config.pbtxt is wrong, or does not fit the model
"""


class ServeError(Exception):
    """The root: whatever a client or the owner of a repository can be told."""


class InvalidRequestError(ServeError):
    pass


class MalformedMessageError(InvalidRequestError):
    pass


class UnknownModelError(ServeError):
    pass


class UnknownServiceError(ServeError):
    pass


class UnavailableError(ServeError):
    pass


class QueueFullError(UnavailableError):
    pass


class RequestExpiredError(UnavailableError):
    pass


class DeadlineExceededError(ServeError):
    pass


class MemoryLimitError(ServeError):
    pass


class NotServedError(ServeError):
    pass


class ExecutionError(ServeError):
    pass


class RepositoryError(ServeError):
    pass


class ModelConfigError(RepositoryError):
    pass
