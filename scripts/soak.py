"""The server for as long as you like, under load and among accidents, none of which may cost anybody an answer.

    python -m scripts.soak --seconds 3600 --grpc-front fast

Clients ask two models over gRPC and HTTP, and compare each answer with what it must be. Meanwhile clients are killed in
the midst of their requests (kill -9), connections are opened and left half way, one of the two models is loaded anew
again and again, a third one comes and goes, and so do the processes of a fourth one, in Python, which are killed: its
clients alone learn of that. In the end the server must have let go of all that: descriptors and
memory.
test_soak.py does the same in short.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

import protos
from protos import inference
from scripts.stress import Running, add_front, front, serving
from tests.infer_server.numpy_engine import write_model

STEADY, RELOADED, PASSING, MORTAL = "steady", "reloaded", "passing", "mortal"
CLIENTS = 4                         # of each protocol and model
ANSWER_SECS = 120.0
_HALF_OPEN = 64                     # connections that are left half way at a time
_SETTLING_SECS = 5.0                # for the server to notice who has gone, and to give memory back
_MORTAL_MODEL = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(
            "y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy() * 2 + 1)]) for request in requests]
"""
_MORTAL_CONFIG = """backend: "python" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_FP32 dims: 4 }"""
_KILLED = """
import sys, time
from tests.infer_server.mute_client import MuteClient
client = MuteClient(int(sys.argv[1]))
for _ in range(20):
    client.ask("/inference.GRPCInferenceService/ModelInfer", bytes.fromhex(sys.argv[2]))
print("asked", flush=True)
time.sleep(600)
"""


@dataclass
class Soak:
    """What is to happen until `ends`, and what became of it."""
    ends: float
    seen: Counter[str] = field(default_factory=Counter)     # keys that begin with "failure" are failures

    async def again_and_again(self, what: str, act: Callable[[], Awaitable[None]], pause_secs: float = 0.0) -> None:
        """An accident or a request, until the end and at least once. What it raises is a failure."""
        over = False
        while not over:
            try:
                await act()
                self.seen[what] += 1
            except (grpc.aio.AioRpcError, OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
                details = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                self.seen[f"failure: {what}: {type(error).__name__} {details}"] += 1
            await asyncio.sleep(pause_secs)
            over = time.monotonic() >= self.ends


def asked(model: str, number: float) -> inference.ModelInferRequest:
    request = inference.ModelInferRequest(model_name=model, raw_input_contents=[struct.pack("<4f", *[number] * 4)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    return request


def check(number: float, raw: bytes) -> None:
    """Raises ValueError: it is not what the model makes of the number."""
    if raw != struct.pack("<4f", *[2 * number + 1] * 4):
        raise ValueError(f"{number} was answered by {raw!r}")


def over_grpc(channel: grpc.aio.Channel, model: str, rng: random.Random) -> Callable[[], Awaitable[None]]:
    call = channel.unary_unary(f"/{protos.INFERENCE_SERVICE}/ModelInfer")

    async def ask() -> None:
        number = float(rng.randrange(1000))
        answer = await call(asked(model, number).SerializeToString(), timeout=ANSWER_SECS)
        check(number, inference.ModelInferResponse.FromString(answer).raw_output_contents[0])
    return ask


def over_http(port: int, model: str, rng: random.Random) -> Callable[[], Awaitable[None]]:
    """On a connection of its own for each request, with the tensors as bytes."""
    head = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4],
                                   "parameters": {"binary_data_size": 16}}],
                       "parameters": {"binary_data_output": True}}).encode()
    lines = (f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
             f"Content-Length: {len(head) + 16}\r\nInference-Header-Content-Length: {len(head)}\r\n\r\n").encode()

    async def ask() -> None:
        number = float(rng.randrange(1000))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(lines + head + struct.pack("<4f", *[number] * 4))
            answer = await asyncio.wait_for(reader.read(), ANSWER_SECS)
        finally:
            writer.close()
            await writer.wait_closed()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise ValueError(answer.decode("latin-1"))
        check(number, answer[-16:])
    return ask


def killed_client(port: int) -> Callable[[], Awaitable[None]]:
    """A client process that has asked and not read is killed."""
    async def accident() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _KILLED, str(port), asked(STEADY, 1.0).SerializeToString().hex(),
            stdout=subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.readline()
        process.kill()
        await process.wait()
    return accident


def mortal(ask: Callable[[], Awaitable[None]], seen: Counter[str]) -> Callable[[], Awaitable[None]]:
    """Asks the model whose processes are killed: it answers, or says that its process has ended."""
    async def attempt() -> None:
        try:
            await ask()
        except grpc.aio.AioRpcError as error:
            if "its process ended" not in (error.details() or ""):
                raise
            seen["requests whose process was killed"] += 1
    return attempt


def killed_process(server: Running) -> Callable[[], Awaitable[None]]:
    """The processes of Python models are killed."""
    async def accident() -> None:
        for thread in Path(f"/proc/{server.process.pid}/task").iterdir():
            with suppress(OSError):             # it has ended meanwhile
                for child in (thread / "children").read_text().split():
                    if "python_backend" in Path(f"/proc/{child}/cmdline").read_text():
                        os.kill(int(child), signal.SIGKILL)
    return accident


def half_open(ports: Sequence[int], rng: random.Random, kept: deque[socket.socket]) -> Callable[[], Awaitable[None]]:
    """A connection that says the beginning of something and then nothing; those that are not kept are closed."""
    said = (b"POST /v2/models/steady/infer HTTP/1.1\r\nContent-Length: 999\r\n\r\n{",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0", b"")

    async def accident() -> None:
        connection = socket.create_connection(("127.0.0.1", rng.choice(ports)))
        connection.sendall(rng.choice(said))
        kept.append(connection)
        if len(kept) > _HALF_OPEN:
            kept.popleft().close()
    return accident


def control(channel: grpc.aio.Channel, call: str, model: str) -> Callable[[], Awaitable[None]]:
    request = getattr(inference, f"{call}Request")(model_name=model).SerializeToString()

    async def act() -> None:
        await channel.unary_unary(f"/{protos.INFERENCE_SERVICE}/{call}")(request, timeout=ANSWER_SECS)
    return act


async def soak(server: Running, seconds: float, seed: int = 0) -> Counter[str]:
    """What happened, counted; keys that begin with "failure" are failures."""
    run, rng, left = Soak(time.monotonic() + seconds), random.Random(seed), deque[socket.socket]()
    async with grpc.aio.insecure_channel(server.address) as channel:
        requests = [run.again_and_again(f"{model} over {protocol}", ask, 0.002)
                    for model in (STEADY, RELOADED) for _ in range(CLIENTS)
                    for protocol, ask in (("gRPC", over_grpc(channel, model, rng)),
                                          ("HTTP", over_http(server.http_port, model, rng)))]
        load, unload = (control(channel, f"RepositoryModel{what}", PASSING) for what in ("Load", "Unload"))

        async def pass_by() -> None:
            await load()
            await unload()

        await asyncio.gather(
            *requests,
            run.again_and_again(f"{MORTAL} over gRPC", mortal(over_grpc(channel, MORTAL, rng), run.seen), 0.002),
            run.again_and_again("killed processes of models", killed_process(server), 1.0),
            run.again_and_again("reloads", control(channel, "RepositoryModelLoad", RELOADED), 0.02),
            run.again_and_again("models that came and went", pass_by, 0.02),
            run.again_and_again("killed clients", killed_client(server.grpc_port), 0.2),
            run.again_and_again("half-open connections", half_open(
                (server.grpc_port, server.http_port), rng, left), 0.02))
    for connection in left:
        connection.close()
    return run.seen


def write_repository(folder: Path) -> None:
    for model in (STEADY, RELOADED, PASSING):
        write_model(folder, model)
    (folder / MORTAL / "1").mkdir(parents=True)
    (folder / MORTAL / "1" / "model.py").write_text(_MORTAL_MODEL)
    (folder / MORTAL / "config.pbtxt").write_text(_MORTAL_CONFIG)


def descriptors(server: Running) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    add_front(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_repository(Path(name))
        with serving(Path(name), *front(given), "--model-control-mode", "explicit", "--load-model=*",
                     "--cores", "1") as server:
            asyncio.run(soak(server, min(5.0, given.seconds), given.seed))       # warm
            time.sleep(_SETTLING_SECS)
            before = server.rss_mb(), descriptors(server)
            seen = asyncio.run(soak(server, given.seconds, given.seed))
            time.sleep(_SETTLING_SECS)
            print(f"{given.seconds:g} s; RSS {before[0]:.0f} -> {server.rss_mb():.0f} MB, "
                  f"descriptors {before[1]} -> {descriptors(server)}")
    for what, count in sorted(seen.items()):
        print(f"{count:7} {what[:300]}")
    return int(any(what.startswith("failure") for what in seen))


if __name__ == "__main__":
    raise SystemExit(main())
