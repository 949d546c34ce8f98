"""Clients of every kind, each of which compares responses with the expected values.

A client is a function that sends one request. It raises ValueError if the response is wrong, or its transport's
exception if there is none.
"""
from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import grpc
import numpy as np
from google.protobuf.message import Message

from infer_server import protos
from infer_server.clients.codec import Array, decode, infer_outputs, infer_request
from infer_server.clients.load.transports.http_connection import HttpClientConnection, connect
from infer_server.engines import Engine, load_engine
from infer_server.protos import inference
from scripts.soak.models import CHAIN, COUNTED, DIGITS, DIGITS_BATCH, MORTAL, RELOADED, STEADY, SUM

SendRequest = Callable[[], Awaitable[None]]
Example = Callable[[], tuple[Array, Array]]     # returns an input and the expected output
ANSWER_SECS = 120.0
OF_EACH = 4                         # clients of each protocol and small model
_SEQUENCE = 5                       # requests
_RENEWAL_REQUESTS = 50              # requests after which a client renews its shared-memory region or connection


def affine(factor: float, summand: float, rng: random.Random) -> Example:
    def example() -> tuple[Array, Array]:
        x = np.full((1, 4), rng.randrange(1000), np.float32)
        return x, x * np.float32(factor) + np.float32(summand)
    return example


def digits(engine: Engine, rng: random.Random) -> Example:
    """Return noise images with the plan's results, computed in this process."""
    known = []
    for seed in range(4):
        images = np.random.default_rng(seed).random((DIGITS_BATCH, 1, 28, 28), np.float32)
        known.append((images, engine.run({"image": images})["logits"]))
    return lambda: rng.choice(known)


def check(actual: Array, expected: Array) -> None:
    """Raise ValueError if the output is not the expected one."""
    if actual.shape != expected.shape or not np.allclose(actual, expected, 1e-3, 1e-3):
        raise ValueError(f"{expected!r:.200} was expected, and {actual!r:.200} came")


class Channel:
    """Requests over one gRPC channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def call(self, name: str, request: Message) -> bytes:
        answer: bytes = await self._channel.unary_unary(f"/{protos.INFERENCE_SERVICE}/{name}")(
            request.SerializeToString(), timeout=ANSWER_SECS)
        return answer

    async def infer(self, request: inference.ModelInferRequest) -> inference.ModelInferResponse:
        return inference.ModelInferResponse.FromString(await self.call("ModelInfer", request))

    def client(self, model: str, example: Example, x: str = "x", y: str = "y") -> SendRequest:
        async def send() -> None:
            array, expected = example()
            check(infer_outputs(await self.infer(infer_request(model, {x: array})))[y], expected)
        return send

    def sequences(self, number: int, rng: random.Random) -> SendRequest:
        """Return a function that sends one sequence of requests, with a new id each time."""
        async def send() -> None:
            total = np.zeros((1, 4), np.float32)
            identity = number + (rng.randrange(1 << 40) << 8)
            for i in range(_SEQUENCE):
                x = np.full((1, 4), rng.randrange(1000), np.float32)
                request = infer_request(SUM, {"x": x})
                request.parameters["sequence_id"].int64_param = identity
                request.parameters["sequence_start"].bool_param = i == 0
                request.parameters["sequence_end"].bool_param = i == _SEQUENCE - 1
                check(infer_outputs(await self.infer(request))["sum"], total := total + x)
        return send

    def streams(self, rng: random.Random) -> SendRequest:
        """Return a function that opens a stream with several requests, one of them for a decoupled model."""
        call = self._channel.stream_stream(f"/{protos.INFERENCE_SERVICE}/ModelStreamInfer")

        async def send() -> None:
            numbers, count = [float(rng.randrange(1000)) for _ in range(_SEQUENCE)], rng.randrange(1, 5)
            requests = [infer_request(STEADY, {"x": np.full((1, 4), number, np.float32)}) for number in numbers]
            requests.append(infer_request(COUNTED, {"x": np.full((1, 4), count, np.float32)}))
            received: dict[str, list[float]] = {STEADY: [], COUNTED: []}
            stream = call((request.SerializeToString() for request in requests), timeout=ANSWER_SECS)
            async for data in stream:
                message = inference.ModelStreamInferResponse.FromString(data)
                if message.error_message:
                    raise ValueError(message.error_message)
                if message.infer_response.outputs:
                    received[message.infer_response.model_name].append(
                        float(infer_outputs(message.infer_response)["y"][0, 0]))
            expected = {STEADY: [2 * number + 1 for number in numbers], COUNTED: [float(i) for i in range(count)]}
            if received != expected:
                raise ValueError(f"{expected} was expected of a stream, and {received} came")
        return send

    def mortal(self, seen: Counter[str], rng: random.Random) -> SendRequest:
        """Return a request to the model whose processes are killed; it may fail because its process ended."""
        plain = self.client(MORTAL, affine(2, 1, rng))

        async def send() -> None:
            try:
                await plain()
            except grpc.aio.AioRpcError as error:
                if "its process ended" not in (error.details() or ""):
                    raise
                seen["requests whose process was killed"] += 1
        return send


class OverHttp:
    """Requests with binary tensors on a connection that is reused for several, the last with Connection: close."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: HttpClientConnection | None = None
        self._sent = 0

    def client(self, model: str, example: Example, x: str = "x") -> SendRequest:
        async def send() -> None:
            array, expected = example()
            check(await self._infer(model, x, array), expected)
        return send

    async def _infer(self, model: str, name: str, x: Array) -> Array:
        data = x.tobytes()
        head = json.dumps({"inputs": [{"name": name, "datatype": "FP32", "shape": x.shape,
                                       "parameters": {"binary_data_size": len(data)}}]}).encode()
        self._sent += 1
        last = "" if self._sent % _RENEWAL_REQUESTS else "Connection: close\r\n"
        lines = (f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\n{last}Content-Length: {len(head) + len(data)}"
                 f"\r\nInference-Header-Content-Length: {len(head)}\r\n\r\n").encode()
        if self._connection is None or not self._connection.is_usable:
            self._connection = await connect("127.0.0.1", self._port)
        answer = await asyncio.wait_for(self._connection.request(lines + head + data), ANSWER_SECS)
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {answer.body.decode('latin-1')}")
        output = json.loads(answer.body)["outputs"][0]
        return np.array(output["data"], np.float32).reshape(output["shape"])

    def close(self) -> None:
        if self._connection:
            self._connection.close()


class InSharedMemory:
    """Requests with inputs and outputs in a shared-memory region, which is registered again at intervals."""

    def __init__(self, channel: Channel, example: Example) -> None:
        self._channel, self._example = channel, example
        self._x, self._y = (array.nbytes for array in example())
        self._region = SharedMemory(create=True, size=self._x + self._y)
        self._sent = 0

    def client(self, model: str, x: str, y: str) -> SendRequest:
        async def send() -> None:
            array, expected = self._example()
            if self._sent % _RENEWAL_REQUESTS == 0:
                await self._unregister()
                await self._channel.call("SystemSharedMemoryRegister", inference.SystemSharedMemoryRegisterRequest(
                    name=self._region.name, key=f"/{self._region.name}", byte_size=self._x + self._y))
            self._sent += 1
            memory = self._region.buf
            assert memory is not None, "it is open"
            memory[:self._x + self._y] = array.tobytes() + bytes(self._y)
            await self._channel.infer(self._request(model, x, y, array.shape))
            check(decode(bytes(memory[self._x:self._x + self._y]), "FP32", expected.shape), expected)
        return send

    async def close(self) -> None:
        self._region.close()
        self._region.unlink()
        await self._unregister()

    async def _unregister(self) -> None:
        await self._channel.call("SystemSharedMemoryUnregister",
                                 inference.SystemSharedMemoryUnregisterRequest(name=self._region.name))

    def _request(self, model: str, x: str, y: str, shape: tuple[int, ...]) -> inference.ModelInferRequest:
        request = inference.ModelInferRequest(model_name=model)
        for tensor, at, count in ((request.inputs.add(name=x, datatype="FP32", shape=shape), 0, self._x),
                                  (request.outputs.add(name=y), self._x, self._y)):
            tensor.parameters["shared_memory_region"].string_param = self._region.name
            tensor.parameters["shared_memory_offset"].int64_param = at
            tensor.parameters["shared_memory_byte_size"].int64_param = count
        return request


@asynccontextmanager
async def clients(address: str, http_port: int, repository: Path, rng: random.Random,
                  seen: Counter[str]) -> AsyncIterator[Sequence[tuple[str, SendRequest]]]:
    """Yield (name, request function) of each client, by kind of request and protocol.

    seen: counts of outcomes that clients update themselves.
    """
    async with AsyncExitStack() as stack:
        channel = Channel(await stack.enter_async_context(grpc.aio.insecure_channel(address)))
        images = digits(load_engine(repository / DIGITS / "1" / "model.plan", threads=1), rng)

        def http(model: str, example: Example, x: str = "x") -> SendRequest:
            client = OverHttp(http_port)
            stack.callback(client.close)
            return client.client(model, example, x)

        def shared_memory(model: str, example: Example, x: str = "x", y: str = "y") -> SendRequest:
            client = InSharedMemory(channel, example)
            stack.push_async_callback(client.close)
            return client.client(model, x, y)

        twice, four_times = affine(2, 1, rng), affine(4, 3, rng)
        yield [(f"{model} {way}", client)
               for i in range(OF_EACH)
               for model, way, client in (
                   *((model, "over gRPC", channel.client(model, twice)) for model in (STEADY, RELOADED)),
                   *((model, "over HTTP", http(model, twice)) for model in (STEADY, RELOADED)),
                   (STEADY, "in shared memory", shared_memory(STEADY, twice)),
                   (CHAIN, "over gRPC", channel.client(CHAIN, four_times)),
                   (SUM, "over gRPC, in sequences", channel.sequences(i, rng)),
                   (COUNTED, "in streams", channel.streams(rng)),
                   (DIGITS, "over gRPC", channel.client(DIGITS, images, "image", "logits")),
                   (DIGITS, "over HTTP", http(DIGITS, images, "image")),
                   (DIGITS, "in shared memory", shared_memory(DIGITS, images, "image", "logits")))
               ] + [(f"{MORTAL} over gRPC", channel.mortal(seen, rng))]
