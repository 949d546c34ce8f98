"""Functions of GPU memory, pinned memory and copies."""
from __future__ import annotations

from ctypes import c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p

import numpy as np

from infer_server.engines.backends.cuda.runtime.structures import Handle, RowCopy
from infer_server.engines.ir.graph import Array
from scripts.testing.gpu.libcuda.library import CAPTURING, HANDLE, INVALID, MEMORY, Libcuda, Out, Refused, Stream, call
from scripts.testing.gpu.ptx.memory import BASE


@call(Out(c_size_t), Out(c_size_t))
def cuMemGetInfo_v2(cuda: Libcuda, free: c_size_t, whole: c_size_t) -> None:
    whole.value = len(cuda.memory.bytes)
    free.value = whole.value - sum(cuda.allocated.values())


@call(Out(c_ulonglong), c_size_t)
def cuMemAlloc_v2(cuda: Libcuda, address: c_ulonglong, size: int) -> None:
    if not size:
        raise Refused(INVALID)
    try:
        address.value = cuda.memory.allocate(size)
    except MemoryError as error:
        raise Refused(MEMORY) from error
    cuda.bytes_at(address.value, size)[:] = 0xA5        # garbage: fresh memory is uninitialised
    cuda.allocated[address.value] = size


@call(c_ulonglong, c_ubyte, c_size_t)
def cuMemsetD8_v2(cuda: Libcuda, address: int, value: int, size: int) -> None:
    target = cuda.bytes_at(address, size)
    cuda.stream(None).put(lambda: target.fill(value))


@call(c_ulonglong)
def cuMemFree_v2(cuda: Libcuda, address: int) -> None:
    if address not in cuda.allocated:
        raise Refused(INVALID)
    for stream in [each for each in cuda.objects.values() if isinstance(each, Stream)]:
        stream.finish()
    cuda.memory.take_back(address, cuda.allocated.pop(address))


@call(Out(c_void_p), c_size_t, c_uint)
def cuMemHostAlloc(cuda: Libcuda, address: c_void_p, size: int, flags: int) -> None:
    memory = np.full(size, 0xA5, np.uint8)
    address.value = memory.ctypes.data
    cuda.pinned[memory.ctypes.data] = memory


@call(c_void_p)
def cuMemFreeHost(cuda: Libcuda, address: int) -> None:
    if cuda.pinned.pop(address, None) is None:
        raise Refused(INVALID)


@call(c_ulonglong, c_void_p, c_size_t)
def cuMemcpyHtoD_v2(cuda: Libcuda, address: int, host: int, size: int) -> None:
    target, data = cuda.bytes_at(address, size), host_bytes(host, size).copy()
    cuda.copies["from the host"] += size
    cuda.stream(None).finish()
    cuda.stream(None).put(lambda: np.copyto(target, data))


@call(c_void_p, c_ulonglong, c_size_t)
def cuMemcpyDtoH_v2(cuda: Libcuda, host: int, address: int, size: int) -> None:
    cuda.stream(None).finish()
    cuda.copies["to the host"] += size
    host_bytes(host, size)[:] = cuda.bytes_at(address, size)


@call(Out(c_int), c_int, c_ulonglong, anywhere=True)
def cuPointerGetAttribute(cuda: Libcuda, value: c_int, attribute: int, address: int) -> None:
    if attribute != 9 or not 0 <= address - BASE < len(cuda.memory.owned) or not cuda.memory.owned[address - BASE]:
        raise Refused(INVALID)
    value.value = 0


@call(Out(c_ulonglong), Handle, c_uint)
def cuIpcOpenMemHandle_v2(cuda: Libcuda, address: c_ulonglong, handle: Handle, flags: int) -> None:
    if bytes(handle.reserved) not in cuda.shared or flags != 1:
        raise Refused(HANDLE)
    address.value = cuda.shared[bytes(handle.reserved)]
    cuda.opened.append(address.value)


@call(c_ulonglong)
def cuIpcCloseMemHandle(cuda: Libcuda, address: int) -> None:
    cuda.opened.remove(address)


@call(Out(c_ulonglong), Out(c_size_t), c_ulonglong)
def cuMemGetAddressRange_v2(cuda: Libcuda, begin: c_ulonglong, size: c_size_t, address: int) -> None:
    begin.value, size.value = address, cuda.allocated[address]


@call(c_ulonglong, c_void_p, c_size_t, c_void_p)
def cuMemcpyHtoDAsync_v2(cuda: Libcuda, address: int, host: int, size: int, stream: int | None) -> None:
    target, data = cuda.bytes_at(address, size), _host_memory(cuda, host, size, stream)

    def copy() -> None:
        cuda.copies["from the host"] += size
        target[:] = data
    cuda.stream(stream).put(copy)


@call(c_void_p, c_ulonglong, c_size_t, c_void_p)
def cuMemcpyDtoHAsync_v2(cuda: Libcuda, host: int, address: int, size: int, stream: int | None) -> None:
    target, data = cuda.bytes_at(address, size), _host_memory(cuda, host, size, stream)

    def copy() -> None:
        cuda.copies["to the host"] += size
        data[:] = target
    cuda.stream(stream).put(copy)


def _host_memory(cuda: Libcuda, host: int, size: int, stream: int | None) -> Array:
    """Return the host memory of a copy; only pinned memory is allowed in a graph."""
    pinned = any(host - begin >= 0 and host + size <= begin + len(each) for begin, each in cuda.pinned.items())
    if not pinned and cuda.stream(stream).captured is not None:
        cuda.stream(stream).spoiled = True
        raise Refused(CAPTURING)
    return host_bytes(host, size)


@call(c_ulonglong, c_ulonglong, c_size_t, c_void_p)
def cuMemcpyDtoDAsync_v2(cuda: Libcuda, to: int, source: int, size: int, stream: int | None) -> None:
    _on_the_gpu(cuda, to, 0, source, 0, size, 1, stream)


@call(Out(RowCopy), c_void_p)
def cuMemcpy2DAsync_v2(cuda: Libcuda, copy: RowCopy, stream: int | None) -> None:
    pitches = copy.srcPitch, copy.dstPitch
    if (copy.srcMemoryType, copy.dstMemoryType) != (2, 2) or not (
            copy.WidthInBytes <= min(pitches) and max(pitches) < 1 << 31):
        raise Refused(INVALID)
    _on_the_gpu(cuda, copy.dstDevice, copy.dstPitch, copy.srcDevice, copy.srcPitch, copy.WidthInBytes, copy.Height,
                stream)


def _on_the_gpu(cuda: Libcuda, to: int, to_step: int, source: int, source_step: int, width: int, rows: int,
                stream: int | None) -> None:
    pairs = [(cuda.bytes_at(to + row * to_step, width), cuda.bytes_at(source + row * source_step, width))
             for row in range(rows)]

    def copy() -> None:
        cuda.copies["on the GPU"] += rows * width
        for there, here in pairs:
            there[:] = here
    cuda.stream(stream).put(copy)


def host_bytes(address: int, size: int) -> Array:
    return np.frombuffer((c_ubyte * size).from_address(address), np.uint8) if size else np.empty(0, np.uint8)
