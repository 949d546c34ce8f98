"""Accidents to clients, connections, models and their processes, which must not affect other clients."""
from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from infer_server.clients.codec import infer_request
from infer_server.protos import inference
from scripts.soak.clients import Channel
from scripts.soak.models import MORTAL, PASSING, RELOADED, STEADY
from scripts.stress import INFER

Accident = Callable[[], Awaitable[None]]
_HALF_OPEN = 64                     # maximum number of half-open connections
_KILLED = f"""
import sys, time
from scripts.testing.mute_client import MuteClient
client = MuteClient(int(sys.argv[1]))
for _ in range(20):
    client.send_request("{INFER}", bytes.fromhex(sys.argv[2]))
print("asked", flush=True)
time.sleep(600)
"""


def killed_client(port: int) -> Accident:
    """Kill a client process that has sent a request and not read the answer."""
    request = infer_request(STEADY, {"x": np.ones((1, 4), np.float32)}).SerializeToString().hex()

    async def accident() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _KILLED, str(port), request, stdout=subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.readline()
        process.kill()
        await process.wait()
    return accident


def killed_process(repository: Path) -> Accident:
    """Kill the process of a Python model, whether or not it is executing a request."""
    async def accident() -> None:
        with suppress(ProcessLookupError, ValueError):      # the process has ended and is being restarted
            os.kill(int((repository / MORTAL / "pid").read_text()), signal.SIGKILL)
    return accident


def half_open(ports: Sequence[int], rng: random.Random, connections: deque[socket.socket]) -> Accident:
    """Open a connection, send the start of a request and nothing more; the oldest of many is closed."""
    beginnings = (b"POST /v2/models/steady/infer HTTP/1.1\r\nContent-Length: 999\r\n\r\n{",
                  b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0", b"")

    async def accident() -> None:
        connection = socket.create_connection(("127.0.0.1", rng.choice(ports)))
        connection.sendall(rng.choice(beginnings))
        connections.append(connection)
        if len(connections) > _HALF_OPEN:
            connections.popleft().close()
    return accident


def reload(channel: Channel, repository: Path) -> Accident:
    """Reload a model after touching its files, since unchanged models stay loaded."""
    async def accident() -> None:
        for file in (repository / RELOADED / "1").iterdir():
            file.touch()
        await channel.call("RepositoryModelLoad", inference.RepositoryModelLoadRequest(model_name=RELOADED))
    return accident


def passing_by(channel: Channel) -> Accident:
    """Load a model and unload it."""
    async def accident() -> None:
        await channel.call("RepositoryModelLoad", inference.RepositoryModelLoadRequest(model_name=PASSING))
        await channel.call("RepositoryModelUnload", inference.RepositoryModelUnloadRequest(model_name=PASSING))
    return accident
