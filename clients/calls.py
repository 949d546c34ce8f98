"""The calls of inference.GRPCInferenceService on a channel, synchronous or asyncio alike."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import protos

METHODS = {method.name: method for method in protos.methods(protos.INFERENCE_SERVICE)}
NO_LIMIT = -1


def channel_options(max_message_bytes: int = NO_LIMIT) -> list[tuple[str, int]]:
    """gRPC refuses messages over 4 MB unless told otherwise: seven pictures of 224x224."""
    return [("grpc.max_send_message_length", max_message_bytes), ("grpc.max_receive_message_length", max_message_bytes)]


def bind(channel: Any, name: str) -> Callable[..., Any]:
    """The call `name` ("ModelInfer") of a grpc.Channel or a grpc.aio.Channel."""
    method = METHODS[name]
    bound: Callable[..., Any] = channel.unary_unary(method.path, request_serializer=method.request.SerializeToString,
                                                    response_deserializer=method.response.FromString)
    return bound


def bind_raw(channel: Any, name: str) -> Callable[..., Any]:
    """As bind, for requests that are bytes already and responses that nobody parses."""
    bound: Callable[..., Any] = channel.unary_unary(METHODS[name].path)
    return bound
