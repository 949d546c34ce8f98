"""A request on its way through the server. It ends exactly once: answered, failed, refused, expired or cancelled."""
from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


@dataclass(slots=True, eq=False)
class Request:
    """One inference, of some items."""
    inputs: Arrays                              # views of the received message: copied once, into the batch slots
    items: int                                  # items on the batch axis; 1 for a model without one
    shape_key: Hashable                         # the shapes of one item
    encode: Callable[[Arrays], bytes]           # its items of the outputs -> its response; on an instance's thread
    answer: asyncio.Future[bytes]               # completed on the event loop only
    timeout_us: int = 0                         # in the queue, as asked for by the client; 0: the model's default

    received_ns: int = 0                        # set by the endpoint
    deadline_ns: int = 0                        # by the endpoint, too: when its client gives up; 0: never
    enqueued_ns: int = 0                        # the rest by the batcher
    expires_ns: int = 0                         # when its timeout in the queue ends; 0: never

    def finish(self, result: bytes | Exception) -> None:
        """Completes the request's answer, on the event loop; nothing happens if the request was cancelled."""
        if self.answer.done():
            return
        if isinstance(result, Exception):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


Outcome = tuple[Request, bytes | Exception]
