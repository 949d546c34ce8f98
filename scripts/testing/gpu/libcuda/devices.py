"""Functions of devices and contexts."""
from __future__ import annotations

from ctypes import c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from scripts.testing.gpu.libcuda.library import ORDINAL, TABLE, TEXTS, USED, Libcuda, Out, Refused, call


@call(c_uint, anywhere=True)
def cuInit(cuda: Libcuda, flags: int) -> None: ...


@call(c_int, Out(c_char_p), anywhere=True)
def cuGetErrorString(cuda: Libcuda, status: int, text: c_char_p) -> None:
    text.value = TEXTS[status].encode()


@call(Out(c_int), anywhere=True)
def cuDriverGetVersion(cuda: Libcuda, version: c_int) -> None:
    version.value = cuda.version


@call(Out(c_int), anywhere=True)
def cuDeviceGetCount(cuda: Libcuda, count: c_int) -> None:
    count.value = 1


@call(Out(c_int), c_int, anywhere=True)
def cuDeviceGet(cuda: Libcuda, device: c_int, number: int) -> None:
    if number:
        raise Refused(ORDINAL)
    device.value = number


@call(TABLE, c_int, c_int, anywhere=True)
def cuDeviceGetName(cuda: Libcuda, text: Any, length: int, device: int) -> None:
    text.value = cuda.name.encode()[:length - 1]


@call(Out(c_size_t), c_int, anywhere=True)
def cuDeviceTotalMem_v2(cuda: Libcuda, size: c_size_t, device: int) -> None:
    size.value = len(cuda.memory.bytes)


@call(TABLE, c_int, anywhere=True)
def cuDeviceGetUuid(cuda: Libcuda, uuid: Any, device: int) -> None:
    uuid.raw = bytes(range(16))


@call(Out(c_int), c_int, c_int, anywhere=True)
def cuDeviceGetAttribute(cuda: Libcuda, value: c_int, attribute: int, device: int) -> None:
    number = cuda.architecture.removeprefix("sm_")
    value.value = int({75: number[:-1], 76: number[-1]}[attribute])


@call(Out(c_void_p), c_int, anywhere=True)
def cuDevicePrimaryCtxRetain(cuda: Libcuda, context: c_void_p, device: int) -> None:
    context.value = id(cuda)


@call(c_void_p, anywhere=True)
def cuCtxSetCurrent(cuda: Libcuda, context: int) -> None:
    USED.stack = [*getattr(USED, "stack", ())[:-1], cuda]


@call(c_void_p, anywhere=True)
def cuCtxPushCurrent_v2(cuda: Libcuda, context: int) -> None:
    USED.stack = [*getattr(USED, "stack", ()), cuda]


@call(Out(c_void_p))
def cuCtxPopCurrent_v2(cuda: Libcuda, context: c_void_p) -> None:
    context.value = id(USED.stack.pop())
