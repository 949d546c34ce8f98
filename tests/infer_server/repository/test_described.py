"""--check describes a model from its file in the same words as loading the model does."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from infer_server.backend import load_plan
from infer_server.cli import build_engine as build_engine_cli
from infer_server.engines import build_engine
from infer_server.engines.loading import describe, load_engine
from infer_server.repository.building import build_command
from infer_server.repository.checking import check
from infer_server.repository.folders import read_model
from infer_server.repository.roots import LocalFolder
from tests.infer_server.serving import serving
from tests.infer_server.test_open_shapes import MODEL as OPEN
from tests.infer_server.test_programs import WORDS, chosen_rows, doubled_words

X = 'input { name: "x" data_type: TYPE_FP32 dims: [ %s ] }'
QUICK = 'parameters { key: "timing" value { string_value: "false" } }'
# Of a model of x [N, 4] and two scales, one with a value in the file -> what is said of it. (Its scale t has no batch.)
CONFIGURATIONS = {
    "unsaid": ("", ""),
    "whole": ("max_batch_size: 0 " + X % "-1, 4", ""),
    "whole_unsaid": (X % "-1, 4", ""),
    "open": (X % "-1, -1", ""),
    "optional": ('input { name: "s" data_type: TYPE_FP32 dims: 1 optional: true } max_batch_size: 0', ""),
    "name": (X.replace('"x"', '"xx"') % "-1, 4", "input 'xx': the model has x, t. Did you mean 'x'?"),
    "output": ('output { name: "z" data_type: TYPE_FP32 dims: 4 }', "output 'z': the model has y."),
    "datatype": (X.replace("FP32", "INT64") % "-1, 4",
                 "input 'x': data_type is TYPE_INT64, but the model's is TYPE_FP32"),
    "dims": (X % "-1, 5", "input 'x': dims are [-1, 5], but the model's are [-1, 4]"),
    "rank": ("max_batch_size: 0 " + X % "4", "input 'x': dims are [4], but the model's are [-1, 4]"),
    "always": ('input { name: "t" data_type: TYPE_FP32 dims: 1 optional: true } max_batch_size: 0',
               "input 't': optional, but the plan has no value for it"),
    "batch": ("max_batch_size: 4", "input 't' of shape [1] has no batch axis in front, as other tensors of the model"),
}


def model(*scale: object) -> onnx.ModelProto:
    def value(name: str, *extents: object, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, extents)
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "s"], ["scaled"]), helper.make_node("Mul", ["scaled", "t"], ["y"])], "m",
        [value("x", "N", 4), value("s", 1), value("t", *scale)], [value("y", "N", 5)],       # its file is wrong about y
        [numpy_helper.from_array(np.ones(1, np.float32), "s")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def write(repository: Path, name: str, config: str, made: onnx.ModelProto) -> None:
    (repository / name / "1").mkdir(parents=True)
    onnx.save(made, repository / name / "1" / "model.onnx")
    (repository / name / "config.pbtxt").write_text(f"{config} {QUICK}")


def test_a_configuration_is_compared_with_what_an_onnx_file_declares(tmp_path: Path) -> None:
    for name, (config, _) in CONFIGURATIONS.items():
        write(tmp_path, name, config, model(1))
    output = {remark.model: remark for remark in check([LocalFolder(tmp_path)], "cpu")}
    for name, (_, error) in CONFIGURATIONS.items():
        assert output[name].is_error == bool(error) and (error or "ok") in output[name].text, output[name]


def build_here(repository: Path, name: str) -> None:
    """Replace an ONNX file by a plan, built in this process by the server's own build command."""
    (source,) = read_model(repository, name)
    assert build_engine_cli.main(build_command(source, source.file.with_suffix(".plan"), None, threads=1)[3:]) == 0
    source.file.unlink()


def test_the_words_are_those_of_loading(tmp_path: Path) -> None:
    for name in ("name", "datatype", "rank", "batch", "whole_unsaid"):
        write(tmp_path, name, CONFIGURATIONS[name][0], model(1))
    created = model("N", 1)
    for name, dims in (("items", "4"), ("other_items", "5")):
        write(tmp_path, name, "max_batch_size: 4 " + X % dims, created)
        created.graph.output[0].type.tensor_type.ClearField("shape")    # many files have none
    errors = {remark.model: remark.text for remark in check([LocalFolder(tmp_path)], "cpu") if remark.is_error}
    for name in ("datatype", "rank", "batch", "whole_unsaid", "other_items"):       # the server builds the others
        build_here(tmp_path, name)
    with serving(tmp_path, load_plan) as server:
        failures = server.server.failures()
    assert {f"{name} version 1": text for name, text in errors.items()} == failures
    assert errors.keys() == {"name", "datatype", "rank", "batch", "other_items"}


@pytest.mark.parametrize("made", [model(1), OPEN, chosen_rows()], ids=["closed", "with open extents", "a program"])
def test_a_plan_says_without_being_loaded_what_its_engine_says(tmp_path: Path, made: onnx.ModelProto) -> None:
    build_engine(made, timing=False, cache=False).save(tmp_path / "m.plan")
    output, engine = describe(tmp_path / "m.plan"), load_engine(tmp_path / "m.plan")
    assert vars(output) == {name: getattr(engine, name) for name in vars(output)}


def test_an_ensemble_is_compared_with_the_files_of_its_models(tmp_path: Path) -> None:
    def ensemble(name: str, output: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(f"""max_batch_size: 2 ensemble_scheduling {{ step {{
            model_name: "m" input_map {{ key: "x" value: "x" }} input_map {{ key: "t" value: "t" }}
            output_map {{ key: "{output}" value: "y" }} }} }} input {{ name: "x" data_type: TYPE_FP32 dims: 4 }}
            input {{ name: "t" data_type: TYPE_FP32 dims: 1 }} output {{ name: "y" data_type: TYPE_FP32 dims: 4 }}""")
    write(tmp_path, "m", "max_batch_size: 2 " + X % "4", model("N", 1))
    ensemble("right", "y")
    ensemble("wrong", "logits")
    (tmp_path / "other_types").mkdir()
    (tmp_path / "other_types" / "config.pbtxt").write_text((tmp_path / "right" / "config.pbtxt").read_text().replace(
        'output { name: "y" data_type: TYPE_FP32', 'output { name: "y" data_type: TYPE_FP16'))
    text = {remark.model: remark for remark in check([LocalFolder(tmp_path)], "cpu")}
    assert text["right"].text == "ok"
    assert text["other_types"].is_error and "'y' is FP32 [-1, -1] for model 'm'" in text["other_types"].text
    assert text["wrong"].is_error and "model 'm' has no 'logits', but y" in text["wrong"].text


def test_what_is_not_known_before_a_model_is_loaded_is_no_error(tmp_path: Path) -> None:
    """Unknown are tensors without shapes in the file, pixels in place of an image, and texts."""
    shapeless = model(1)
    for value in (*shapeless.graph.input, *shapeless.graph.output):
        value.type.tensor_type.ClearField("shape")
    uint8 = f'parameters {{ key: "uint8_input" value {{ string_value: "true" }} }} {X % "4"}'.replace("FP32", "UINT8")
    for name, created, config in (("shapeless", shapeless, X % "7"), ("pixels", model(1), uint8),
                                  ("words", doubled_words(), WORDS)):
        write(tmp_path, name, config, created)
    assert not [remark for remark in check([LocalFolder(tmp_path)], "cpu") if remark.is_error]


def test_what_is_said_of_one_of_several_versions_names_it(tmp_path: Path) -> None:
    write(tmp_path, "m", "version_policy { all { } } max_batch_size: 4 " + X % "4", model("N", 1))
    (tmp_path / "m" / "2").mkdir()
    onnx.save(model(1), tmp_path / "m" / "2" / "model.onnx")
    (output,) = check([LocalFolder(tmp_path)], "cpu")
    assert output.is_error and output.text.startswith("version 2: max_batch_size: input 't'")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for file in ("model.onnx", "model.plan"):
        (tmp_path / file / "1").mkdir(parents=True)
        (tmp_path / file / "1" / file).write_text("version https://git-lfs.github.com/spec/v1")
    graph, plan = check([LocalFolder(tmp_path)], "cpu")
    assert graph.is_error and "is not a readable ONNX model" in graph.text
    assert plan.is_error and "model.plan" in plan.text
