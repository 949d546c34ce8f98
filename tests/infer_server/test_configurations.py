"""Models with configurations as people have them, served to Triton's client."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from infer_server.cli import serve
from infer_server.cli.dims import fixed_shapes, parse_dims
from tests.infer_server.numpy_engine import write_model
from tests.infer_server.serving import serving


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton.InferenceServerClient]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "whole", config="max_batch_size: 0")
    write_model(folder, "whole_dependent", config="max_batch_size: 0", dependence="it normalises over the items")
    write_model(folder, "split", config='parameters { key: "split_requests" value { string_value: "true" } }')
    write_model(folder, "reshaped", config="""
        max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: [2, 2] reshape { shape: 4 } }
        output { name: "y" data_type: TYPE_FP32 dims: [1, 4] reshape { shape: 4 } }""")
    with serving(folder) as running, triton.InferenceServerClient(running.address) as connected:
        yield connected


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
    with pytest.raises(InferenceServerException, match=r"within 1\.\.8"):
        ask(client, "whole_dependent", np.ones((9, 4), np.float32))


def test_clients_see_the_shapes_of_dims_and_the_model_those_of_reshape(client: triton.InferenceServerClient) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    np.testing.assert_array_equal(ask(client, "reshaped", x), (2 * x + 1).reshape(3, 1, 4))


def test_check_says_all_of_a_repository_and_what_to_write_instead(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, "good")
    write_model(tmp_path, "gpu", config="instance_group { kind: KIND_GPU }")
    assert serve.main(["--check", str(tmp_path)]) == 0
    assert "gpu: instance_group.kind" in capsys.readouterr().out
    write_model(tmp_path, "agents", config="model_repository_agents { agents { name: 'checksum' } }")
    write_model(tmp_path, "unnamed", config='backend: "pytorch"')
    write_model(tmp_path, "no_labels", config='output { name: "y" data_type: TYPE_FP32 label_filename: "l.txt" }')
    assert serve.main(["--check", str(tmp_path), "--kind-gpu", "refuse"]) == 1
    said = capsys.readouterr().out
    for part in ("good: ok", "gpu: error: instance_group: KIND_GPU is refused", "agents: error: model_rep",
                 "unnamed: error: backend: 'pytorch' is not served: export the model to ONNX", "l.txt: no such file"):
        assert part in said


def test_dims_fix_what_the_model_leaves_open_with_or_without_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ("batch", "length", 4)) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    for text, shape in (("x:7x4", (None, 7, 4)), ("x:-1x7x4", (None, 7, 4)), ("x:2x7x4", (2, 7, 4))):
        assert fixed_shapes(str(path), dict([parse_dims(text)])) == {"x": shape}
    for text in ("x:-1x4", "x:7", "other:7x4"):
        assert fixed_shapes(str(path), dict([parse_dims(text)])) == {}
