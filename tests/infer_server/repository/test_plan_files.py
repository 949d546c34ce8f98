"""Plan files may be replaced or removed while their models are served, also under load."""
from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from infer_server.engines.plan.file import write_plan
from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.engines.plan.test_private_copy import plan_of
from tests.infer_server.cli.test_serve import process
from tests.infer_server.endpoints.test_serving import eventually

SIZE = 32 << 20
ROUNDS = 12


def answer(client: triton.InferenceServerClient) -> list[int]:
    tensor = triton.InferInput("x", [1, 2, 4], "INT32")
    tensor.set_data_from_numpy(np.zeros((1, 2, 4), np.int32))
    values: list[int] = client.infer("m", [tensor]).as_numpy("y")[0, 0].tolist()
    return values


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with the model m, which computes y = x + 5."""
    path = tmp_path / "models" / "m" / "1" / "model.plan"
    path.parent.mkdir(parents=True)
    write_plan(plan_of(5, SIZE), path)
    return tmp_path / "models"


@contextmanager
def asking(address: str, threads: int) -> Iterator[set[str]]:
    """Send requests from `threads` clients while the body runs; yields the set of their errors."""
    received, done = set(), threading.Event()

    def ask() -> None:
        with triton.InferenceServerClient(address) as client:
            while not done.is_set():
                try:
                    received.add(str(answer(client)))
                except Exception as error:      # an answer, too, and none that is wanted
                    received.add(repr(error))

    clients = [threading.Thread(target=ask) for _ in range(threads)]
    for thread in clients:
        thread.start()
    yield received
    done.set()
    for thread in clients:
        thread.join()


def test_a_served_plan_that_is_copied_over_written_in_place_or_emptied_is_served_on(repository: Path,
                                                                                    tmp_path: Path) -> None:
    path = repository / "m" / "1" / "model.plan"
    write_plan(plan_of(6, SIZE), tmp_path / "other.plan")
    with process(repository) as (server, address), triton.InferenceServerClient(address) as client:
        assert eventually(lambda: client.is_model_ready("m"), TIMEOUT_SECS)
        with asking(address, 4) as received:
            for _ in range(3):
                shutil.copyfile(tmp_path / "other.plan", path)
                with open(path, "r+b") as file:
                    file.write(bytes(SIZE))
                os.truncate(path, 0)
        assert received == {str([-7, 5, 5, 5, 5, -7])}
        assert server.poll() is None


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not tell what is resident")
def test_an_unloaded_model_gives_its_memory_back_at_once(repository: Path) -> None:
    with (process(repository, "--model-control-mode", "explicit") as (server, address),
          triton.InferenceServerClient(address) as client):
        assert eventually(client.is_server_live, TIMEOUT_SECS)
        loaded = []
        for _ in range(ROUNDS):
            client.load_model("m")
            assert answer(client)[1] == 5
            loaded.append(resident(server.pid))
            client.unload_model("m")
        assert max(loaded) < 1.1 * loaded[0]
        assert eventually(lambda: resident(server.pid) < loaded[0] - 0.9 * SIZE)
