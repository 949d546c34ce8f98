"""Tests of typical model configurations, through Triton's client."""
from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from infer_server.batching.cache import ResponseCache
from infer_server.batching.engine_executor import EngineExecutor
from infer_server.cli import serve
from infer_server.repository.roots import LocalFolder
from scripts.testing.numpy_engine import check, load_numpy_engine, write_model
from tests.infer_server.serving import serving


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton.InferenceServerClient]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "whole", config="max_batch_size: 0")
    write_model(folder, "whole_dependent", config="max_batch_size: 0", dependence="it normalises over the items")
    write_model(folder, "split", config='parameters { key: "split_requests" value { string_value: "true" } }')
    write_model(folder, "optional", kind="two", metadata={"defaults": {"x2": [[1, 2, 3, 4]]}})
    write_model(folder, "valueless", kind="two", config="""
        input { name: "x2" data_type: TYPE_FP32 dims: 4 optional: true }""")
    write_model(folder, "reshaped", config="""
        max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: [2, 2] reshape { shape: 4 } }
        output { name: "y" data_type: TYPE_FP32 dims: [1, 4] reshape { shape: 4 } }""")
    write_model(folder, "scalar", shape=[], max_batch=0, config="""
        max_batch_size: 0
        input { name: "x" data_type: TYPE_FP32 dims: 1 reshape { } }
        output { name: "y" data_type: TYPE_FP32 dims: 1 reshape { } }""")
    with serving(folder) as running, triton.InferenceServerClient(running.address) as connected:
        yield connected


def test_an_optional_input_that_a_request_leaves_out_has_the_models_value(
        client: triton.InferenceServerClient) -> None:
    def ask_for_sum(*names: str) -> list[list[float]]:
        tensors = []
        for name in names:
            tensors.append(triton.InferInput(name, [2, 4], "FP32"))
            tensors[-1].set_data_from_numpy(np.full((2, 4), 10, np.float32))
        total: list[list[float]] = client.infer("optional", tensors).as_numpy("sum").tolist()
        return total

    assert [tensor.optional for tensor in client.get_model_config("optional").config.input] == [False, True]
    assert ask_for_sum("x") == [[11, 12, 13, 14]] * 2
    assert ask_for_sum("x", "x2") == [[20] * 4] * 2
    with pytest.raises(InferenceServerException, match=r"missing required input\(s\) \['x'\]"):
        ask_for_sum("x2")
    with pytest.raises(InferenceServerException, match="'x2': optional, but the plan has no value for it"):
        client.infer("valueless", [])


def ask(client: triton.InferenceServerClient, model: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    tensor = triton.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    y: NDArray[np.float32] = client.infer(model, [tensor]).as_numpy("y")
    return y


@pytest.mark.parametrize("model", ["whole", "split"])
def test_a_request_of_more_items_than_the_engine_takes_is_executed_in_pieces(
        client: triton.InferenceServerClient, model: str) -> None:
    x = np.arange(84, dtype=np.float32).reshape(21, 4)
    np.testing.assert_array_equal(ask(client, model, x), 2 * x + 1)
    assert client.get_model_metadata("whole").inputs[0].shape == [-1, 4]


def test_items_that_depend_on_each_other_are_not_cut(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match=r"must be <= 8"):
        ask(client, "whole_dependent", np.ones((9, 4), np.float32))


def test_dynamic_batching_merges_no_requests_whose_items_depend_on_each_other(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, "m", config="dynamic_batching {}", dependence="it normalises over the items", seconds=0.05)
    with (serving(tmp_path) as running, triton.InferenceServerClient(running.address) as client,
          ThreadPoolExecutor(4) as pool):
        x = np.ones((2, 4), np.float32)
        for answer in pool.map(lambda _: ask(client, "m", x), range(4)):
            np.testing.assert_array_equal(answer, 2 * x + 1)
        actual, = client.get_inference_statistics("m").model_stats
        assert (actual.inference_count, actual.execution_count) == (8, 4)
    assert "executed one by one, because the items of a batch depend on each other (it normalises" in caplog.text


def test_clients_see_the_shapes_of_dims_and_the_model_those_of_reshape(client: triton.InferenceServerClient) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    np.testing.assert_array_equal(ask(client, "reshaped", x), (2 * x + 1).reshape(3, 1, 4))


def test_a_scalar_of_the_model_is_a_tensor_of_one_element_for_clients(client: triton.InferenceServerClient) -> None:
    np.testing.assert_array_equal(ask(client, "scalar", np.ones(1, np.float32)), [3])


def test_equal_requests_are_executed_once_where_responses_are_cached(tmp_path: Path) -> None:
    write_model(tmp_path, "m", config="response_cache { enable: true }")
    with (serving(tmp_path, explicit_control=True, load_models=("m",)) as running,
          triton.InferenceServerClient(running.address) as client):
        for value in (1, 2, 1, 1):
            y = ask(client, "m", np.full((1, 4), value, np.float32))
            assert (y == 2 * value + 1).all()
        stats = client.get_inference_statistics("m").model_stats[0]
        assert (stats.execution_count, stats.inference_stats.success.count) == (2, 4)
        assert (stats.inference_stats.cache_hit.count, stats.inference_stats.cache_miss.count) == (2, 2)
        (tmp_path / "m" / "1" / "model.plan").touch()
        client.load_model("m")
        ask(client, "m", np.ones((1, 4), np.float32))
        assert client.get_inference_statistics("m").model_stats[0].execution_count == 1, "nothing of before"


def test_the_cache_is_bounded_and_keeps_what_is_used() -> None:
    cache, entry = ResponseCache(3000), {"y": np.zeros(500, np.uint8)}
    for key in (b"a 1", b"a 2"):
        cache.put(key, entry)
    assert cache.get(b"a 1")
    for key in (b"b 3", b"b 4"):
        cache.put(key, {"y": np.zeros(200, np.uint8)})
    assert [key for key in (b"a 1", b"a 2", b"b 3", b"b 4") if cache.get(key)] == [b"a 1", b"b 3", b"b 4"]
    cache.put(b"large", {"y": np.zeros(4000, np.uint8)})
    cache.drop(b"b")
    assert [key for key in (b"a 1", b"b 3", b"large") if cache.get(key)] == [b"a 1"]


@pytest.mark.parametrize(("warmup", "refusal"), [
    ("batch_size: 4 inputs { key: 'x' value { data_type: TYPE_FP32 dims: 4 random_data: true } } count: 2", ""),
    ("inputs { key: 'x' value { data_type: TYPE_FP32 dims: 4 input_data_file: 'one' } }", ""),
    ("inputs { key: 'z' value { data_type: TYPE_FP32 dims: 4 } }", "model_warmup 'w': unexpected inference input 'z'"),
    ("inputs { key: 'x' value { data_type: TYPE_FP32 dims: [4611686018427387904, 4] zero_data: true } }",
     "model_warmup 'w': its inputs take 73786976294838206464 bytes, more than the limit of 1073741824"),
    ("batch_size: 400 inputs { key: 'x' value { data_type: TYPE_FP32 dims: 4 } }", "model_warmup 'w': .*must be <= 8"),
    ("inputs { key: 'x' value { data_type: TYPE_FP32 dims: 4 input_data_file: 'two' } }", "warmup/two: No such file"),
    ("inputs { key: 'x' value { data_type: TYPE_FP32 dims: -1 } }", "dims that are all at least 1"),
])
def test_a_warm_up_is_checked_and_executed_before_the_model_is_ready(
        tmp_path: Path, warmup: str, refusal: str) -> None:
    folder = write_model(tmp_path, "m", config=f"model_warmup {{ name: 'w' {warmup} }}")
    (folder / "warmup").mkdir()
    np.ones(4, np.float32).tofile(folder / "warmup" / "one")
    with patch.object(EngineExecutor, "execute", autospec=True, side_effect=EngineExecutor.execute) as executed:
        with serving(tmp_path) as running:
            failures = running.server.failures()
        assert bool(failures) == bool(refusal) == (not executed.call_count)
    if refusal:
        assert re.search(refusal, failures["m version 1"])


def test_a_model_may_lie_in_folders_of_its_version_as_a_hubs_download_does(tmp_path: Path) -> None:
    path = "all-mini/onnx/model.plan"
    folder = write_model(tmp_path, "deep", config=f'''default_model_filename: "{path}"
        output {{ name: "y" data_type: TYPE_FP32 dims: 4 label_filename: "labels.txt" }}''')
    (folder / "1" / path).parent.mkdir(parents=True)
    (folder / "1" / "model.plan").rename(folder / "1" / path)
    (folder / "labels.txt").write_text("a\nb\nc\nd")
    assert [remark.text for remark in check([LocalFolder(tmp_path)], "cpu")] == ["ok"]
    with serving(tmp_path) as running, triton.InferenceServerClient(running.address) as connected:
        assert connected.get_model_config("deep").config.default_model_filename == path
        assert ask(connected, "deep", np.ones((1, 4), np.float32)).any()


def test_a_configuration_of_another_name_is_used_where_a_model_has_it(tmp_path: Path) -> None:
    for name in ("both", "usual"):
        write_model(tmp_path, name, config="max_batch_size: 2")
    (tmp_path / "both" / "configs").mkdir()
    (tmp_path / "both" / "configs" / "h100.pbtxt").write_text("max_batch_size: 5")
    with (serving(tmp_path, config_name="h100") as running,
          triton.InferenceServerClient(running.address) as client):
        assert {name: client.get_model_config(name).config.max_batch_size for name in ("both", "usual")} == {
            "both": 5, "usual": 2}
    (tmp_path / "both" / "configs" / "h100.pbtxt").write_text("max_batchsize: 5")
    (remark, well) = check([LocalFolder(tmp_path)], "cpu", "h100")
    assert remark.is_error and "h100.pbtxt" in remark.text and not well.is_error


def test_metadata_call_the_platform_of_a_model_as_its_configuration_does(tmp_path: Path) -> None:
    known = {"ours": ("", "infer_server_plan"), "onnx": ('platform: "onnxruntime_onnx"', "onnxruntime_onnx"),
             "onnx2": ('backend: "onnxruntime"', "onnxruntime_onnx"), "openvino": ('backend: "openvino"', "openvino")}
    for name, (config, _) in known.items():
        write_model(tmp_path, name, config=config)
    with serving(tmp_path) as running, triton.InferenceServerClient(running.address) as connected:
        assert {name: connected.get_model_metadata(name).platform for name in known} == {
            name: platform for name, (_, platform) in known.items()}


def test_a_model_file_that_is_missing_is_called_as_its_backend_would_have_it(tmp_path: Path) -> None:
    for name, config in (("onnx", 'platform: "onnxruntime_onnx"'), ("onnx2", 'backend: "onnxruntime"'),
                         ("plan", 'backend: "tensorrt"'), ("python", 'backend: "python"')):
        (write_model(tmp_path, name, config=config) / "1" / "model.plan").unlink()
    assert [remark.text for remark in check([LocalFolder(tmp_path)], "cpu")] == [
        f"{name}/1/{file}: no such file" for name, file in (
            ("onnx", "model.onnx"), ("onnx2", "model.onnx"), ("plan", "model.plan"), ("python", "model.py"))]


def test_a_file_that_may_be_meant_for_one_that_is_missing_is_named_with_the_line_to_write(tmp_path: Path) -> None:
    for name, file in (("code", "model.py"), ("other", "yolo.onnx")):
        folder = write_model(tmp_path, name, config='platform: "onnxruntime_onnx"')
        (folder / "1" / "model.plan").rename(folder / "1" / file)
    output = ['code/1/model.onnx: no such file; there is a model.py: write backend: "python" if that is the model',
              'other/1/model.onnx: no such file; there is yolo.onnx: write default_model_filename: "yolo.onnx" if that '
              "is the model"]
    assert [remark.text for remark in check([LocalFolder(tmp_path)], "cpu")] == output
    with serving(tmp_path) as running:
        failures = running.server.failures().values()
        assert sorted(reason.rpartition(f"{tmp_path}/")[2] for reason in failures) == output


def test_check_says_that_a_model_is_called_other_than_its_folder(tmp_path: Path) -> None:
    write_model(tmp_path, "folder", config='name: "model"')
    assert [remark.text for remark in check([LocalFolder(tmp_path)], "cpu")] == [
        "name: expected 'folder', the name of its folder, got 'model'"]


class Outlines(LocalFolder):
    """Repository that reports only the sizes of models."""
    outlines_models = False


def test_a_check_does_not_guess_for_what_device_a_plan_is_that_it_cannot_read(tmp_path: Path) -> None:
    for name in ("plan", "graph"):
        write_model(tmp_path, name, config="instance_group { kind: KIND_GPU }")
    (tmp_path / "graph" / "1" / "model.plan").rename(tmp_path / "graph" / "1" / "model.onnx")
    graph, plan = check([Outlines(tmp_path)], "refuse")
    assert "the model's file is not copied yet" in plan.text and not plan.is_error
    assert "KIND_GPU is refused" in graph.text and graph.is_error


def test_check_says_of_an_ensemble_which_step_no_model_serves(tmp_path: Path) -> None:
    """The messages are those of loading the ensemble, where loading reports the fault."""
    def ensemble(name: str, step: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(f"""ensemble_scheduling {{ step {{ {step} }} }}
            input {{ name: "x" data_type: TYPE_FP32 dims: 4 }} output {{ name: "y" data_type: TYPE_FP32 dims: 4 }}""")

    def mapped(inputs: str = "x", outputs: str = "y") -> str:
        return f'input_map {{ key: "{inputs}" value: "x" }} output_map {{ key: "{outputs}" value: "y" }}'

    write_model(tmp_path, "m")
    write_model(tmp_path, "listed", config='input { name: "x" data_type: TYPE_FP32 dims: 4 }')
    write_model(tmp_path, "bad", config='backend: "pytorch"')
    ensemble("inner", f'model_name: "m" {mapped()}')
    ensemble("of_inner", f'model_name: "inner" {mapped()}')
    ensemble("unserved", f'model_name: "bad" {mapped()}')
    ensemble("version", f'model_name: "m" model_version: 7 {mapped()}')
    ensemble("renamed", f'model_name: "inner" {mapped("xx")}')
    ensemble("output", f'model_name: "inner" {mapped(outputs="z")}')
    ensemble("perhaps", f'model_name: "listed" {mapped("xx")}')
    ensemble("behind", f'model_name: "renamed" {mapped()}')
    output = {remark.model: remark for remark in check([Outlines(tmp_path)], "cpu")}
    assert {name for name, remark in output.items() if remark.text == "ok"} == {"m", "listed", "inner", "of_inner"}
    for name, text in (("unserved", "step 0: model 'bad' will not be served, see there"),
                       ("version", "version 7 of model 'm' is not served, but 1; write one of these, model_version"),
                       ("renamed", "input_map: model 'inner' has no 'xx', but x. Did you mean 'x'?"),
                       ("output", "output_map: model 'inner' has no 'z', but y."),
                       ("behind", "model 'renamed' will not be served, see there"),
                       ("perhaps", "model 'listed' has no 'xx', but x")):
        assert text in output[name].text, name
        assert output[name].is_error == (name != "perhaps")
    assert all(remark.is_error for remark in check([LocalFolder(tmp_path)], "cpu") if remark.text != "ok")
    with serving(tmp_path) as server:
        failures = server.server.failures()
        assert output["renamed"].text in failures["renamed version 1"]


def test_check_says_all_of_a_repository_and_what_to_write_instead(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, "good")
    write_model(tmp_path, "gpu", config="instance_group { kind: KIND_GPU }")
    assert serve.main(["--check", "--model-repository", str(tmp_path)], load_numpy_engine) == 0
    assert "gpu: instance_group.kind" in capsys.readouterr().out
    write_model(tmp_path, "agents", config="model_repository_agents { agents { name: 'checksum' } }")
    write_model(tmp_path, "unnamed", config='backend: "pytorch"')
    write_model(tmp_path, "twice", config="model_operations {} sequence_batching { iterative_sequence: true }")
    write_model(tmp_path, "no_labels", config='output { name: "y" data_type: TYPE_FP32 label_filename: "l.txt" }')
    write_model(tmp_path, "cold", config="""model_warmup { name: "w" inputs { key: "x" value {
        data_type: TYPE_FP32 dims: 4 input_data_file: "missing" } } }""")
    (tmp_path / "chain").mkdir()
    (tmp_path / "chain" / "config.pbtxt").write_text("""ensemble_scheduling { step {
        model_name: "goood" input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }
        input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_FP32 dims: 4 }""")
    assert serve.main(["--check", str(tmp_path), "--kind-gpu", "refuse"], load_numpy_engine) == 1
    output = capsys.readouterr().out
    assert [line.partition(": ")[2][:32] for line in output.splitlines() if line.startswith("twice")] == [
        "error: sequence_batching.iterati", "error: model_operations: librari"]
    for part in ("good: ok", "gpu: error: instance_group: KIND_GPU is refused", "agents: error: model_rep",
                 "unnamed: error: backend: 'pytorch' is not served: export the model to ONNX", "l.txt: no such file",
                 "warmup/missing: No such file", "no model 'goood'. Did you mean 'good'?"):
        assert part in output
