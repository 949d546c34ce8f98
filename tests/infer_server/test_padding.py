"""Requests of different lengths share a batch if the model ignores padding."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto

from infer_server.backend import load_plan
from infer_server.engines import build_engine
from infer_server.engines.ir.graph import Array
from infer_server.repository.kinds.padding import Padding
from tests.engines.compiler.open_models import attention_net, by_onnx_runtime, node, pairs_net, random
from tests.engines.compiler.small_models import small_model
from tests.infer_server.serving import serving

PAD = 'parameters { key: "ragged" value { string_value: "pad" } }\n'


def masked_net() -> onnx.ModelProto:
    """Return an attention that a mask of integers restricts, with an output per token and a mean over the mask."""
    model = small_model(
        [node("Cast", "mask", "kept", to=TensorProto.FLOAT), node("Sub", "one kept", "gone"),
         node("Mul", "gone far", "hidden"), node("Unsqueeze", "hidden first", "row"), node("MatMul", "x w", "q"),
         node("Transpose", "x", "k", perm=[0, 2, 1]), node("MatMul", "q k", "scores"),
         node("Add", "scores row", "masked"), node("Softmax", "masked", "p", axis=-1), node("MatMul", "p x", "tokens"),
         node("Unsqueeze", "kept last", "column"), node("Mul", "tokens column", "seen"),
         node("ReduceSum", "seen first", "sum", keepdims=0), node("ReduceSum", "kept first", "count", keepdims=1),
         node("Div", "sum count", "mean")],
        {"x": ["N", "T", 16], "mask": ["N", "T"]}, ["tokens", "mean"],
        {"w": random(16, 16) / 4, "one": np.float32(1), "far": np.float32(-1e4), "first": np.array([1]),
         "last": np.array([2])})
    next(one for one in model.graph.input if one.name == "mask").type.tensor_type.elem_type = TensorProto.INT64
    return model


MASKED = masked_net()


def save(model: onnx.ModelProto, folder: Path, name: str, config: str) -> None:
    (folder / name / "1").mkdir(parents=True)
    build_engine(model, timing=False, cache=False).save(folder / name / "1" / "model.plan")
    (folder / name / "config.pbtxt").write_text(config)


def asked(client: triton.InferenceServerClient, feeds: dict[str, Array]) -> dict[str, Array]:
    tensors = []
    for name, array in feeds.items():
        tensors.append(triton.InferInput(name, list(array.shape), "FP32" if array.dtype == np.float32 else "INT64"))
        tensors[-1].set_data_from_numpy(array)
    actual = client.infer("masked", tensors)
    return {name: actual.as_numpy(name) for name in ("tokens", "mean")}


def test_requests_of_different_lengths_share_a_batch(tmp_path: Path) -> None:
    save(MASKED, tmp_path, "masked", PAD + 'parameters { key: "buckets" value { string_value: "8,32" } }\n'
         "dynamic_batching { max_queue_delay_microseconds: 300000  preferred_batch_size: 6 }")
    feeds = [{"x": random(items, length, 16, seed=length), "mask": np.ones((items, length), np.int64)}
             for items, length in ((1, 9), (2, 17), (1, 31), (1, 32), (1, 12))]
    feeds[1]["mask"][1, 11:] = 0
    with serving(tmp_path, load_plan) as server, triton.InferenceServerClient(server.address) as client:
        with ThreadPoolExecutor(len(feeds)) as pool:
            actual = list(pool.map(lambda feed: asked(client, feed), feeds))
        single = {"x": random(1, 40, 16), "mask": np.ones((1, 40), np.int64)}       # longer than each bucket
        actual.append(asked(client, single))
        statistics = client.get_inference_statistics("masked").model_stats[0]
    assert statistics.execution_count < statistics.inference_count
    for feed, outputs in zip([*feeds, single], actual, strict=True):
        for name, expected in by_onnx_runtime(MASKED, feed).items():
            assert outputs[name].shape == expected.shape
            np.testing.assert_allclose(outputs[name], expected, 1e-4, 1e-4)


def test_an_extent_falls_into_the_next_bucket() -> None:
    padding = Padding({"x": 2}, {}, (8, 12, 16))
    assert [padding.bucket(extent) for extent in (1, 8, 9, 16, 17)] == [8, 8, 12, 16, 17]
    assert padding.padded("x", (3, 9, 4)) == (3, 12, 4)


@pytest.mark.parametrize("model, parameters, message", [
    (attention_net(), PAD, "the model does not ignore padding by zeros: output 'y' changes by"),
    (pairs_net(), PAD, "requests of the model are not batched"),
    (small_model([node("Relu", "x", "y"), node("Relu", "z", "w")], {"x": ["N", "T", 4], "z": ["N", "U", 4]},
                 ["y", "w"]), PAD, "needs one open extent in every input, and the model has T, U"),
    (MASKED, 'parameters { key: "ragged" value { string_value: "flat" } }', "expected pad, got 'flat'"),
    (MASKED, 'parameters { key: "buckets" value { string_value: "8" } }', "buckets: it needs the parameter ragged"),
    (MASKED, PAD + 'parameters { key: "buckets" value { string_value: "8,x" } }', "expected positive numbers")])
def test_what_cannot_be_padded_is_refused(tmp_path: Path, model: onnx.ModelProto, parameters: str,
                                          message: str) -> None:
    save(model, tmp_path, "masked", parameters)
    with serving(tmp_path, load_plan) as server, triton.InferenceServerClient(server.address) as client:
        (status,) = client.get_model_repository_index().models
    assert message in status.reason
