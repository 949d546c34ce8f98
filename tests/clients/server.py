"""Small real gRPC server for the clients' tests, which misbehaves when told to."""
from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from infer_server import protos
from infer_server.clients.codec import decode, encode
from infer_server.protos import inference as pb

TIMEOUT_SECS = 120          # time limit of everything a test waits for; longer means a hang, even on a busy machine


@dataclass
class Doubler:
    """Model "doubler": y = 2 x of float32 [batch, 4]. Tests set the upper fields."""
    delay_s: float = 0.001                      # delay of every response
    stall_at: int = 0                           # from this request on, the server does not respond for stall_s
    stalls_when_measured: bool = False          # the n-th since statistics were first asked for
    stall_s: float = 0.0
    fail_every: int = 0                         # every n-th request ends with INTERNAL
    wrong_every: int = 0                        # every n-th answer is wrong in one element
    keeps_statistics: bool = True
    shape: tuple[int, ...] = (-1, 4)
    received: list[pb.ModelInferRequest] = field(default_factory=list)
    batches: Counter[int] = field(default_factory=Counter)
    at_once: int = 0                            # requests now ...
    most_at_once: int = 0                       # ... and at most
    busy_ns: int = 0
    stall_ends: float = 0.0                     # on time.monotonic()
    counted_from: int | None = None             # index of the first received request that is counted

    async def ServerLive(self, request: Any, context: Any) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=True)

    async def ModelReady(self, request: Any, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=request.name == "doubler")

    async def ModelMetadata(self, request: Any, context: Any) -> pb.ModelMetadataResponse:
        await self._know(request.name, context)
        response = pb.ModelMetadataResponse(name="doubler", versions=["1"], platform="test")
        response.inputs.add(name="x", datatype="FP32", shape=self.shape)
        response.outputs.add(name="y", datatype="FP32", shape=self.shape)
        return response

    async def ModelConfig(self, request: Any, context: Any) -> pb.ModelConfigResponse:
        await self._know(request.name, context)
        response = pb.ModelConfigResponse()
        response.config.name, response.config.max_batch_size = "doubler", 8
        return response

    async def ModelStatistics(self, request: Any, context: Any) -> pb.ModelStatisticsResponse:
        if not self.keeps_statistics:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no statistics here")
        if self.counted_from is None and self.stalls_when_measured:
            self.counted_from = len(self.received)
        response = pb.ModelStatisticsResponse()
        entry = response.model_stats.add(name="doubler", version="1", execution_count=self.batches.total(),
                                         inference_count=sum(size * n for size, n in self.batches.items()))
        for phase in (entry.inference_stats.queue, entry.inference_stats.compute_infer):
            phase.count, phase.ns = self.batches.total(), self.busy_ns
        for size, count in self.batches.items():
            entry.batch_stats.add(batch_size=size).compute_infer.count = count
        return response

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        await self._know(request.model_name, context)
        begin = time.monotonic_ns()
        self.received.append(request)
        number = len(self.received)                 # others come while this one is answered
        if self.fail_every and number % self.fail_every == 0:
            await context.abort(grpc.StatusCode.INTERNAL, "told to fail")
        shape = tuple(request.inputs[0].shape)
        if shape[1:] != (4,):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"input 'x' is [-1,4], not {list(shape)}")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.delay_s)
        self.at_once -= 1
        if number - (self.counted_from or 0) == self.stall_at and (
                self.counted_from is not None or not self.stalls_when_measured):
            self.stall_ends = time.monotonic() + self.stall_s
        if (wait := self.stall_ends - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        y = 2 * decode(request.raw_input_contents[0], "FP32", shape)
        if self.wrong_every and number % self.wrong_every == 0:
            y[0, 0] += 1
        response = pb.ModelInferResponse(model_name="doubler", model_version="1", id=request.id)
        response.outputs.add(name="y", datatype="FP32", shape=shape)
        response.raw_output_contents.append(encode(y.astype(np.float32)))
        self.batches[shape[0]] += 1
        self.busy_ns += time.monotonic_ns() - begin
        return response

    async def _know(self, name: str, context: Any) -> None:
        if name != "doubler":
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model '{name}'")


@contextmanager
def serving(model: Doubler) -> Iterator[str]:
    """Run a server of `model` on a thread and yield "host:port"."""
    handlers = {method.name: grpc.unary_unary_rpc_method_handler(
        getattr(model, method.name), method.request.FromString, method.response.SerializeToString)
        for method in protos.methods(protos.INFERENCE_SERVICE) if hasattr(model, method.name)}
    started, ports = threading.Event(), []
    loop = asyncio.new_event_loop()
    finished = asyncio.Event()

    async def serve() -> None:
        server = grpc.aio.server(options=[(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(protos.INFERENCE_SERVICE, handlers),))
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        started.set()
        await finished.wait()
        await server.stop(grace=None)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="test server")
    thread.start()
    assert started.wait(TIMEOUT_SECS)
    try:
        yield f"127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(finished.set)
        thread.join(TIMEOUT_SECS)
        loop.close()
