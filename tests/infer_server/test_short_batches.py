"""Tests of the threads that execute batches: the event loop's for short ones, an instance's for others."""
from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import shared_memory

from infer_server.batching import batch_times
from scripts.testing.numpy_engine import TIMEOUT_SECS, NumpyContext, write_model
from tests.infer_server.serving import RunningServer, serving

X = np.ones((1, 4), np.float32)
KEY = "/short_batches"


class Asked:
    """Sender of requests that records whether the event loop's thread executed them."""

    def __init__(self, server: RunningServer, patch: pytest.MonkeyPatch) -> None:
        self.server, self._executed = server, list[int]()
        self._loops = server.run(self._ident())
        execute = NumpyContext.execute

        def recorded(context: NumpyContext, batch: int) -> None:
            self._executed.append(threading.get_ident())
            execute(context, batch)
        patch.setattr(NumpyContext, "execute", recorded)

    async def _ident(self) -> int:
        return threading.get_ident()

    def on_the_loop(self, model: str, protocol: Any = tritonclient.grpc, **given: Any) -> bool:
        """Return True if a request is executed on the event loop."""
        self._executed.clear()
        self._infer(model, protocol, **given)
        (thread,) = self._executed
        return thread == self._loops

    def ever_on_the_loop(self, model: str, protocol: Any) -> bool:
        """Return True if one of several requests is executed on the event loop.

        An instance's thread takes requests that arrive before it waits again.
        """
        end = time.monotonic() + TIMEOUT_SECS
        while time.monotonic() < end:
            if self.on_the_loop(model, protocol):
                return True
        return False

    def _infer(self, model: str, protocol: Any, **given: Any) -> Any:
        ports = self.server.ports
        with protocol.InferenceServerClient(
                f"127.0.0.1:{ports.grpc if protocol is tritonclient.grpc else ports.http}") as client:
            tensor = protocol.InferInput("x", [1, 4], "FP32")
            tensor.set_data_from_numpy(X)
            return client.infer(model, [tensor], **given)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "steady")
    write_model(folder, "unsteady", seconds=1e-6)
    write_model(folder, "in_order", config="max_batch_size: 8 dynamic_batching { preserve_ordering: true }")
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("_COMPUTE_NS", "_TOTAL_NS"):         # however slow this machine is
            patch.setattr(batch_times, limit, 1 << 60)
        with serving(folder, allow_client_shm=True) as server:
            yield Asked(server, patch)


@pytest.mark.parametrize("protocol", [tritonclient.grpc, tritonclient.http])
def test_a_short_batch_is_executed_by_the_event_loop(asked: Asked, protocol: Any) -> None:
    assert asked.ever_on_the_loop("steady", protocol)


@pytest.mark.parametrize("model", ["unsteady", "in_order"])
def test_a_model_whose_times_vary_or_whose_answers_keep_their_order_has_none(asked: Asked, model: str) -> None:
    assert not any([asked.on_the_loop(model) for _ in range(3)])


def test_nor_is_one_whose_answer_is_compressed_or_goes_into_shared_memory(asked: Asked) -> None:
    assert not asked.on_the_loop("steady", tritonclient.http, response_compression_algorithm="gzip")
    handle = shared_memory.create_shared_memory_region("r", KEY, 16)
    try:
        for protocol in (tritonclient.grpc, tritonclient.http):
            output = protocol.InferRequestedOutput("y")
            output.set_shared_memory("r", 16)
            with tritonclient.grpc.InferenceServerClient(asked.server.address) as client:
                client.register_system_shared_memory("r", KEY, 16)
                assert not asked.on_the_loop("steady", protocol, outputs=[output])
                client.unregister_system_shared_memory()
            np.testing.assert_array_equal(
                shared_memory.get_contents_as_numpy(handle, np.float32, [1, 4]), X * 2 + 1)
    finally:
        shared_memory.destroy_shared_memory_region(handle)
