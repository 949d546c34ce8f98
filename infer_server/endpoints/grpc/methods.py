"""Methods that the gRPC port serves, by path."""
from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from infer_server import protos
from infer_server.endpoints.grpc.compression import plain
from infer_server.endpoints.grpc.context import CallContext, Serve, unary
from infer_server.endpoints.grpc.infer_reply import AwaitedInfer, InferReply
from infer_server.endpoints.inflight import Inflight

INFER_PATH = f"/{protos.INFERENCE_SERVICE}/ModelInfer"


class TakesInfer(Protocol):
    """Interface of the handler that serves ModelInfer without a coroutine: InferCalls."""

    def take(self, reply: InferReply, data: bytes, received_ns: int, remaining_secs: float | None) -> None:
        """Submit a serialised ModelInferRequest; `reply` gets its response or error.

        reply.open_call counts the bytes of `data` if they arrived in pieces; else they are counted here.
        remaining_secs: seconds until the client's deadline; None if it has none.
        """


@dataclass(frozen=True)
class Methods:
    """Calls of a gRPC port.

    find : returns the call for a path such as "/inference.GRPCInferenceService/ServerLive"; None if there is none.
    infer : serves ModelInfer without a coroutine, for transports that support that; None: `find` serves it.
    load_report : returns the serialised load report, for responses of ModelInfer to clients that ask for it.
    """
    find: Callable[[str], Serve | None]
    infer: TakesInfer | None = None
    load_report: Callable[[], bytes] | None = None


def awaiting(takes: TakesInfer, inflight: Inflight, max_message_bytes: int) -> Serve:
    """Return a coroutine for ModelInfer, for transports that serve all calls by coroutines."""
    async def infer(data: bytes, context: CallContext) -> bytes:
        received_ns, remaining_secs = time.monotonic_ns(), context.time_remaining()
        reply = AwaitedInfer(context)
        open_call = reply.open_call = inflight.begin(reply, len(data))
        context.when_done(partial(inflight.end, open_call))
        data = await plain(data, max_message_bytes, inflight, open_call)
        takes.take(reply, data, received_ns, remaining_secs)
        try:
            response = await reply.response
        except asyncio.CancelledError:
            reply.leave()
            raise
        inflight.answered(open_call, len(response))
        return response
    return unary(infer)
