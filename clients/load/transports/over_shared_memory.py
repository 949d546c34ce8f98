"""Requests over gRPC whose tensors lie in shared memory of this machine: the messages say where.

Inputs are written once, into one region that all requests read. Outputs need a place for each request in flight: places
are made when more of them are, of the sizes that the model's first answer had.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md
"""
from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory

import grpc

from clients.calls import bind, channel_options
from clients.codec import datatype_of, encode
from clients.errors import error_of
from clients.load.transports.over_grpc import GrpcTransport
from clients.load.transports.transport import SETUP_SECS, Feed, NotAnsweredError, Send
from protos import inference as pb

_ALIGNMENT = 64


class SharedMemoryTransport(GrpcTransport):
    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._address = address
        self._control = grpc.aio.insecure_channel(address, options=channel_options())
        self._register = bind(self._control, pb.SystemSharedMemoryRegisterResponse)
        self._unregister = bind(self._control, pb.SystemSharedMemoryUnregisterResponse)
        self._regions: list[SharedMemory] = []
        self._output_bytes: Mapping[str, int] = {}
        self._free: list[str] = []                      # regions for outputs that no request in flight has

    async def prepare(self, model: str, version: str, feeds: Sequence[Feed]) -> Sequence[Send]:
        contents = [{name: encode(array) for name, array in feed.items()} for feed in feeds]
        region = await self._new_region(sum(_aligned(len(raw)) for feed in contents for raw in feed.values()))
        requests, at, memory = [], 0, region.buf
        assert memory is not None, "it is open"
        for feed, raws in zip(feeds, contents, strict=True):
            request = pb.ModelInferRequest(model_name=model, model_version=version)
            for name, array in feed.items():
                tensor = request.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
                _place(tensor, region.name, at, len(raws[name]))
                memory[at:at + len(raws[name])] = raws[name]
                at += _aligned(len(raws[name]))
            requests.append(request)
        self._output_bytes = await self._sizes(requests[0])
        return [self._sender_of(request) for request in requests]

    async def close(self) -> None:
        for region in self._regions:
            with suppress(grpc.aio.AioRpcError):        # where the server is gone, its regions are
                await self._unregister(pb.SystemSharedMemoryUnregisterRequest(name=region.name), timeout=SETUP_SECS)
            region.close()
            region.unlink()
        await self._control.close()
        await super().close()

    async def _sizes(self, request: pb.ModelInferRequest) -> dict[str, int]:
        """The bytes of each output, of an answer in a message. Raises a ClientError; where the model fails on the
        request, none."""
        try:
            answer = pb.ModelInferResponse.FromString(await self.infer(request.SerializeToString(), SETUP_SECS))
        except NotAnsweredError as error:
            raise error_of(error.status, self._address, "ModelInfer", error.details) from error
        return {output.name: len(raw) for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)}

    def _sender_of(self, request: pb.ModelInferRequest) -> Send:
        serialised: dict[str, bytes] = {}               # by the region of the outputs

        async def send(timeout: float) -> None:
            place = self._free.pop() if self._free else (
                await self._new_region(sum(map(_aligned, self._output_bytes.values())))).name
            try:
                if place not in serialised:
                    serialised[place] = self._with_outputs(request, place)
                await self.infer(serialised[place], timeout)
            finally:
                self._free.append(place)

        return send

    def _with_outputs(self, request: pb.ModelInferRequest, region: str) -> bytes:
        complete, at = pb.ModelInferRequest(), 0
        complete.CopyFrom(request)
        for name, count in self._output_bytes.items():
            _place(complete.outputs.add(name=name), region, at, count)
            at += _aligned(count)
        return complete.SerializeToString()

    async def _new_region(self, byte_size: int) -> SharedMemory:
        """Raises a ClientError: the server takes none."""
        region = SharedMemory(f"load-test-{secrets.token_hex(8)}", True, max(1, byte_size))
        try:
            await self._register(pb.SystemSharedMemoryRegisterRequest(
                name=region.name, key=f"/{region.name}", byte_size=region.size), timeout=SETUP_SECS)
        except grpc.aio.AioRpcError as error:
            region.close()
            region.unlink()
            raise error_of(error.code().name, self._address, "SystemSharedMemoryRegister", error.details()) from error
        self._regions.append(region)
        return region


def _place(tensor: pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor,
           region: str, at: int, count: int) -> None:
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_offset"].int64_param = at
    tensor.parameters["shared_memory_byte_size"].int64_param = count


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
