"""Put a server under stress: the checks of test_stress.py at full length and size.

    python -m scripts.stress overload --seconds 60          # three times the server's capacity, with deadlines
    python -m scripts.stress terminate                      # SIGTERM while 64 clients send requests
    python -m scripts.stress slow-readers                   # 64 responses of 16 MB that no client reads
    python -m scripts.stress cancel                         # 50,000 waiting requests, all of which are cancelled
    python -m scripts.stress models                         # 2,000 models: starting, the index, polling
    python -m scripts.stress connections                    # 9,000 idle connections to each port

The server runs in its own process with engines in numpy; its statistics show its behaviour.
"""
from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from infer_server.batching.batcher import Batcher
from infer_server.batching.policy import BatchPolicy, QueuePolicy
from infer_server.batching.request import Request
from scripts.testing.mute_client import MuteClient
from scripts.testing.numpy_engine import write_model

INFER = "/inference.GRPCInferenceService/ModelInfer"
NUMPY_SERVER = (sys.executable, "-m", "scripts.testing.numpy_server")


@dataclass(frozen=True)
class Running:
    """Server in its own process."""
    process: subprocess.Popen[str]
    grpc_port: int
    http_port: int
    metrics_port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def cpu_secs(self) -> float:
        ticks = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def statistics(self, model: str) -> service_pb2.ModelStatistics:
        with grpc.insecure_channel(self.address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            return stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name=model)).model_stats[0]


def add_front(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grpc-front", default="grpcio", help="as infer-server's")
    parser.add_argument("--workers", default="1", help="likewise")


def front(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the server's options --grpc-front and --workers."""
    return "--grpc-front", options.grpc_front, "--workers", options.workers


@contextmanager
def serving(repository: Path, *options: str, command: Sequence[str] = NUMPY_SERVER) -> Iterator[Running]:
    command = [*command, "--model-repository", str(repository), "--grpc-port", "0", "--http-port", "0",
               "--metrics-port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        listening = next(line for line in process.stderr if "gRPC on" in line)
        ports = [int(port) for port in re.findall(r":(\d+)(?=,|$)", listening.partition("gRPC on")[2], re.M)]
        while not next(process.stderr).endswith("INFO ready\n"):        # all of its models are
            pass
        # Read the log, so that the server does not block on a full pipe.
        log = threading.Thread(target=deque, args=(process.stderr, 0))
        log.start()
        try:
            yield Running(process, *ports[:3])
        finally:
            process.terminate()
            process.wait()
            log.join()


def request(model: str, values: int) -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[bytes(4 * values)])
    message.inputs.add(name="x", datatype="FP32", shape=[1, values])
    return bytes(message.SerializeToString())


async def offer(channel: grpc.aio.Channel, model: str, rate: float, seconds: float, deadline: float) -> Counter[str]:
    """Send requests at a fixed rate without waiting for answers, and count their statuses."""
    call, ended, data = channel.unary_unary(INFER), Counter[str](), request(model, 4)

    async def one() -> None:
        try:
            await call(data, timeout=deadline)
            ended["OK"] += 1
        except grpc.aio.AioRpcError as error:
            ended[error.code().name] += 1

    begin = time.monotonic()
    tasks = []
    for i in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begin + i / rate - time.monotonic()))
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    return ended


async def overload(options: argparse.Namespace) -> None:
    """Offer three times the capacity of an engine that takes `--batch-secs` per batch of 8, with deadlines."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "slow", seconds=options.batch_secs)
        with serving(Path(folder), "--cores", "1", *front(options)) as server:
            async with grpc.aio.insecure_channel(server.address) as channel:
                await channel.unary_unary(INFER)(request("slow", 4))
                before, rss = server.statistics("slow"), server.rss_mb()
                capacity = 8 / options.batch_secs
                deadline = options.deadline * options.batch_secs
                ended = await offer(channel, "slow", 3 * capacity, options.seconds, deadline)
                begin = time.monotonic()
                after = server.statistics("slow")
                while not (await offer(channel, "slow", 1000, 0.001, deadline))["OK"]:
                    pass
                recovered = time.monotonic() - begin
            batches = after.execution_count - before.execution_count
            executed = after.inference_count - before.inference_count
            print(f"{dict(ended)}, goodput {ended['OK'] / options.seconds / capacity:.0%} of capacity; "
                  f"executed {executed} in {batches} batches, in vain {executed - ended['OK']}; "
                  f"RSS {rss:.0f} -> {server.rss_mb():.0f} MB; answers again after {recovered:.2f} s")


async def terminate(options: argparse.Namespace) -> None:
    """Send SIGTERM while 64 clients send requests: until the first refusal, then in a second run persistently."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "m", seconds=0.005)
        for persistent in (False, True):
            with serving(Path(folder), "--drain-grace-secs", "0.2", *front(options)) as server:
                tasks = [asyncio.create_task(send_on(server.address, persistent)) for _ in range(64)]
                await asyncio.sleep(1)
                server.process.send_signal(signal.SIGTERM)
                ended = sum(await asyncio.gather(*tasks), Counter[str]())
                server.process.wait()
            print(f"clients that ask {'on and on' if persistent else 'until refused'}: {dict(ended)}, "
                  f"exit status {server.process.returncode}")


async def send_on(address: str, persistent: bool) -> Counter[str]:
    """Send requests on one connection until the server has stopped listening, and count their statuses."""
    ended, data = Counter[str](), request("m", 4)
    async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary(INFER)
        while True:
            try:
                await call(data)
                ended["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ended[error.code().name] += 1
                if not persistent or "refused" in str(error.details()).lower():
                    return ended


async def slow_readers(options: argparse.Namespace) -> None:
    """Open 16 connections with 4 requests each of 16 MB and large answers that are never read."""
    values = 4 << 20
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "large", shape=[values], max_batch=1)
        with serving(Path(folder), "--max-inflight-mib", str(options.mib), "--cores", "1",
                     *front(options)) as server:
            body, rss = request("large", values), [server.rss_mb()]
            readers = []
            for _ in range(16):
                readers.append(MuteClient(server.grpc_port))
                for _ in range(4):
                    readers[-1].send_request(INFER, body)
                rss.append(server.rss_mb())
            await asyncio.sleep(2)
            rss.append(server.rss_mb())
            for reader in readers:
                reader.close()
            await asyncio.sleep(4)
            print(f"--max-inflight-mib {options.mib}: RSS {rss[0]:.0f} MB before, {max(rss):.0f} at most, "
                  f"{server.rss_mb():.0f} after; failures {server.statistics('large').inference_stats.fail.count}")


async def cancel(options: argparse.Namespace) -> None:
    """Withdraw all queued requests, newest first, as at the end of a connection, and print the time."""
    batcher = Batcher("m", BatchPolicy(8), QueuePolicy(), lambda *_: None)
    loop = asyncio.get_running_loop()
    requests = [Request({}, 1, (), lambda _: b"", loop.create_future()) for _ in range(options.count)]
    for one in requests:
        batcher.submit(one)
    begin = time.perf_counter()
    for one in reversed(requests):
        batcher.withdraw(one)
    print(f"{options.count} requests cancelled, the newest first: {(time.perf_counter() - begin) * 1e3:.0f} ms")


async def models(options: argparse.Namespace) -> None:
    """Load and list a repository of many models that is polled every second, and print the costs."""
    with tempfile.TemporaryDirectory() as folder:
        for i in range(options.count):
            write_model(Path(folder), f"m{i}")
        begin = time.monotonic()
        with serving(Path(folder), "--cores", "1", "--model-control-mode", "poll", "--repository-poll-secs", "1",
                     *front(options)) as server:
            ready, cpu = time.monotonic() - begin, server.cpu_secs()
            async with grpc.aio.insecure_channel(server.address) as channel:
                begin = time.monotonic()
                await service_pb2_grpc.GRPCInferenceServiceStub(channel).RepositoryIndex(
                    service_pb2.RepositoryIndexRequest())
                index, before = time.monotonic() - begin, server.cpu_secs()
            await asyncio.sleep(10)
            look = (server.cpu_secs() - before) / 10
            print(f"{options.count} models: ready after {ready:.1f} s ({cpu:.1f} of CPU), "
                  f"RSS {server.rss_mb():.0f} MB, index in {index * 1e3:.0f} ms, a look {look * 1e3:.0f} ms of CPU")


async def connections(options: argparse.Namespace) -> None:
    """Open many idle connections of each protocol while one client sends requests, and print memory and statuses."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    greetings = {"gRPC": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
                 "HTTP": b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "m")
        with serving(Path(folder), *front(options)) as server, ExitStack() as stack:
            for protocol, port in (("gRPC", server.grpc_port), ("HTTP", server.http_port)):
                rss, begin = server.rss_mb(), time.monotonic()
                for _ in range(options.count):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(greetings[protocol])
                opened = time.monotonic() - begin
                ended = await offer(grpc.aio.insecure_channel(server.address), "m", 100, 5, 1.0)
                print(f"{options.count} connections over {protocol} in {opened:.1f} s: RSS {rss:.0f} -> "
                      f"{server.rss_mb():.0f} MB; beside them 500 requests: {dict(ended)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    kind: Any = kinds.add_parser("overload")
    kind.add_argument("--seconds", type=float, default=60.0)
    kind.add_argument("--batch-secs", type=float, default=0.5)
    kind.add_argument("--deadline", type=float, default=2.4, help="in batch times")
    kind.set_defaults(run=overload)
    kind = kinds.add_parser("terminate")
    kind.set_defaults(run=terminate)
    kind = kinds.add_parser("slow-readers")
    kind.add_argument("--mib", type=int, default=256)
    kind.set_defaults(run=slow_readers)
    kind = kinds.add_parser("cancel")
    kind.add_argument("--count", type=int, default=50_000)
    kind.set_defaults(run=cancel)
    for name, run, count in (("models", models, 2000), ("connections", connections, 9000)):
        kind = kinds.add_parser(name)
        kind.add_argument("--count", type=int, default=count)
        kind.set_defaults(run=run)
    add_front(parser)
    options = parser.parse_args()
    asyncio.run(options.run(options))


if __name__ == "__main__":
    main()
