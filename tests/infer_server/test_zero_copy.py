"""Large inputs are read in the requests' own memory, over each protocol, with the results of the engine."""
from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tritonclient.utils import shared_memory

from infer_server.backend import load_plan
from infer_server.batching import engine_executor
from infer_server.engines import Engine, build_engine, load_engine
from tests.infer_server.serving import FRONTS, WORKERS, RunningServer, serving

SHAPE = (3, 80, 80)             # 75 KiB an item
CLIENTS, REQUESTS = 4, 12       # requests of each client
Float32s = NDArray[np.float32]


def pictures(count: int, seed: int) -> Float32s:
    """Return images of integers, so that every sum is exact."""
    return np.random.default_rng(seed).integers(-8, 8, (count, *SHAPE)).astype(np.float32)


def write_plan(path: Path) -> None:
    """Write a plan from [batch, 3, 80, 80] and [batch, 8], which is too small to be read in place, to [batch, 8]."""
    weight = np.random.default_rng(0).integers(-4, 4, (8, 3, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["image", "w"], ["conv"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
         helper.make_node("Relu", ["conv"], ["relu"]),
         helper.make_node("ReduceSum", ["relu", "axes"], ["sums"], keepdims=0),
         helper.make_node("Add", ["sums", "more"], ["y"])],
        "pictures", [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", *SHAPE]),
                     helper.make_tensor_value_info("more", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array([2, 3]), "axes")])
    path.parent.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path.parents[2] / "pictures.onnx")
    build_engine(path.parents[2] / "pictures.onnx", max_batch=8, timing=False, cache=False).save(path)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "pictures" / "1" / "model.plan"
    write_plan(path)
    (path.parents[1] / "config.pbtxt").write_text("""
        max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 20000 }
        instance_group [ { count: 2, kind: KIND_CPU } ]""")
    return path


@pytest.fixture(scope="module")
def engine(plan: Path) -> Engine:
    loaded = load_engine(plan)
    assert isinstance(loaded, Engine)
    return loaded


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes of each tensor that is copied alone; small ones of a batch may be copied together."""
    bytes_copied: list[int] = []
    copy = engine_executor.copy_into

    def recorded(slots: NDArray[Any], items: NDArray[Any]) -> None:
        bytes_copied.append(items.nbytes)
        copy(slots, items)
    monkeypatch.setattr(engine_executor, "copy_into", recorded)
    return bytes_copied


@pytest.fixture(scope="module", params=[*FRONTS, *WORKERS])
def server(request: pytest.FixtureRequest, plan: Path) -> Iterator[RunningServer]:
    with serving(plan.parents[2], load_plan, grpc_front=request.param, allow_client_shm=True) as running:
        yield running


def client_of(server: RunningServer, protocol: Any) -> Any:
    port = server.ports.grpc if protocol is tritonclient.grpc else server.ports.http
    return protocol.InferenceServerClient(f"127.0.0.1:{port}")


def inputs_of(protocol: Any, image: Float32s, more: Float32s) -> list[Any]:
    tensors = [protocol.InferInput(name, list(array.shape), "FP32")
               for name, array in (("image", image), ("more", more))]
    for tensor, array in zip(tensors, (image, more), strict=True):
        tensor.set_data_from_numpy(array)
    return tensors


@pytest.mark.parametrize("protocol", [tritonclient.grpc, tritonclient.http])
def test_each_request_of_many_in_a_batch_has_its_own_answer(server: RunningServer, protocol: Any, engine: Engine,
                                                            copied: list[int]) -> None:
    def ask(client_number: int) -> None:
        with client_of(server, protocol) as client:
            for number in range(REQUESTS):
                image = pictures(1 + (number + client_number) % 3, seed=100 * client_number + number)
                more = image[:, 0, 0, :8].copy()
                # The id's length moves the tensors of a message to every alignment.
                answer = client.infer("pictures", inputs_of(protocol, image, more), request_id="i" * number)
                expected = engine.run({"image": image, "more": more})["y"]
                np.testing.assert_array_equal(answer.as_numpy("y"), expected)

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, range(CLIENTS)))
    large = [count for count in copied if count >= 1 << 16]
    assert len(large) < CLIENTS * REQUESTS // 2                     # where the next page may not be there


@pytest.mark.parametrize("protocol", [tritonclient.grpc, tritonclient.http])
def test_what_lies_in_shared_memory_is_answered_alike(server: RunningServer, protocol: Any, engine: Engine) -> None:
    image, more = pictures(2, seed=1), pictures(2, seed=2)[:, 0, 0, :8].copy()
    key = f"/in_place_{server.ports.grpc}"
    handle = shared_memory.create_shared_memory_region("r", key, image.nbytes)
    try:
        shared_memory.set_shared_memory_region(handle, [image])
        with client_of(server, protocol) as client:
            client.register_system_shared_memory("r", key, image.nbytes)
            tensors = inputs_of(protocol, image, more)
            tensors[0] = protocol.InferInput("image", list(image.shape), "FP32")
            tensors[0].set_shared_memory("r", image.nbytes)
            answer = client.infer("pictures", tensors).as_numpy("y")
            client.unregister_system_shared_memory()
    finally:
        shared_memory.destroy_shared_memory_region(handle)
    np.testing.assert_array_equal(answer, engine.run({"image": image, "more": more})["y"])
