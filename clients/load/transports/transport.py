"""Interface of the transports of a load test: a model's metadata and statistics, and requests ready to be sent."""
from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from infer_server.clients.channels import StatusError
from infer_server.clients.codec import Array
from infer_server.protos import inference as pb

Feed = Mapping[str, Array]                      # a request's inputs by name
# Function that sends a request and waits at most that many seconds; returns the serialised response, if any. Raises
# StatusError.
Send = Callable[[float], Awaitable[bytes | None]]
SETUP_SECS = 30.0                               # timeout of calls that are not part of the load
MAX_OPEN_DESCRIPTORS = 512                      # requests in flight with a file descriptor each


class StartedSend(ABC):
    """Send that can do without a coroutine."""

    @abstractmethod
    def __call__(self, timeout: float) -> Awaitable[bytes | None]: ...

    @abstractmethod
    def start(self, timeout: float, done: Callable[[StatusError | None], None]) -> bool:
        """Send the request; `done` is called with the error, or None, when it has ended.

        Returns False if that requires a coroutine now: the request is not sent then.
        """


class Slots:
    """Limit on concurrent requests. The wait for a slot counts towards a request's timeout."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    @asynccontextmanager
    async def one(self, timeout: float) -> AsyncIterator[None]:
        """Hold a slot during the body. Raises StatusError on a timeout, and for an OSError in the body."""
        try:
            async with asyncio.timeout(timeout), self._free:
                yield
        except TimeoutError:
            raise StatusError("DEADLINE_EXCEEDED", f"no answer within {timeout:g} s") from None
        except OSError as error:
            raise StatusError("UNAVAILABLE", str(error)) from error


class Transport(ABC):
    """Transport of one event loop. Calls that are not part of the load raise ClientError."""
    max_in_flight: int | None = None        # requests; None: as many as are sent

    @abstractmethod
    async def metadata(self, model: str, version: str) -> pb.ModelMetadataResponse: ...

    @abstractmethod
    async def statistics(self, model: str, version: str) -> list[pb.ModelStatistics]: ...

    @abstractmethod
    async def prepare(self, model: str, version: str, feeds: Sequence[Feed]) -> Sequence[Send]:
        """Serialise requests with these inputs. Each may be in flight any number of times."""

    @abstractmethod
    async def close(self) -> None: ...
