"""Tests of a frontend worker over gRPC in the test's process, with the test as its engine process."""
from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from infer_server import protos
from infer_server.endpoints.http.reading import PortLimits
from infer_server.frontend_workers import link
from infer_server.frontend_workers.grpc_calls import GrpcCalls
from infer_server.frontend_workers.link import Frame
from infer_server.frontend_workers.settings import WorkerSettings
from infer_server.frontend_workers.worker_end import WorkerEnd, WorkerInflight
from infer_server.grpc_ports import GRPC_LIBRARIES, grpc_server
from infer_server.listeners import Listeners
from scripts.testing.numpy_engine import TIMEOUT_SECS

STREAM = f"/{protos.INFERENCE_SERVICE}/ModelStreamInfer"


class End(WorkerEnd):
    """Worker's end of the link that queues frames for the test in place of sending them."""

    def __init__(self) -> None:
        super().__init__(lambda settings: None, lambda: None, lambda answered: None)
        self.sent: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    def send(self, kind: int, number: int = 0, *payload: bytes | bytearray | memoryview, **beside: Any) -> None:
        self.sent.put_nowait((kind, number))

    async def number_of(self, kind: int) -> int:
        """Return the call number of the next frame of this kind."""
        while (actual := await asyncio.wait_for(self.sent.get(), TIMEOUT_SECS))[0] != kind:
            pass
        return actual[1]


class Inflight(WorkerInflight):
    def __init__(self, end: WorkerEnd) -> None:
        super().__init__(1 << 30, TIMEOUT_SECS, end)
        self.is_waited_for = asyncio.Event()

    async def wait_sent(self, timeout_secs: float) -> None:
        self.is_waited_for.set()
        await super().wait_sent(timeout_secs)


@pytest.mark.parametrize("front", GRPC_LIBRARIES)
def test_the_responses_of_a_stream_reach_its_client_before_the_ports_close(
        front: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_server.listeners.SENDING_SECS", TIMEOUT_SECS)

    async def main() -> list[int]:
        end = End()
        inflight = Inflight(end)
        listeners = Listeners(PortLimits(1 << 20, inflight))
        calls = GrpcCalls(end, inflight, WorkerSettings(None, None, 1 << 20, 1 << 20, 1 << 30, TIMEOUT_SECS))
        server = grpc_server(front, calls.methods(), inflight, {}, 1 << 20, 0, 10.0)
        port = await listeners.listen_grpc(server, "127.0.0.1", 0, None)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            responses = channel.stream_stream(STREAM)(iter([b"request"]))
            number = await end.number_of(link.MESSAGE)
            for _ in range(20):
                calls.streamed(Frame(link.STREAMED, number, bytes(1 << 20)))
            calls.streamed(Frame(link.ENDED, number, b"", about=b"0"))
            closing = asyncio.create_task(listeners.close(answered=True))
            await inflight.is_waited_for.wait()
            await asyncio.sleep(0.1)                # its client takes its time
            sizes = [len(response) async for response in responses]
            await closing
            return sizes

    assert asyncio.run(main()) == [1 << 20] * 20
