"""Clients truncate and overwrite their shared memory while requests in it are served."""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from infer_server.backend import load_plan
from infer_server.engines import Engine, load_engine
from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.infer_server.serving import FRONTS, WORKERS, RunningServer, serving
from tests.infer_server.test_zero_copy import Float32s, client_of, inputs_of, pictures, write_plan

FULL = 8                        # items of a batch, which waits until it has so many
# Models whose requests are looked at twice: as a key and as an input, ...
COPIED = {"cached": "max_batch_size: 8 response_cache { enable: true }",
          "in_sequence": """max_batch_size: 8 sequence_batching { direct { } }"""}
PROTOCOLS = pytest.mark.parametrize("protocol", [tritonclient.grpc, tritonclient.http])


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "pictures" / "1" / "model.plan"
    write_plan(path)
    (path.parents[1] / "config.pbtxt").write_text(f"""
        max_batch_size: {FULL} dynamic_batching {{ max_queue_delay_microseconds: {int(TIMEOUT_SECS * 1e6)} }}""")
    for name, config in COPIED.items():
        other = path.parents[2] / name
        (other / "1").mkdir(parents=True)
        (other / "1" / "model.plan").write_bytes(path.read_bytes())
        (other / "config.pbtxt").write_text(config)
    return path


@pytest.fixture(scope="module")
def engine(plan: Path) -> Engine:
    loaded = load_engine(plan)
    assert isinstance(loaded, Engine)
    return loaded


@pytest.fixture(scope="module", params=[*FRONTS, *WORKERS])
def server(request: pytest.FixtureRequest, plan: Path) -> Iterator[RunningServer]:
    with serving(plan.parents[2], load_plan, grpc_front=request.param, allow_client_shm=True) as running:
        yield running


class Memory:
    """Shared-memory region that contains an image."""

    def __init__(self, server: RunningServer, protocol: Any, name: str, image: Float32s) -> None:
        self.image, self.name = image, name
        self.key = f"/client_{name}_{os.getpid()}"
        self._server, self._protocol = server, protocol
        self.handle = shm.create_shared_memory_region(name, self.key, image.nbytes)
        self.write(image)
        self.register()

    def register(self) -> None:
        with client_of(self._server, self._protocol) as client:
            client.register_system_shared_memory(self.name, self.key, self.image.nbytes)

    def unregister(self) -> None:
        with client_of(self._server, self._protocol) as client:
            client.unregister_system_shared_memory(self.name)

    @property
    def more(self) -> Float32s:
        return self.image[:, 0, 0, :8].copy()

    def write(self, image: Float32s) -> None:
        shm.set_shared_memory_region(self.handle, [image])

    def truncate(self, size: int) -> None:
        os.truncate(f"/dev/shm{self.key}", size)

    def ask(self) -> Float32s:
        """Infer with a client per thread, as the HTTP client requires."""
        protocol = self._protocol
        tensors = inputs_of(protocol, self.image, self.more)
        tensors[0] = protocol.InferInput("image", list(self.image.shape), "FP32")
        tensors[0].set_shared_memory(self.name, self.image.nbytes)
        with client_of(self._server, protocol) as client:
            answer: Float32s = client.infer("pictures", tensors).as_numpy("y")
        return answer

    def close(self) -> None:
        self.unregister()
        shm.destroy_shared_memory_region(self.handle)


@contextmanager
def memories(server: RunningServer, protocol: Any, *images: Float32s) -> Iterator[list[Memory]]:
    actual = [Memory(server, protocol, f"r{i}", image) for i, image in enumerate(images)]
    try:
        yield actual
    finally:
        for memory in actual:
            memory.close()


def wait_until_queued(server: RunningServer, requests: int) -> None:
    end = time.monotonic() + TIMEOUT_SECS
    while server.server.repository.find("pictures").pending != requests and time.monotonic() < end:
        time.sleep(0.001)
    assert server.server.repository.find("pictures").pending == requests


def test_only_models_that_read_a_request_once_read_it_in_its_clients_memory(plan: Path) -> None:
    with serving(plan.parents[2], load_plan, allow_client_shm=True) as running:
        actual = {name: running.server.repository.find(name).zero_copy_devices for name in ("pictures", *COPIED)}
    assert actual == {"pictures": {None}, **dict.fromkeys(COPIED, frozenset())}


@PROTOCOLS
def test_a_file_that_is_cut_short_before_its_batch_fails_its_own_request_alone(
        server: RunningServer, protocol: Any, engine: Engine) -> None:
    short, whole = pictures(2, seed=1), pictures(FULL - 2, seed=2)
    with memories(server, protocol, short, whole) as (cut, kept), ThreadPoolExecutor(1) as pool:
        calls: Future[Float32s] = pool.submit(cut.ask)
        wait_until_queued(server, 1)
        cut.truncate(5000)
        np.testing.assert_array_equal(kept.ask(), engine.run({"image": whole, "more": kept.more})["y"])
        with pytest.raises(InferenceServerException, match="'r0' is shorter than it was when it was registered"):
            calls.result(TIMEOUT_SECS)
        cut.truncate(cut.image.nbytes)              # long again, and read again
        cut.write(short)
        calls = pool.submit(cut.ask)
        wait_until_queued(server, 1)
        kept.ask()
        np.testing.assert_array_equal(calls.result(TIMEOUT_SECS), engine.run({"image": short, "more": cut.more})["y"])


@PROTOCOLS
def test_a_client_that_writes_meanwhile_and_leaves_its_region_harms_its_own_answer_alone(
        server: RunningServer, protocol: Any, engine: Engine) -> None:
    written, whole = pictures(2, seed=1), pictures(FULL - 2, seed=2)
    with memories(server, protocol, written, whole) as (changed, kept), ThreadPoolExecutor(1) as pool:
        requested: Future[Float32s] = pool.submit(changed.ask)
        wait_until_queued(server, 1)
        changed.write(np.full_like(written, np.nan))
        changed.unregister()
        np.testing.assert_array_equal(kept.ask(), engine.run({"image": whole, "more": kept.more})["y"])
        assert requested.result(TIMEOUT_SECS).shape == (2, 8)


@PROTOCOLS
def test_files_that_are_cut_short_all_the_time_harm_nobody_else(
        server: RunningServer, protocol: Any, engine: Engine) -> None:
    stop = threading.Event()

    def toggle(memory: Memory) -> None:
        while not stop.is_set():
            for size in (0, memory.image.nbytes - 1, memory.image.nbytes):
                memory.truncate(size)

    full = pictures(FULL, seed=1)
    with memories(server, protocol, full, full) as (cut, kept), ThreadPoolExecutor(2) as pool:
        toggling = pool.submit(toggle, cut)

        def ask_for_what_is_cut() -> None:
            for _ in range(15):
                try:
                    cut.unregister()
                    cut.register()
                    cut.ask()
                except InferenceServerException as error:
                    assert any(said in str(error) for said in ("shorter than it was", "invalid args", "Unable to find"))
        asking = pool.submit(ask_for_what_is_cut)
        expected = engine.run({"image": full, "more": kept.more})["y"]
        while not asking.done():
            np.testing.assert_array_equal(kept.ask(), expected)
        stop.set()
        asking.result(TIMEOUT_SECS)
        toggling.result(TIMEOUT_SECS)
