"""A request on its way through the server. It ends exactly once: answered, failed, refused, expired or cancelled."""
from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


@dataclass(slots=True, eq=False)
class Request:
    """One inference of some rows."""
    inputs: Arrays                              # views of the received message: copied once, into the batch slots
    rows: int                                   # items on the batch axis; 1 for a model without one
    shape_key: Hashable                         # the shapes of one item
    encode: Callable[[Arrays], bytes]           # its rows of the outputs -> its response; on an instance's thread
    answer: asyncio.Future[bytes]               # completed on the event loop only
    timeout_us: int = 0                         # as asked for by the client; 0: the model's default

    received_ns: int = 0                        # set by the endpoint
    enqueued_ns: int = 0                        # the rest by the batcher
    deadline_ns: int = 0                        # 0: none


Outcome = tuple[Request, bytes | Exception]


def finish(outcomes: Sequence[Outcome]) -> None:
    """Completes the answers of requests, on the event loop. One that was cancelled meanwhile has no reader left."""
    for request, result in outcomes:
        if request.answer.done():
            continue
        if isinstance(result, Exception):
            request.answer.set_exception(result)
        else:
            request.answer.set_result(result)
