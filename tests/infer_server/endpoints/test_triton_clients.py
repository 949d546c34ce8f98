"""Tests of every method of the service through Triton's four clients: gRPC and HTTP, synchronous and asyncio."""
from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from infer_server import protos
from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.serving import FRONTS, WORKERS, RunningServer, serving

CLIENTS = (tritonclient.grpc, tritonclient.grpc.aio, tritonclient.http, tritonclient.http.aio)
X = np.array([[1, 2, 3, 4]], np.float32)
KEY = f"/triton_clients_{os.getpid()}"


class Caller:
    """One of Triton's clients; coroutines are run to completion."""

    def __init__(self, library: Any, server: RunningServer, loop: asyncio.AbstractEventLoop) -> None:
        self.library, self._loop = library, loop
        self.is_grpc, self.is_aio = "grpc" in library.__name__, library.__name__.endswith("aio")
        port = server.ports.grpc if self.is_grpc else server.ports.http
        self._client = self.done(self._connect(f"127.0.0.1:{port}"))

    async def _connect(self, address: str) -> Any:
        return self.library.InferenceServerClient(address)      # one of asyncio belongs to the loop

    def done(self, value: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(value, TIMEOUT_SECS)) if inspect.isawaitable(
            value) else value

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **named: self.done(getattr(self._client, name)(*arguments, **named))

    def settings(self, name: str, *arguments: Any) -> Any:
        return getattr(self, name)(*arguments, **({"as_json": True} if self.is_grpc else {}))

    def input(self) -> Any:
        tensor = self.library.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(X)
        return tensor

    def stream(self) -> list[Any]:
        """Return the responses to two requests of one stream."""
        if not self.is_grpc:
            return []
        if self.is_aio:
            return list(self.done(self._stream()))
        answers: list[Any] = []
        self.start_stream(lambda result, error: answers.append(error or result.as_numpy("y").tolist()))
        for _ in range(2):
            self.async_stream_infer("affine", [self.input()])
        self.stop_stream()
        return answers

    async def _stream(self) -> list[Any]:
        async def requests() -> Any:
            for _ in range(2):
                yield {"model_name": "affine", "inputs": [self.input()]}
        return [error or result.as_numpy("y").tolist() async for result, error in self._client.stream_infer(requests())]


def refused(call: Callable[[], Any], said: str) -> bool:
    with pytest.raises(InferenceServerException, match=said):
        call()
    return True


def registered(client: Caller) -> bool:
    """Return True if a region can be registered, is listed, and is gone after it is unregistered."""
    handle = shm.create_shared_memory_region("r", KEY, 16)
    client.register_system_shared_memory("r", KEY, 16)
    listed = "16" in str(client.settings("get_system_shared_memory_status", "r"))
    client.unregister_system_shared_memory("r")
    shm.destroy_shared_memory_region(handle)
    return listed and KEY not in str(client.settings("get_system_shared_memory_status"))


def inferred_in_shared_memory(client: Caller) -> bool:
    """Return True if an inference reads its input from a region and writes its output there."""
    handle = shm.create_shared_memory_region("r", KEY, 32)
    shm.set_shared_memory_region(handle, [X])
    client.register_system_shared_memory("r", KEY, 32)
    given = client.library.InferInput("x", [1, 4], "FP32")
    given.set_shared_memory("r", 16)
    requested = client.library.InferRequestedOutput("y")
    requested.set_shared_memory("r", 16, offset=16)
    client.infer("affine", [given], outputs=[requested])
    actual = shm.get_contents_as_numpy(handle, np.float32, [1, 4], offset=16).tolist()
    client.unregister_system_shared_memory("r")
    shm.destroy_shared_memory_region(handle)
    return bool(actual == [[3, 5, 7, 9]])


def reloaded(client: Caller) -> bool:
    client.unload_model("affine")
    gone = not client.is_model_ready("affine")
    client.load_model("affine", config='{"max_batch_size": 2}')
    return gone and bool(client.is_model_ready("affine", "1"))


# A line for each call of the service, in an order in which they may be made.
CALLS: dict[str, Callable[[Caller], Any]] = {
    "ServerLive": lambda client: client.is_server_live(),
    "ServerReady": lambda client: client.is_server_ready(),
    "ModelReady": lambda client: client.is_model_ready("affine") and not client.is_model_ready("nobody"),
    "ServerMetadata": lambda client: "infer-server" in str(client.settings("get_server_metadata")),
    "ModelMetadata": lambda client: "FP32" in str(client.settings("get_model_metadata", "affine")),
    "ModelConfig": lambda client: "max_batch_size" in str(client.settings("get_model_config", "affine")),
    "ModelInfer": lambda client: client.infer("affine", [client.input()]).as_numpy("y").tolist() == [
        [3, 5, 7, 9]] and inferred_in_shared_memory(client),
    "ModelStreamInfer": lambda client: client.stream() == [[[3, 5, 7, 9]]] * (2 * client.is_grpc),
    "ModelStatistics": lambda client: "inference_count" in str(client.settings("get_inference_statistics", "affine")),
    "RepositoryIndex": lambda client: "READY" in str(client.settings("get_model_repository_index")),
    "RepositoryModelUnload": reloaded,
    "RepositoryModelLoad": lambda client: refused(lambda: client.load_model("nobody"),
                                                    "failed to load 'nobody', failed to poll from model repository: "),
    "SystemSharedMemoryRegister": registered,
    "SystemSharedMemoryStatus": lambda client: refused(
        lambda: client.get_system_shared_memory_status("nobody"), "Unable to find"),
    "SystemSharedMemoryUnregister": lambda client: client.unregister_system_shared_memory() is None,
    "CudaSharedMemoryStatus": lambda client: "r" not in client.settings("get_cuda_shared_memory_status"),
    "CudaSharedMemoryRegister": lambda client: refused(
        lambda: client.register_cuda_shared_memory("g", b"aGFuZGxl", 0, 64), "GPUs not supported"),
    "CudaSharedMemoryUnregister": lambda client: client.unregister_cuda_shared_memory() is None,
    "TraceSetting": lambda client: "OFF" in str(client.settings("get_trace_settings", "affine")) and refused(
        lambda: client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}), "trace file name is not given"),
    "LogSettings": lambda client: "log_warning" in str(client.settings("get_log_settings")) and "log_info" in str(
        client.settings("update_log_settings", {"log_info": True})),
}


@pytest.fixture(scope="module", params=FRONTS + WORKERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "affine")
    with serving(repository, allow_client_shm=True, explicit_control=True, load_models=None,
                 grpc_front=request.param) as running:
        yield running


def test_the_table_has_every_call_of_the_service() -> None:
    assert set(CALLS) == {method.name for method in protos.methods(protos.INFERENCE_SERVICE)}


@pytest.mark.parametrize("library", CLIENTS, ids=lambda library: library.__name__.removeprefix("tritonclient."))
def test_a_client_of_tritons_makes_every_call(server: RunningServer, library: Any) -> None:
    loop = asyncio.new_event_loop()
    client = Caller(library, server, loop)
    try:
        for name, call in CALLS.items():
            assert call(client), name
    finally:
        client.close()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
