"""Tests of models with dynamic shapes behind the server, over a real socket."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from infer_server.backend import load_plan
from infer_server.engines import build_engine, capacity
from infer_server.engines.compiler import max_batch
from infer_server.engines.ir.graph import Array
from tests.engines.compiler.open_models import attention_net, by_onnx_runtime, pairs_net, random
from tests.engines.compiler.small_models import node, small_model
from tests.infer_server.endpoints.http.plain import CLOSE, ask, post
from tests.infer_server.serving import FRONTS, serving

MODEL, PAIRS = attention_net(), pairs_net()


def tokens(items: int, length: int, seed: int = 0) -> dict[str, Array]:
    return {"x": random(items, length, 16, seed=seed), "mask": np.zeros((items, length), np.float32)}


def answer(client: triton.InferenceServerClient, model: str, feeds: dict[str, Array]) -> Array:
    tensors = []
    for name, array in feeds.items():
        tensors.append(triton.InferInput(name, list(array.shape), "FP32"))
        tensors[-1].set_data_from_numpy(array)
    actual: Array = client.infer(model, tensors).as_numpy("y")
    return actual


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, model in (("tokens", MODEL), ("pairs", PAIRS)):
        (folder / name / "1").mkdir(parents=True)
        build_engine(model, timing=False, cache=False).save(folder / name / "1" / "model.plan")
    return folder


@pytest.mark.parametrize("specialise", ["wait", "background", "off"])
def test_requests_of_any_length_are_answered(repository: Path, specialise: str) -> None:
    (repository / "tokens" / "config.pbtxt").write_text(
        f'parameters {{ key: "specialise" value: {{ string_value: "{specialise}" }} }}\n'
        "dynamic_batching { max_queue_delay_microseconds: 2000 }")
    with serving(repository, load_plan) as server, triton.InferenceServerClient(server.address) as client:
        inputs = client.get_model_metadata("tokens").inputs
        assert {tensor.name: list(tensor.shape) for tensor in inputs} == {"x": [-1, -1, 16], "mask": [-1, -1]}
        feeds = [tokens(1, length, seed) for seed, length in enumerate((5, 9, 5, 128, 9, 5))]
        with ThreadPoolExecutor(len(feeds)) as pool:        # lengths mixed in the queue: only equal ones share a batch
            actual = list(pool.map(lambda feed: answer(client, "tokens", feed), feeds))
        for feed, y in zip(feeds, actual, strict=True):
            np.testing.assert_allclose(y, by_onnx_runtime(MODEL, feed)["y"], rtol=1e-4, atol=1e-4)
        with pytest.raises(InferenceServerException, match="'T' is one extent, but input 'x' has 5 there"):
            answer(client, "tokens", {**tokens(1, 5), "mask": tokens(1, 6)["mask"]})


def test_an_onnx_file_is_built_and_answers_lengths_that_the_build_did_not_meet(tmp_path: Path) -> None:
    (tmp_path / "tokens" / "1").mkdir(parents=True)
    onnx.save(MODEL, tmp_path / "tokens" / "1" / "model.onnx")
    with serving(tmp_path, load_plan) as server, triton.InferenceServerClient(server.address) as client:
        feed = tokens(1, 5)
        np.testing.assert_allclose(answer(client, "tokens", feed), by_onnx_runtime(MODEL, feed)["y"], 1e-4, 1e-4)


@pytest.mark.parametrize("specialise", ["wait", "off"])
def test_a_batch_that_is_too_large_for_memory_at_a_shape_does_not_keep_one_item_of_it_from_being_answered(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, specialise: str) -> None:
    model = small_model([node("Relu", "x", "y")], {"x": ["N", "H", "W"]}, ["y"])
    (tmp_path / "large" / "1").mkdir(parents=True)
    build_engine(model, timing=False, cache=False, max_batch=256).save(tmp_path / "large" / "1" / "model.plan")
    (tmp_path / "large" / "config.pbtxt").write_text(
        f'max_batch_size: 256 parameters {{ key: "specialise" value: {{ string_value: "{specialise}" }} }}')
    for module in (max_batch, capacity):
        monkeypatch.setattr(module, "memory_limit", lambda: 100_000_000)
    with serving(tmp_path, load_plan) as server, triton.InferenceServerClient(server.address) as client:
        for items in (1, 40):       # of 1 MB, in and out
            feed = {"x": random(items, 500, 500)}
            np.testing.assert_array_equal(answer(client, "large", feed), feed["x"].clip(0))


def test_a_model_without_a_batch_takes_open_extents_too(repository: Path) -> None:
    with serving(repository, load_plan) as server, triton.InferenceServerClient(server.address) as client:
        for rows, columns in ((3, 4), (1, 1), (3, 4)):
            feeds = {"a": random(rows, 6), "b": random(columns, 6, seed=1)}
            np.testing.assert_allclose(answer(client, "pairs", feeds), feeds["a"] @ feeds["b"].T, rtol=1e-4, atol=1e-4)


def test_dims_of_a_configuration_may_fix_what_the_model_leaves_open(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens" / "1").mkdir(parents=True)
    (tmp_path / "tokens" / "1" / "model.plan").write_bytes((repository / "tokens" / "1" / "model.plan").read_bytes())
    (tmp_path / "tokens" / "config.pbtxt").write_text(
        'input { name: "x" data_type: TYPE_FP32 dims: [7, 16] } input { name: "mask" data_type: TYPE_FP32 dims: [7] }')
    with serving(tmp_path, load_plan) as server, triton.InferenceServerClient(server.address) as client:
        feeds = tokens(2, 7)
        np.testing.assert_allclose(answer(client, "tokens", feeds), by_onnx_runtime(MODEL, feeds)["y"], rtol=1e-4,
                                   atol=1e-4)
        with pytest.raises(InferenceServerException, match="unexpected shape"):
            answer(client, "tokens", tokens(2, 8))


@pytest.mark.parametrize("front", FRONTS)
def test_a_whole_tensor_may_be_empty_and_a_batch_may_not(tmp_path: Path, front: str) -> None:
    rows, opened = (small_model([node("Relu", "x", "y")], {"x": shape}, ["y"]) for shape in (["N", 3], ["N", "M"]))
    whole = "max_batch_size: 0 input { name: 'x' data_type: TYPE_FP32 dims: [ -1, %s ] }"
    for name, model, config in (("whole", rows, whole % 3), ("open", opened, whole % -1),
                                ("batch", rows, "max_batch_size: 4")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
        build_engine(model, timing=False, cache=False).save(tmp_path / name / "1" / "model.plan")
    nothing, two = np.zeros((0, 3), np.float32), random(2, 3)
    with (serving(tmp_path, load_plan, grpc_front=front) as server,
          triton.InferenceServerClient(server.address) as client):
        assert answer(client, "whole", {"x": nothing}).shape == (0, 3)
        for columns in (5, 0):
            assert answer(client, "open", {"x": np.zeros((0, columns), np.float32)}).shape == (0, columns)
        np.testing.assert_array_equal(answer(client, "whole", {"x": two}), np.maximum(two, 0))
        with pytest.raises(InferenceServerException, match=r"must be >= 1 for 'batch', got 0"):
            answer(client, "batch", {"x": nothing})
        body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [0, 3], "data": []}]}'
        reply = ask(server, post("/v2/models/whole/infer", body, CLOSE))
    assert b'"shape":[0,3],"data":[]' in reply


def test_a_model_may_have_tensors_without_a_batch_beside_those_with_one(tmp_path: Path) -> None:
    """Such a model executes each request alone."""
    model = small_model([node("Mul", "x scale", "m"), node("Add", "m offset", "y"),
                         node("Mul", "scale scale", "squares"), node("Neg", "z", "minus")],
                        {"x": ["N", 4], "scale": [4], "offset": [], "z": ["N"]}, ["y", "minus", "squares"])
    for name, config in (("mixed", ""), ("asked", "max_batch_size: 8 dynamic_batching { }")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
        build_engine(model, timing=False, cache=False, max_batch=8).save(tmp_path / name / "1" / "model.plan")
    scale = np.float32([1, 2, 3, 4])

    def asked(items: int, other: int = 0) -> None:
        feeds = {"x": random(items, 4, seed=items), "scale": scale + items, "offset": np.array(items, np.float32),
                 "z": random(other or items)}
        tensors = [triton.InferInput(name, list(array.shape), "FP32") for name, array in feeds.items()]
        for tensor, array in zip(tensors, feeds.values(), strict=True):
            tensor.set_data_from_numpy(array)
        actual = client.infer("mixed", tensors)
        np.testing.assert_allclose(actual.as_numpy("y"), feeds["x"] * feeds["scale"] + items, rtol=1e-6)
        np.testing.assert_array_equal(actual.as_numpy("minus"), -feeds["z"])
        np.testing.assert_array_equal(actual.as_numpy("squares"), feeds["scale"] ** 2)

    with (serving(tmp_path, load_plan) as server, triton.InferenceServerClient(server.address) as client,
          ThreadPoolExecutor(8) as threads):
        assert client.get_model_config("mixed").config.max_batch_size == 0
        shapes = {tensor.name: list(tensor.shape) for tensor in client.get_model_metadata("mixed").inputs}
        assert shapes == {"x": [-1, 4], "scale": [4], "offset": [], "z": [-1]}
        list(threads.map(asked, [1, 8, 3, 2] * 6))
        for items, other, why in ((9, 9, "must be <= 8"), (2, 3, "for 'mixed': it has 3")):
            with pytest.raises(InferenceServerException, match=why):
                asked(items, other)
        assert "max_batch_size: input 'scale' of shape [4] has no batch axis in front" in server.server.failures()[
            "asked version 1"]
