"""The messages of protos/*.proto, built at import from their serialised descriptors in a descriptor pool of our own.

protobuf's default pool admits one definition of a full name in a process, and tritonclient registers the same names
there (`inference.ModelInferRequest`, ...). A pool of our own lets Triton's client and this server live together. It
also frees us from generated Python, which is tied to the protobuf release that generated it; descriptors are not.
"""
from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

DESCRIPTORS = "descriptors.binpb"       # a FileDescriptorSet, written by scripts/generate_protos.py


@dataclass(frozen=True)
class Method:
    """Method of a gRPC service."""
    name: str                           # "ModelInfer"
    path: str                           # "/inference.GRPCInferenceService/ModelInfer"
    request: type[Message]
    response: type[Message]
    client_streaming: bool
    server_streaming: bool


@functools.cache
def pool() -> descriptor_pool.DescriptorPool:
    """Return the pool of all descriptors that protos/*.proto define."""
    made = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name(DESCRIPTORS).read_bytes())
    for file in files.file:             # dependencies come first
        made.AddSerializedFile(file.SerializeToString())
    return made


def definitions(proto: str) -> Mapping[str, Any]:
    """Return the message classes, enums and enum values at the top level of a file, as "health.proto"."""
    file = pool().FindFileByName(proto)
    found: dict[str, Any] = {}
    for name, message in file.message_types_by_name.items():
        found[name] = message_factory.GetMessageClass(message)
    for name, enum in file.enum_types_by_name.items():
        found[name] = EnumTypeWrapper(enum)
        found.update((value.name, value.number) for value in enum.values)
    return found


def methods(service: str) -> tuple[Method, ...]:
    """Return the methods of a service, e.g. "inference.GRPCInferenceService", in the order of its .proto."""
    return tuple(
        Method(method.name, f"/{service}/{method.name}",
               message_factory.GetMessageClass(method.input_type), message_factory.GetMessageClass(method.output_type),
               method.client_streaming, method.server_streaming)
        for method in pool().FindServiceByName(service).methods)
