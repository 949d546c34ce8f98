"""Tests of the runtime's calls of libcuda, on an emulation that checks them strictly."""
from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import partial

import numpy as np
import pytest

from infer_server.engines.backends.cuda.codegen.gpu import GPUS
from infer_server.engines.backends.cuda.runtime.driver import CudaGpu, CudaStream
from infer_server.engines.backends.cuda.runtime.library import CudaError, Library
from scripts.testing.gpu.cases import CASES
from scripts.testing.gpu.emulated import EmulatedGpu, by_code
from scripts.testing.gpu.libcuda.library import CALLS, Libcuda
from scripts.testing.gpu.runner import text_of, way_of


def test_code_that_a_driver_refuses_is_an_error_with_what_its_assembler_says() -> None:
    text = text_of(way_of(CASES["resize, int8"][0]()[0], GPUS["sm_80"]))
    with pytest.raises(CudaError, match=r"PTX JIT compilation failed \(218\) ptxas: target sm_80 is not sm_75"):
        EmulatedGpu("sm_75").load(text.encode())
    with pytest.raises(CudaError, match=r"unsupported toolchain. \(222\)"):
        EmulatedGpu("sm_80").load(text.replace(".version 7", ".version 97").encode())


def test_a_launch_beyond_the_limits_of_a_gpu_is_refused() -> None:
    gpu, way = EmulatedGpu("sm_80"), way_of(CASES["resize, int8"][0]()[0], GPUS["sm_80"])
    module = gpu.load(text_of(way).encode())
    function, addresses = gpu.function(module, "kernel", 0), [gpu.allocate(8) for _ in range(2)]
    for grid, threads, shared in (((0, 1), 32, 0), ((1, 1 << 16), 32, 0), ((1, 1), 2048, 0), ((1, 1), 32, 50_000)):
        with pytest.raises(CudaError, match=r"cuLaunchKernel: invalid argument \(1\)"):
            gpu.stream().launch(function, grid, threads, addresses, 1, shared)
    gpu.function(module, "kernel", 163 << 10)
    with pytest.raises(CudaError, match="cuFuncSetAttribute"):
        gpu.function(module, "kernel", 164 << 10)


def test_a_capture_that_fails_leaves_a_stream_that_works() -> None:
    gpu = EmulatedGpu("sm_80")
    stream, address, pageable = gpu.stream(), gpu.allocate(8), np.arange(8, dtype=np.uint8)
    pinned = gpu.pinned(8)
    for work in (stream.wait, partial(stream.copy_in, address, pageable)):
        with pytest.raises(CudaError, match=r"not permitted when stream is capturing \(900\)"):
            stream.record(work)
    pinned[:] = 3
    graph = stream.record(partial(stream.copy_in, address, pinned))
    pinned[:] = 5           # what is there when it runs
    graph()
    stream.wait()
    assert gpu.bytes_at(address, 8).tolist() == [5] * 8
    graph.close()


def test_a_call_without_the_context_of_its_gpu_is_refused_and_one_that_an_old_driver_lacks_is_named(
        monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, found = EmulatedGpu("sm_80"), list[str]()

    def elsewhere() -> None:
        try:
            gpu.memory()
        except CudaError as error:
            found.append(str(error))
        gpu.use()
        gpu.memory()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == ["cuMemGetInfo_v2: invalid device context (201)"]
    monkeypatch.delitem(CALLS, "cuMemGetInfo_v2")
    with pytest.raises(CudaError, match="driver is too old: it lacks cuMemGetInfo_v2"):
        gpu.memory()


def test_a_gpu_that_is_not_there_and_a_driver_that_is_too_old_are_said() -> None:
    cuda = Libcuda("sm_80", 1 << 20, "card", by_code)
    for number in (1, -1):
        with pytest.raises(CudaError, match=f"there is no GPU {number}: this machine has 1, counted from 0"):
            CudaGpu(number, Library(cuda))
    cuda.version = 11030
    with pytest.raises(CudaError, match=r"too old: it supports CUDA 11\.3, and 11\.4 or later is needed"):
        CudaGpu(0, Library(cuda))


def test_a_process_that_was_forked_is_told_why_it_cannot_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, here = EmulatedGpu("sm_80"), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    with pytest.raises(CudaError, match=r"initialization error \(3\); CUDA cannot .* start method 'spawn'"):
        gpu.use()


def _spoilt(stream: CudaStream) -> None:
    """Wait on a stream under capture, which ends the capture with an error."""
    with contextlib.suppress(CudaError):
        stream.wait()


REFUSED: dict[str, Callable[[EmulatedGpu, CudaStream], object]] = {
    "cuModuleGetFunction: named symbol not found (500)": lambda gpu, stream: gpu.function(gpu.load(
        text_of(way_of(CASES["resize, int8"][0]()[0], GPUS["sm_80"])).encode()), "another", 0),
    "cuModuleGetFunction: invalid resource handle (400)": lambda gpu, stream: gpu.function(c_void_p(8), "kernel", 0),
    "cuStreamBeginCapture_v2: invalid argument (1)": lambda gpu, stream: stream.record(partial(stream.record, len)),
    "cuStreamEndCapture: invalid argument (1)": lambda gpu, stream: gpu.driver(
        "cuStreamEndCapture", c_void_p(stream.number), byref(c_void_p())),
    "cuStreamEndCapture: operation failed due to a previous error during capture (901)":
        lambda gpu, stream: stream.record(partial(_spoilt, stream)),
    "cuEventElapsedTime: invalid resource handle (400)": lambda gpu, stream: gpu.driver(
        "cuEventElapsedTime", byref(c_float()), *_events(gpu)),
    "cuStreamDestroy_v2: invalid resource handle (400)": lambda gpu, stream: [stream.close(), stream.close()],
    "cuMemcpyHtoD_v2: invalid argument (1)": lambda gpu, stream: gpu.write(gpu.allocate(8) + 4, np.zeros(8, np.uint8)),
    "cuMemAlloc_v2: invalid argument (1)": lambda gpu, stream: gpu.driver(
        "cuMemAlloc_v2", byref(c_ulonglong()), c_size_t(0)),
    "cuMemAlloc_v2: out of memory (2)": lambda gpu, stream: gpu.allocate(1 << 40),
    "cuMemFree_v2: invalid argument (1)": lambda gpu, stream: gpu.free(gpu.allocate(8) + 4),
    "cuMemFreeHost: invalid argument (1)": lambda gpu, stream: gpu.driver("cuMemFreeHost", c_void_p(8)),
    "cuPointerGetAttribute: invalid argument (1)": lambda gpu, stream: gpu.driver(
        "cuPointerGetAttribute", byref(c_int()), c_int(9), c_ulonglong(8)),
    "cuIpcOpenMemHandle_v2: invalid resource handle (400)": lambda gpu, stream: gpu.open_shared(bytes(64)),
    "cuMemcpy2DAsync_v2: invalid argument (1)": lambda gpu, stream: stream.copy_rows(
        gpu.allocate(64), 16, gpu.allocate(64), 8, 16, 2),
    "cuDeviceGet: invalid device ordinal (101)": lambda gpu, stream: gpu.driver(
        "cuDeviceGet", byref(c_int()), c_int(1)),
}


def _events(gpu: EmulatedGpu) -> list[c_void_p]:
    """Return two events that were not recorded."""
    events = [c_void_p(), c_void_p()]
    for event in events:
        gpu.driver("cuEventCreate", byref(event), c_uint(0))
    return events


@pytest.mark.parametrize(("said", "call"), REFUSED.items(), ids=REFUSED)
def test_what_a_driver_refuses_is_an_error_with_the_call_and_its_words(
        said: str, call: Callable[[EmulatedGpu, CudaStream], object]) -> None:
    gpu = EmulatedGpu("sm_80")
    stream = gpu.stream()
    assert isinstance(stream, CudaStream)
    with pytest.raises(CudaError, match=re.escape(said)):
        call(gpu, stream)
