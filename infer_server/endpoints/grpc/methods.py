"""The methods that the gRPC port serves, by path."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import protos
from infer_server.endpoints.grpc.context import Serve

if TYPE_CHECKING:
    from infer_server.endpoints.grpc.service.infer_calls import InferCalls

INFER_PATH = f"/{protos.INFERENCE_SERVICE}/ModelInfer"


@dataclass(frozen=True)
class Methods:
    """The calls of a gRPC port.

    find : returns the call for a path such as "/inference.GRPCInferenceService/ServerLive"; None if there is none.
    infer : takes ModelInfer without a coroutine, for the transports that can; None: `find` serves it.
    """
    find: Callable[[str], Serve | None]
    infer: InferCalls | None = None
