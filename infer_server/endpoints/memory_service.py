"""The protocol's calls about shared memory: the host's, and that of GPUs."""
from __future__ import annotations

from infer_server.endpoints.cuda_memory import CudaRegion, register
from infer_server.endpoints.shared_memory import Regions, SystemRegion
from infer_server.protos import inference


class MemoryService:
    """Shared-memory calls of the protocol: one coroutine for each, of its name. They raise ServeErrors."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    async def SystemSharedMemoryStatus(
            self, request: inference.SystemSharedMemoryStatusRequest) -> inference.SystemSharedMemoryStatusResponse:
        status = inference.SystemSharedMemoryStatusResponse.RegionStatus
        return inference.SystemSharedMemoryStatusResponse(regions={
            region.name: status(name=region.name, key=region.key, offset=region.offset, byte_size=region.byte_size)
            for region in self._regions.registered(SystemRegion, request.name)})

    async def SystemSharedMemoryRegister(
            self, request: inference.SystemSharedMemoryRegisterRequest) -> inference.SystemSharedMemoryRegisterResponse:
        self._regions.register(request.name, request.key, request.offset, request.byte_size)
        return inference.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
            self, request: inference.SystemSharedMemoryUnregisterRequest
    ) -> inference.SystemSharedMemoryUnregisterResponse:
        self._regions.unregister(SystemRegion, request.name)
        return inference.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(
            self, request: inference.CudaSharedMemoryStatusRequest) -> inference.CudaSharedMemoryStatusResponse:
        status = inference.CudaSharedMemoryStatusResponse.RegionStatus
        return inference.CudaSharedMemoryStatusResponse(regions={
            region.name: status(name=region.name, device_id=region.device_id, byte_size=region.byte_size)
            for region in self._regions.registered(CudaRegion, request.name)})

    async def CudaSharedMemoryRegister(
            self, request: inference.CudaSharedMemoryRegisterRequest) -> inference.CudaSharedMemoryRegisterResponse:
        register(self._regions, request.name, request.raw_handle, request.device_id, request.byte_size)
        return inference.CudaSharedMemoryRegisterResponse()

    async def CudaSharedMemoryUnregister(
            self, request: inference.CudaSharedMemoryUnregisterRequest) -> inference.CudaSharedMemoryUnregisterResponse:
        if self._regions.registered(CudaRegion):
            self._regions.unregister(CudaRegion, request.name)
        return inference.CudaSharedMemoryUnregisterResponse()
