"""Tests of plans that are programs or whose shapes depend on input values, behind the server."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from infer_server.backend import load_plan
from infer_server.engines import build_engine
from infer_server.engines.ir.graph import Array
from tests.engines.compiler.open_models import by_onnx_runtime, random
from tests.engines.compiler.program_models import chosen_rows
from tests.engines.compiler.test_deciding_inputs import branching, rated
from tests.infer_server.serving import serving

TYPES = {"float32": "FP32", "int64": "INT64"}


def answer(client: triton.InferenceServerClient, model: str, feeds: dict[str, Array]) -> Array:
    tensors = []
    for name, array in feeds.items():
        tensors.append(triton.InferInput(name, list(array.shape), TYPES[array.dtype.name]))
        tensors[-1].set_data_from_numpy(array)
    actual: Array = client.infer(model, tensors).as_numpy("y")
    return actual


def test_results_have_as_many_rows_as_the_data_say(tmp_path: Path) -> None:
    models = {"rows": chosen_rows(), "rates": branching()}
    for name, model in models.items():
        (tmp_path / name / "1").mkdir(parents=True)
        build_engine(model, timing=False, cache=False).save(tmp_path / name / "1" / "model.plan")
    feeds = [("rows", {"x": random(9, 6)}), ("rows", {"x": random(5, 6, seed=8)}), ("rates", rated(1, 8000)),
             ("rates", rated(1, 16000))]
    with serving(tmp_path, load_plan) as server, triton.InferenceServerClient(server.address) as client:
        (output,) = client.get_model_metadata("rows").outputs
        assert list(output.shape)[-1:] in ([4], [-1])
        for name, feed in feeds:
            np.testing.assert_allclose(answer(client, name, feed), by_onnx_runtime(models[name], feed)["y"], rtol=1e-4,
                                       atol=1e-4, strict=True)


WORDS = """max_batch_size: 4 dynamic_batching { }
    input { name: "words" data_type: TYPE_STRING dims: 3 } output { name: "y" data_type: TYPE_STRING dims: 3 }"""


def doubled_words() -> onnx.ModelProto:
    """Return a model that doubles numbers given as texts."""
    return helper.make_model(helper.make_graph(
        [helper.make_node("Cast", ["words"], ["x"], to=TensorProto.INT32), helper.make_node("Add", ["x", "x"], ["s"]),
         helper.make_node("Cast", ["s"], ["y"], to=TensorProto.STRING)], "doubled",
        [helper.make_tensor_value_info("words", TensorProto.STRING, ["N", 3])],
        [helper.make_tensor_value_info("y", TensorProto.STRING, ["N", 3])]),
        opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_a_program_has_the_batch_that_its_configuration_says_and_each_request_is_executed_by_itself(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "words" / "1").mkdir(parents=True)
    (tmp_path / "words" / "config.pbtxt").write_text(WORDS)
    onnx.save(doubled_words(), tmp_path / "words" / "1" / "model.onnx")

    def doubled(items: int) -> list[list[int]]:
        tensor = triton.InferInput("words", [items, 3], "BYTES")
        tensor.set_data_from_numpy(np.full((items, 3), b"%d" % items, object))
        return [list(map(int, row)) for row in client.infer("words", [tensor]).as_numpy("y")]

    with (serving(tmp_path, load_plan) as server, triton.InferenceServerClient(server.address) as client,
          ThreadPoolExecutor(8) as threads):
        assert ("words: dynamic_batching is ignored: requests are executed one by one, because the model is a program"
                in caplog.text)
        sizes = [1, 2, 3, 4] * 8
        assert list(threads.map(doubled, sizes)) == [[[2 * items] * 3] * items for items in sizes]
        with pytest.raises(InferenceServerException, match=r"batch-size must be <= 4"):
            doubled(5)
        (actual,) = client.get_inference_statistics("words").model_stats
    assert (actual.inference_count, actual.execution_count) == (sum(sizes), len(sizes))


def test_a_program_without_an_open_extent_in_front_has_no_batch(tmp_path: Path) -> None:
    (tmp_path / "words" / "1").mkdir(parents=True)
    (tmp_path / "words" / "config.pbtxt").write_text(WORDS)
    model = doubled_words()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, tmp_path / "words" / "1" / "model.onnx")
    with serving(tmp_path, load_plan) as server:
        assert "max_batch_size: 4 requested, but the engine was built for no batch axis" in server.server.failures()[
            "words version 1"]


def test_strings_that_a_program_makes_are_found_in_the_cache_of_the_model_that_reads_them(tmp_path: Path) -> None:
    plan = build_engine(doubled_words(), timing=False, cache=False)
    for name, cached in (("first", ""), ("second", "response_cache { enable: true }")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(WORDS + cached)
        plan.save(tmp_path / name / "1" / "model.plan")
    (tmp_path / "both" / "1").mkdir(parents=True)
    steps = """ensemble_scheduling {
        step { model_name: "first" input_map { key: "words" value: "words" } output_map { key: "y" value: "twice" } }
        step { model_name: "second" input_map { key: "words" value: "twice" } output_map { key: "y" value: "y" } } }"""
    (tmp_path / "both" / "config.pbtxt").write_text(WORDS.replace("dynamic_batching { }", steps))
    tensor = triton.InferInput("words", [1, 3], "BYTES")
    tensor.set_data_from_numpy(np.array([["1", "2", "3"]], object))
    with serving(tmp_path, load_plan) as server, triton.InferenceServerClient(server.address) as client:
        for _ in range(2):
            assert client.infer("both", [tensor]).as_numpy("y").tolist() == [[b"4", b"8", b"12"]]
        assert server.server.repository.find("second").statistics.snapshot().cache_hit.count == 1
