"""Requests over gRPC whose tensors are in shared memory of this machine; the messages hold their offsets.

Inputs are written once, into one region that all requests read. Outputs need a place for each request in flight: places
are made when more of them are, of the sizes that the model's first answer had.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md
"""
from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from google.protobuf.message import DecodeError, Message

from infer_server.clients.calls import METHODS
from infer_server.clients.channels import StatusError
from infer_server.clients.codec import datatype_of, encode
from infer_server.clients.errors import ResponseError, ServerError, error_of
from infer_server.clients.load.transports.over_grpc import GrpcTransport
from infer_server.clients.load.transports.transport import (
    MAX_OPEN_DESCRIPTORS,
    SETUP_SECS,
    Feed,
    Send,
    Slots,
)
from infer_server.protos import inference as pb

_ALIGNMENT = 64


class SharedMemoryTransport(GrpcTransport):
    max_in_flight = MAX_OPEN_DESCRIPTORS

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._address = address
        self._slots = Slots(MAX_OPEN_DESCRIPTORS)
        self._regions: list[SharedMemory] = []
        self._named: list[str] = []                     # regions for which registration was sent, answered or not
        self._output_bytes: Mapping[str, int] = {}
        self._free: list[str] = []                      # regions for outputs that no request in flight has

    async def prepare(self, model: str, version: str, feeds: Sequence[Feed]) -> Sequence[Send]:
        contents = [{name: encode(array) for name, array in feed.items()} for feed in feeds]
        try:
            region = await self._new_region(
                sum(_aligned(len(raw)) for feed in contents for raw in feed.values()), SETUP_SECS)
        except StatusError as error:
            raise error_of(error.status, self._address, "SystemSharedMemoryRegister", error.details) from error
        requests, at, memory = [], 0, region.buf
        assert memory is not None, "it is open"
        for feed, raws in zip(feeds, contents, strict=True):
            request = pb.ModelInferRequest(model_name=model, model_version=version)
            for name, array in feed.items():
                tensor = request.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
                _set_region(tensor, region.name, at, len(raws[name]))
                memory[at:at + len(raws[name])] = raws[name]
                at += _aligned(len(raws[name]))
            requests.append(request)
        self._output_bytes = await self._sizes(requests[0])
        return [self._sender_of(request) for request in requests]

    async def close(self) -> None:
        for region in self._regions:
            _remove(region)
        await asyncio.gather(  # without errors: if the server has ended, so have its registrations
            *(self._control(pb.SystemSharedMemoryUnregisterResponse, pb.SystemSharedMemoryUnregisterRequest(name=name),
                            SETUP_SECS) for name in self._named), return_exceptions=True)
        await super().close()

    async def _control(self, kind: type[Message], request: Message, timeout: float) -> None:
        """Make a call whose answer is empty. Raises StatusError."""
        await self._channel.call(METHODS[kind].path, request.SerializeToString(), timeout)

    async def _sizes(self, request: pb.ModelInferRequest) -> dict[str, int]:
        """Infer once without shared memory and return each output's size in bytes; {} if the model fails.

        Raises ClientError if the server is unreachable or refuses the request.
        """
        try:
            answer = pb.ModelInferResponse.FromString(await self.infer(request.SerializeToString(), SETUP_SECS))
            return {output.name: len(raw)
                    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)}
        except StatusError as error:
            named = error_of(error.status, self._address, "ModelInfer", error.details)
            if isinstance(named, ServerError):
                return {}
            raise named from error
        except (DecodeError, ValueError) as error:
            raise ResponseError(f"{self._address}: ModelInfer: no bytes for each output: {error}") from error

    def _sender_of(self, request: pb.ModelInferRequest) -> Send:
        serialised: dict[str, bytes] = {}               # serialised requests by the region of their outputs

        async def send(timeout: float) -> None:
            async with self._slots.one(timeout):
                region = self._free.pop() if self._free else (
                    await self._new_region(sum(map(_aligned, self._output_bytes.values())), timeout)).name
                try:
                    if region not in serialised:
                        serialised[region] = self._with_outputs(request, region)
                    await self.infer(serialised[region], timeout)
                finally:
                    self._free.append(region)

        return send

    def _with_outputs(self, request: pb.ModelInferRequest, region: str) -> bytes:
        complete, at = pb.ModelInferRequest(), 0
        complete.CopyFrom(request)
        for name, count in self._output_bytes.items():
            _set_region(complete.outputs.add(name=name), region, at, count)
            at += _aligned(count)
        return complete.SerializeToString()

    async def _new_region(self, byte_size: int, timeout: float) -> SharedMemory:
        """Create a region and register it. Raises StatusError if there is no memory or the server refuses it."""
        await asyncio.sleep(0)              # users whose every region fails at once leave others their turn
        region = _make(max(1, byte_size))
        self._named.append(region.name)
        try:
            await self._control(pb.SystemSharedMemoryRegisterResponse, pb.SystemSharedMemoryRegisterRequest(
                name=region.name, key=f"/{region.name}", byte_size=region.size), timeout)
        except BaseException:
            _remove(region)
            raise
        self._regions.append(region)
        return region


def _make(byte_size: int) -> SharedMemory:
    """Create a region with posix_fallocate: a write to a sparse one raises SIGBUS when /dev/shm is full."""
    region = None
    try:
        region = SharedMemory(f"load-test-{secrets.token_hex(8)}", True, byte_size)
        with Path("/dev/shm", region.name).open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, byte_size)
    except OSError as error:
        if region:
            _remove(region)
        raise StatusError("RESOURCE_EXHAUSTED", f"{byte_size} bytes of shared memory: {error.strerror}") from error
    return region


def _remove(region: SharedMemory) -> None:
    region.close()
    region.unlink()


def _set_region(tensor: pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor,
                region: str, at: int, count: int) -> None:
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_offset"].int64_param = at
    tensor.parameters["shared_memory_byte_size"].int64_param = count


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
