"""The calls of inference.GRPCInferenceService on a channel, synchronous or asyncio alike."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

import protos
from protos import inference

Response = TypeVar("Response", bound=Message)
METHODS = {method.response: method for method in protos.methods(protos.INFERENCE_SERVICE)}
NO_LIMIT = -1


def channel_options(max_message_bytes: int = NO_LIMIT) -> list[tuple[str, int]]:
    """gRPC refuses messages over 4 MB unless told otherwise: seven pictures of 224x224."""
    return [("grpc.max_send_message_length", max_message_bytes), ("grpc.max_receive_message_length", max_message_bytes)]


def bind(channel: Any, response: type[Message]) -> Callable[..., Any]:
    """The call of a grpc.Channel or a grpc.aio.Channel that is answered by messages of this class."""
    method = METHODS[response]
    bound: Callable[..., Any] = channel.unary_unary(method.path, request_serializer=method.request.SerializeToString,
                                                    response_deserializer=method.response.FromString)
    return bound


def bind_raw_infer(channel: Any) -> Callable[..., Any]:
    """The call ModelInfer, for requests that are bytes already and responses that nobody parses."""
    bound: Callable[..., Any] = channel.unary_unary(METHODS[inference.ModelInferResponse].path)
    return bound
