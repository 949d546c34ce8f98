"""Helpers that observe the processes of a server with several frontend workers."""
from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

from infer_server.frontend_workers.supervisor import FrontendWorkers
from scripts.testing.numpy_engine import Gate
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import RunningServer

SOME = 8                # clients; that one worker has all of their connections happens once in a hundred times


def infer(client: triton.InferenceServerClient, x: np.ndarray, model: str = "m") -> np.ndarray:
    tensor = triton.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    y: np.ndarray = client.infer(model, [tensor]).as_numpy("y")
    return y


def workers_of(server: RunningServer) -> FrontendWorkers:
    assert server.server._workers
    return server.server._workers


def pids(server: RunningServer) -> set[int]:
    return set(workers_of(server).processes().values())


def open_calls(server: RunningServer) -> list[int]:
    """Return the number of calls that each frontend worker has forwarded without a response so far."""
    return [len(worker._end._replies) for worker in workers_of(server)._workers]


@contextmanager
def waiting(server: RunningServer, pool: ThreadPoolExecutor,
            gate: Gate) -> Iterator[list[tuple[float, Future[np.ndarray]]]]:
    """Send requests from clients on all frontend workers while the gate holds the first.

    Yields each client's number with the future of its response.
    """
    requested: list[tuple[float, Future[np.ndarray]]] = []
    with ExitStack() as stack:
        while len(requested) < SOME or 0 in open_calls(server):
            # a channel of its own: others share their connections
            client = stack.enter_context(triton.InferenceServerClient(
                server.address, channel_args=[("grpc.use_local_subchannel_pool", 1)]))
            x = np.full((1, 4), len(requested), np.float32)
            requested.append((x[0, 0], pool.submit(infer, client, x)))
            assert eventually(lambda: sum(open_calls(server)) == len(requested))
            assert gate.holds(1)
        yield requested


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process, from all its threads."""
    actual: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):         # it has ended meanwhile
            actual += map(int, (task / "children").read_text().split())
    return actual


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
