"""Methods that the gRPC port serves, by path."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import protos
from infer_server.endpoints.grpc.context import Serve
from infer_server.endpoints.grpc.infer_reply import InferReply

INFER_PATH = f"/{protos.INFERENCE_SERVICE}/ModelInfer"


class TakesInfer(Protocol):
    """Interface of the handler that serves ModelInfer without a coroutine: InferCalls."""

    def take(self, reply: InferReply, data: bytes, received_ns: int, remaining_secs: float | None) -> None:
        """Submit a serialised ModelInferRequest; `reply` gets its response or error.

        reply.held counts the bytes of `data` if they arrived in pieces; else they are counted here.
        remaining_secs: seconds until the client's deadline; None if it has none.
        """


@dataclass(frozen=True)
class Methods:
    """Calls of a gRPC port.

    find : returns the call for a path such as "/inference.GRPCInferenceService/ServerLive"; None if there is none.
    infer : takes ModelInfer without a coroutine, for the transports that can; None: `find` serves it.
    """
    find: Callable[[str], Serve | None]
    infer: TakesInfer | None = None
