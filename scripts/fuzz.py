"""Send mutated messages over gRPC and HTTP to a server, which must refuse each and continue.

    python -m scripts.fuzz --messages 50000 --seed 1

The messages are valid ones of every method with bytes changed, cut, doubled or spliced. Failures are a response with
"internal error", gRPC's status UNKNOWN, no response, or a server that does not serve the next valid request.
test_fuzz.py is a shorter version.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np

from infer_server import protos
from infer_server.protos import inference
from scripts.stress import add_front, front, serving
from scripts.testing.numpy_engine import write_model

ANSWER_SECS = 120.0
MORE_SECS = 0.5                     # time after which a client closes its write side
AT_A_TIME = 16
MODEL = "m"
# Without the repository's control calls, which would unload the model; that they are refused is tested elsewhere.
CALLS = [method for method in protos.methods(protos.INFERENCE_SERVICE) if "Repository" not in method.name]
PATHS = ["/", "/v2", "/v2/health/ready", f"/v2/models/{MODEL}", f"/v2/models/{MODEL}/infer", "/v2/logging",
         f"/v2/models/{MODEL}/versions/1/stats", "/v2/repository/index", "/v2/systemsharedmemory/region/r/register",
         "/v2/systemsharedmemory/status", "/v2/trace/setting", "/v2/repository/models/nobody/load"]


def infer_message(rng: random.Random) -> bytes:
    """Return a request with random parameters of all kinds."""
    request = inference.ModelInferRequest(model_name=MODEL, id=str(rng.random()))
    rows = rng.randint(1, 4)
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[rows, 4])
    if rng.random() < 0.3:
        tensor.parameters["shared_memory_region"].string_param = "r"
        tensor.parameters["shared_memory_byte_size"].int64_param = 16 * rows
    elif rng.random() < 0.5:
        tensor.contents.fp32_contents.extend([0.5] * 4 * rows)
    else:
        request.raw_input_contents.append(np.ones((rows, 4), np.float32).tobytes())
    if rng.random() < 0.5:
        output = request.outputs.add(name="y")
        output.parameters["classification"].int64_param = rng.choice((0, 1, 3, -1, 1 << 62))
    request.parameters[rng.choice(("priority", "timeout", "sequence_id", "triton_x", "mine"))].int64_param = (
        rng.randint(-1, 3))
    return request.SerializeToString()


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the data with up to four random faults."""
    changed = bytearray(data)
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(5)
        if kind == 0 and changed:
            changed[at % len(changed)] = rng.randrange(256)
        elif kind == 1:
            del changed[at:at + rng.randint(1, 8)]
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 3:
            changed[at:at] = changed[rng.randrange(len(changed) + 1):][:64]
        elif changed:
            changed[at % len(changed)] ^= 1 << rng.randrange(8)
    return bytes(changed)


async def over_grpc(channel: grpc.aio.Channel, messages: int, rng: random.Random, seen: Counter[str]) -> None:
    for _ in range(messages):
        method = rng.choice(CALLS) if rng.random() < 0.4 else next(c for c in CALLS if c.name == "ModelInfer")
        data = mutated(infer_message(rng) if "Infer" in method.name else method.request(
            **{field.name: "r" for field in method.request.DESCRIPTOR.fields[:1] if field.type == field.TYPE_STRING}
        ).SerializeToString(), rng)
        path = f"/{protos.INFERENCE_SERVICE}/{method.name}"
        try:
            if method.client_streaming:
                stream = channel.stream_stream(path)(iter([data, mutated(data, rng)]), timeout=ANSWER_SECS)
                errors = [inference.ModelStreamInferResponse.FromString(data).error_message async for data in stream]
                seen["grpc stream"] += 1
                seen["failure: " + str(errors)] += any("internal error" in each for each in errors) or len(errors) != 2
            else:
                await channel.unary_unary(path)(data, timeout=ANSWER_SECS)
                seen["grpc OK"] += 1
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
            seen[f"grpc {code.name}"] += 1
            bad = code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED) or "internal error" in details
            seen[f"failure: {method.name} {code.name} {details}"] += bad


def http_message(rng: random.Random) -> bytes:
    """Return a complete HTTP/1.1 request with random route and parameters."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4],
              "data": [1, 2, 3, rng.choice((4, "4", None, [4], 1e400))]}
    body = json.dumps({"inputs": [tensor], "key": "/k", "byte_size": 64, "log_info": True, "parameters": {
        rng.choice(("priority", "timeout", "binary_data_output", "sequence_id")): rng.choice((1, -1, True, "x", {}))}})
    head = f"{rng.choice(('GET', 'POST', 'POST'))} {rng.choice(PATHS)} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def over_http(port: int, messages: int, rng: random.Random, seen: Counter[str]) -> None:
    for _ in range(messages):
        message = http_message(rng)
        if rng.random() < 0.5:          # mutates only the body; the head stays valid
            head, _, body = message.partition(b"\r\n\r\n")
            body = mutated(body, rng)
            head = head.rsplit(b"\r\n", 1)[0] + f"\r\nContent-Length: {len(body)}".encode()
            message = head + b"\r\n\r\n" + body
        else:
            message = mutated(message, rng)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(message)
            answer = await _read(reader, writer)
            seen[f"http {answer[9:12].decode('latin-1') or 'closed'}"] += 1
            seen["failure: " + answer.decode("latin-1")] += b"internal error" in answer
        except TimeoutError:
            seen[f"failure: no answer to {message!r}"] += 1
        except OSError:
            seen["http closed"] += 1
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Return all that the server answers.

    The server waits for the rest of a truncated request. After MORE_SECS without an end the write side is closed; a
    client that closes it at once is taken for disconnected, and gets no answer.
    """
    reading = asyncio.ensure_future(reader.read())
    await asyncio.wait([reading], timeout=MORE_SECS)
    if not reading.done():
        writer.write_eof()
    return await asyncio.wait_for(reading, ANSWER_SECS)


async def fuzz(grpc_address: str, http_port: int, messages: int, seed: int) -> Counter[str]:
    """Send the messages and return counts of the answers; keys that begin with "failure" are failures."""
    seen: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(grpc_address) as channel:
        each = -(-messages // (2 * AT_A_TIME))
        await asyncio.gather(
            *(over_grpc(channel, each, random.Random(f"{seed} grpc {i}"), seen) for i in range(AT_A_TIME)),
            *(over_http(http_port, each, random.Random(f"{seed} http {i}"), seen) for i in range(AT_A_TIME)))
        request = inference.ModelInferRequest(model_name=MODEL, raw_input_contents=[bytes(16)])
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        await channel.unary_unary(f"/{protos.INFERENCE_SERVICE}/ModelInfer")(
            request.SerializeToString(), timeout=ANSWER_SECS)
    return +seen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    add_front(parser)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), MODEL)
        with serving(Path(folder), "--allow-client-shm", *front(options)) as server:
            before, began = server.rss_mb(), time.monotonic()
            seen = asyncio.run(fuzz(server.address, server.http_port, options.messages, options.seed))
            print(f"{options.messages} messages in {time.monotonic() - began:.0f} s; "
                  f"RSS {before:.0f} -> {server.rss_mb():.0f} MB")
    for what, count in sorted(seen.items()):
        print(f"{count:7} {what[:300]}")
    return int(any(what.startswith("failure") for what in seen))


if __name__ == "__main__":
    raise SystemExit(main())
