"""The protocol's calls about shared memory. Those about a GPU's answer as on a machine that has none."""
from __future__ import annotations

from infer_server.endpoints.shared_memory import Regions
from infer_server.errors import InvalidRequestError, UnknownRegionError
from protos import inference


class MemoryService:
    """One coroutine for each call, named as the call. They raise ServeErrors."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    async def SystemSharedMemoryStatus(
            self, request: inference.SystemSharedMemoryStatusRequest) -> inference.SystemSharedMemoryStatusResponse:
        status = inference.SystemSharedMemoryStatusResponse.RegionStatus
        return inference.SystemSharedMemoryStatusResponse(regions={
            region.name: status(name=region.name, key=region.key, offset=region.offset, byte_size=region.byte_size)
            for region in self._regions.registered(request.name)})

    async def SystemSharedMemoryRegister(
            self, request: inference.SystemSharedMemoryRegisterRequest) -> inference.SystemSharedMemoryRegisterResponse:
        self._regions.register(request.name, request.key, request.offset, request.byte_size)
        return inference.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
            self, request: inference.SystemSharedMemoryUnregisterRequest
    ) -> inference.SystemSharedMemoryUnregisterResponse:
        self._regions.unregister(request.name)
        return inference.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(
            self, request: inference.CudaSharedMemoryStatusRequest) -> inference.CudaSharedMemoryStatusResponse:
        if request.name:
            raise UnknownRegionError(f"Unable to find cuda shared memory region: '{request.name}'")
        return inference.CudaSharedMemoryStatusResponse()

    async def CudaSharedMemoryRegister(
            self, request: inference.CudaSharedMemoryRegisterRequest) -> inference.CudaSharedMemoryRegisterResponse:
        raise InvalidRequestError(
            f"failed to register CUDA shared memory region: '{request.name}', GPUs not supported")

    async def CudaSharedMemoryUnregister(
            self, request: inference.CudaSharedMemoryUnregisterRequest) -> inference.CudaSharedMemoryUnregisterResponse:
        return inference.CudaSharedMemoryUnregisterResponse()
