"""Tests of the TensorRT backend without a real GPU.

They cover the models handed to TensorRT, the reading of its log, engines built ahead of time where TensorRT is
installed, and runs by a stand-in for its runtime on the emulated GPU.
"""
from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks import gpu
from benchmarks.measure.findings import Findings
from infer_server.cli import inspect_engine
from infer_server.engines.backends.tensorrt.build import Layer, layers_of
from infer_server.engines.backends.tensorrt.model import halved, symmetric
from infer_server.engines.backends.tensorrt.runtime.device import DEVICE
from infer_server.engines.backends.tensorrt.runtime.library import TARGETS, Message
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.errors import ConfigError, PlanTargetError
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.file import read_plan, write_plan
from infer_server.engines.plan.plan import Plan, Step
from infer_server.engines.runtime.engine import Engine
from scripts.testing.gpu.emulated import EmulatedGpu
from tests.engines.compiler.small_models import node, small_model
from tests.engines.compiler.zoo_engines import compiled
from tests.zoo import TINY


def test_quantised_activations_become_symmetric_with_the_same_range() -> None:
    """Bytes cover -2 to 8 with zero point 51; weights stay unchanged."""
    tables = {"s": np.float32(10 / 255), "z": np.uint8(51), "w": np.array([[3, -5]], np.int8), "t": np.float32(0.5),
              "n": np.int8(0)}
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
             helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
             helper.make_node("DequantizeLinear", ["w", "t", "n"], ["weights"]),
             helper.make_node("Mul", ["d", "weights"], ["y"])]
    model = symmetric(_model(nodes, tables))
    kept = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    assert kept.keys() == {"s.symmetric", "s.middle", "w", "t", "n"}
    assert kept["s.symmetric"] == np.float32(8 / 127) and kept["s.middle"].dtype == np.int8
    x = np.array([[-2, 8], [0.5, -1]], np.float32)
    np.testing.assert_allclose(_run(model, x), x * [[1.5, -2.5]], atol=8 / 127 * 2.5 / 2 + 1e-6)


def test_a_model_of_halves_takes_and_gives_floats() -> None:
    """Constants out of range become the largest half; quantisation scales stay floats."""
    tables = {"big": np.array([3e38, 0.1], np.float32), "s": np.float32(1e-6)}
    nodes = [helper.make_node("Min", ["x", "big"], ["a"]),
             helper.make_node("Cast", ["a"], ["y"], to=TensorProto.FLOAT)]
    model = halved(_model(nodes, tables))
    onnx.checker.check_model(model, full_check=True)
    assert {one.data_type for one in model.graph.initializer if one.name == "big"} == {TensorProto.FLOAT16}
    found = _run(model, np.array([[70.0, 70.0], [1.0, 0.0]], np.float32))
    np.testing.assert_array_equal(found, np.array([[70, np.float16(0.1)], [1, 0]], np.float32))


def test_the_layers_that_were_fused_are_read_from_the_log() -> None:
    text = ("Engine Layer Information:\n"
            "Layer(Convolution): stem + relu, Tactic: 0x00a1, x (Half[-1,3,8,8]) -> a (Half[-1])\n"
            "Layer(Reformat): copy, Tactic: 0x0, a (Half[-1]) -> y (Float[-1])")
    assert layers_of([Message("INFO", "Layer(X): not, Tactic: 0, listed"), Message("VERBOSE", text)]) == (
        Layer("stem + relu", "Convolution", "0x00a1", "x (Half[-1,3,8,8]) -> a (Half[-1])"),
        Layer("copy", "Reformat", "0x0", "a (Half[-1]) -> y (Float[-1])"))


def test_what_is_not_installed_is_said_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ConfigError, match=r"tensorrt is not installed .*pip install 'infer-server\[tensorrt\]'"):
        Builder(BuildConfig(target="tensorrt"))


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_tensorrt_rtx_builds_a_resnet_ahead_of_time(precision: str, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the extra 'tensorrt-rtx') is not installed")
    write_plan(compiled(TINY["resnet50"](), tmp_path, precision=precision, target="tensorrt_rtx").plan, tmp_path / "m")
    plan = read_plan(tmp_path / "m")
    assert plan.machine.backend == "tensorrt" and len(plan.machine.code[0]) > 10_000 and plan.machine.steps
    assert inspect_engine.main([str(tmp_path / "m")]) == 0
    assert plan.machine.steps[0].name in capsys.readouterr().out


class Doubling:
    """Stand-in for TensorRT, whose only engine doubles its input."""
    __version__ = "10.1"
    ILogger = type("ILogger", (), {})

    def __init__(self, gpu: EmulatedGpu) -> None:
        self.gpu, self.device_memory_size = gpu, 0
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def Runtime(self, logger: object) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=lambda code: self if code == b"doubling" else None)

    def create_execution_context(self) -> Doubling:
        return self

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self.shapes[name] = shape

    def execute_async_v3(self, stream: int) -> bool:
        size = 4 * int(np.prod(self.shapes["x"]))
        x, y = (self.gpu.bytes_at(self.addresses[name], size).view(np.float32) for name in ("x", "y"))
        self.gpu.cuda.stream(stream).put(lambda: np.multiply(x, 2, y))
        return True


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plan:
    """Return a plan for TensorRT 10.1, whose stand-in this machine has, on an emulated GPU."""
    gpu = EmulatedGpu("sm_80")
    monkeypatch.setattr(DEVICE, "open_gpu", lambda number: gpu)
    monkeypatch.setitem(sys.modules, "tensorrt", Doubling(gpu))     # type: ignore[arg-type]
    model = small_model([node("Add", "x x", "y")], {"x": ("batch", 3)}, ["y"])
    plan = compiled(model, tmp_path, target="numpy").plan
    views = [replace(view, buffer=number, offset=0, strides=(4,), item_stride=12)
             for number, view in enumerate((*plan.machine.inputs, *plan.machine.outputs))]
    buffers = tuple(replace(plan.machine.buffers[0], name=view.name, bytes=12 * plan.max_batch, first=first, last=1)
                    for view, first in zip(views, (-1, 0), strict=True))
    return plan.with_machine(
        backend="tensorrt", target="tensorrt", inputs=(views[0],), outputs=(views[1],), buffers=buffers, fills=(),
        steps=(Step("add", (), 0, name="add"),), code=(b"doubling",), cpu={"model": "tensorrt 10.1"})


def test_a_context_copies_in_runs_the_engine_and_copies_out(doubling: Plan) -> None:
    engine = Engine(doubling)
    for items in (3, 1):
        x = np.arange(3.0 * items, dtype=np.float32).reshape(items, 3)
        np.testing.assert_array_equal(engine.run({"x": x})["y"], x * 2)


def test_the_benchmark_of_gpus_times_it_beside_ours_or_says_that_it_is_missing(
        doubling: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    options = gpu.parse(["--models", "trial", "--precisions", "fp16", "--batches", "1,2"])
    bench = gpu.Bench(options, Findings(None, 1), DEVICE.open_gpu(0), "sm_80")
    monkeypatch.setattr(gpu.Bench, "plan", lambda *asked: doubling)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    for target in TARGETS:
        gpu.tensorrt(bench, target)
    found = bench.results.values
    assert found["tensorrt: trial fp16, batch 2"]["items/s"] > 0 and found["tensorrt: trial fp16"] == "tensorrt 10.1"
    assert "pip install 'infer-server[tensorrt-rtx]'" in found["tensorrt_rtx"]


def test_an_engine_of_another_version_is_refused(doubling: Plan) -> None:
    other = doubling.with_machine(cpu={"model": "tensorrt 10.0"})
    with pytest.raises(PlanTargetError, match=r"built by tensorrt 10\.0, but 10\.1 is installed"):
        DEVICE.load(other, 1)


def _model(nodes: list[onnx.NodeProto], tables: dict[str, Any]) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 2)) for name in ("x", "y"))
    graph = helper.make_graph(nodes, "m", [x], [y], [numpy_helper.from_array(np.asarray(array), name)
                                                     for name, array in tables.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def _run(model: onnx.ModelProto, x: Array) -> Array:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])
