"""The calls of libcuda that the runtime makes, on one that refuses what a driver may refuse."""
from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

from engines.backends.cuda.codegen.gpu import GPUS
from engines.backends.cuda.runtime.driver import CudaError
from tests.engines.backends.cuda.runner import text_of, way_of
from tests.gpu.cases import CASES
from tests.gpu.emulated import EmulatedGpu
from tests.gpu.libcuda.library import CALLS


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
    with pytest.raises(CudaError, match="driver here is too old: it has no cuMemGetInfo_v2"):
        gpu.memory()
