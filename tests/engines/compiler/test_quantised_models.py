"""Quantised models run on the same integer kernels as after our own calibration."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from infer_server.calibration.workflow import Calibration
from infer_server.engines.compiler.build import EngineBuild, build_engine
from infer_server.engines.errors import ConfigError, ModelError
from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ir import rounding
from infer_server.engines.ops.reference import run
from infer_server.engines.plan.plan import graph_of
from tests.engines.compiler.small_models import small_model
from tests.engines.compiler.zoo_engines import compiled, fallbacks
from tests.engines.frontend.one_node import model_of
from tests.zoo import TINY, images_for

Arrays = dict[str, NDArray[Any]]
STORED = {"u8s8": (QuantType.QUInt8, QuantType.QInt8), "s8s8": (QuantType.QInt8, QuantType.QInt8),
          "u8u8": (QuantType.QUInt8, QuantType.QUInt8)}


class Items(CalibrationDataReader):
    def __init__(self, x: NDArray[Any]) -> None:
        self._items = iter([{"input": item[None]} for item in x])

    def get_next(self) -> Any:
        return next(self._items, None)


def quantised(name: str, stored: str, folder: Path, **options: Any) -> onnx.ModelProto:
    """Return a model of the zoo as ONNX Runtime's quantiser writes it."""
    model = TINY[name]()
    source, result = folder / f"{name}.onnx", folder / f"{name}.quantised.onnx"
    onnx.save(model, source)
    activations, weights = STORED[stored]
    quantize_static(source, result, Items(images_for(model, 8, seed=100)), activation_type=activations,
                    weight_type=weights, **options)
    return onnx.load(result)


def built(model: onnx.ModelProto, **options: Any) -> EngineBuild:
    return build_engine(model, cache=False, timing=False, max_batch=4, **options)


def literally(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """Return ONNX Runtime's outputs without graph optimisations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def in_numpy(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """Return onnx.reference's outputs: without VNNI ONNX Runtime saturates sums of products of u8 by s8."""
    names = [output.name for output in model.graph.output]
    return dict(zip(names, ReferenceEvaluator(model).run(None, feeds), strict=True))


def off(build: EngineBuild, model: onnx.ModelProto, feeds: Arrays) -> float:
    """Return the engine's largest relative error, by the root mean square."""
    wanted, made = literally(model, feeds), build.engine().run(feeds)
    return max(float(np.sqrt(((made[name] - value) ** 2).mean() / (value ** 2).mean()))
               for name, value in wanted.items())


def precisions(build: EngineBuild) -> list[str]:
    return [step.precision for step in build.plan.machine.steps if step.macs]


@pytest.mark.parametrize("per_channel", [False, True], ids=["a scale a tensor", "a scale a channel"])
@pytest.mark.parametrize("stored", ["u8s8", "s8s8"])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "squeezenet"])
def test_a_model_of_pairs_runs_in_int8_with_no_option(name: str, stored: str, per_channel: bool,
                                                      tmp_path: Path) -> None:
    model = quantised(name, stored, tmp_path, quant_format=QuantFormat.QDQ, per_channel=per_channel)
    build = built(model)
    assert set(precisions(build)) == {"int8"} and not fallbacks(build.engine())
    # a sum in the middle between two steps may go to either, and what follows with it
    assert off(build, model, {"input": images_for(model, 4, seed=1)}) < 0.05


@pytest.mark.parametrize("name", ["mobilenet_v2", "densenet", "inception_v3", "shufflenet_v2", "unet"])
def test_what_is_exported_is_read_back_as_the_same_engine(name: str, tmp_path: Path) -> None:
    model = TINY[name]()
    build = compiled(model, tmp_path, precision="int8")
    again = built(onnx_from_graph(graph_of(build.plan)))
    feeds = {"input": images_for(model, 4, seed=1)}
    for output, value in build.engine().run(feeds).items():
        np.testing.assert_array_equal(again.engine().run(feeds)[output], value)
    assert [step.precision for step in again.plan.machine.steps] == [
        step.precision for step in build.plan.machine.steps]


# ---- small ones
def node(op: str, inputs: str, output: str, **attrs: Any) -> onnx.NodeProto:
    """Return a node named after its output."""
    return onnx.helper.make_node(op, inputs.split(), [output], name=output, **attrs)


def weights(*shape: int, steps: int = 127) -> NDArray[np.int8]:
    return np.random.default_rng(0).integers(-steps, steps + 1, shape).astype(np.int8)


def pair(x: str, y: str, scale: str = "scale", zero: str = "zero") -> list[onnx.NodeProto]:
    return [node("QuantizeLinear", f"{x} {scale} {zero}", f"{y}.stored"),
            node("DequantizeLinear", f"{y}.stored {scale} {zero}", y)]


NUMBERS = {"scale": np.float32(0.03), "zero": np.uint8(120), "wscale": np.full(8, 0.004, np.float32),
           "wzero": np.zeros(8, np.int8)}


def layer(constants: Arrays, *after: onnx.NodeProto) -> onnx.ModelProto:
    """Return a product whose input is quantised, followed by the nodes `after`."""
    nodes = [*pair("x", "a"), node("DequantizeLinear", "w wscale wzero", "b", axis=1), node("MatMul", "a b", "m"),
             *after]
    return small_model(nodes, {"x": ["N", 5, 16]}, ["y"], {**NUMBERS, "w": weights(16, 8), **constants})


def rounded(model: onnx.ModelProto) -> tuple[EngineBuild, NDArray[Any], NDArray[Any]]:
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 5, 16), np.float32)}
    build = built(model)
    return build, build.engine().run(feeds)["y"], literally(model, feeds)["y"]


def test_what_the_model_does_not_round_is_not_rounded() -> None:
    build, made, wanted = rounded(layer({}, node("Sigmoid", "m", "y")))
    assert precisions(build) == ["int8"]
    np.testing.assert_allclose(made, wanted, 1e-5, 1e-6)


def test_what_the_model_rounds_in_the_midst_of_a_kernel_is_rounded_there() -> None:
    build, made, wanted = rounded(layer(
        {"coarse": np.float32(0.5)}, *pair("m", "r", "coarse"), node("Sigmoid", "r", "y")))
    assert [len(step.fuses) for step in build.plan.machine.steps][-1] > 1 and precisions(build) == ["int8"]
    assert len(np.unique(made)) < 20
    np.testing.assert_allclose(made, wanted, 1e-5, 1e-6)


def test_a_layer_whose_weights_are_no_integers_stays_float() -> None:
    model = small_model([*pair("x", "a"), node("MatMul", "a b", "y")], {"x": ["N", 5, 16]}, ["y"],
                        {**NUMBERS, "b": np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)})
    build, made, wanted = rounded(model)
    assert precisions(build) == ["fp32"]
    assert any("its weights are not quantised to 8 bits" in str(note) for note in build.notes)
    np.testing.assert_allclose(made, wanted, 1e-5, 1e-5)


@pytest.mark.parametrize("form", ["MatMul", "Gemm", "Cast"])
def test_weights_that_are_quantised_alone_stay_bytes(form: str) -> None:
    scales = np.linspace(0.001, 0.01, 96).astype(np.float32)
    bytes_ = weights(64, 96).T if form == "Gemm" else weights(64, 96)
    nodes = [node("Cast", "w", "c", to=TensorProto.FLOAT), node("Mul", "c s", "b")] if form == "Cast" else [
        node("DequantizeLinear", "w s", "b", axis=1 - (form == "Gemm"))]
    product = node("Gemm", "x b bias", "y", transB=1) if form == "Gemm" else node("MatMul", "x b", "y")
    model = small_model([*nodes, product], {"x": ["N", 64]}, ["y"],
                        {"w": bytes_, "s": scales, "bias": np.arange(96, dtype=np.float32)})
    build = built(model)
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 64), np.float32)}
    (step,) = build.plan.machine.steps
    assert step.precision == "fp32" and step.constant_bytes < 2 * 96 * 64
    assert {array.nbytes for array in graph_of(build.plan).constants.values()} <= {96 * 64, 96 * 4}
    np.testing.assert_allclose(build.engine().run(feeds)["y"], literally(model, feeds)["y"], 1e-4, 1e-5)


@pytest.mark.parametrize("scales", [np.float32(0.01), np.linspace(0.001, 0.01, 90).astype(np.float32)], ids=np.ndim)
def test_a_table_whose_rows_are_quantised_stays_bytes(scales: Any) -> None:
    nodes = [node("DequantizeLinear", "w s", "b", axis=0), node("Gather", "b i", "g"), node("Add", "g one", "y")]
    model = small_model(nodes, {"i": ["N", 5]}, ["y"], {"w": weights(90, 64), "s": scales, "one": np.float32(1)})
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    build = built(model)
    assert {array.nbytes for array in graph_of(build.plan).constants.values()} <= {90 * 64, 90 * 4, 4}
    assert not fallbacks(build.engine())
    feeds = {"i": np.random.default_rng(1).integers(0, 90, (4, 5))}
    np.testing.assert_allclose(build.engine().run(feeds)["y"], literally(model, feeds)["y"], 1e-6)


@pytest.mark.parametrize("zeros, bias", [(False, True), (True, False)])
def test_weights_of_four_bits_stay_two_a_byte(zeros: bool, bias: bool) -> None:
    random = np.random.default_rng(0)
    inputs = [None, random.integers(0, 256, (40, 5, 16)).astype(np.uint8),
              random.uniform(0.1, 1, 200).astype(np.float32),
              random.integers(0, 256, (40, 3)).astype(np.uint8) if zeros else None, None,
              np.arange(40, dtype=np.float32) if bias else None]
    inputs[0] = random.standard_normal((3, 7, 130)).astype(np.float32)
    model = model_of("MatMulNBits", inputs, (1, 2, 3, 5), 1, K=130, N=40, bits=4, block_size=32)
    build = build_engine(model, cache=False, timing=False)
    kernels = [step.tactic.partition(":")[0] for step in build.plan.machine.steps]
    assert "blocked_product" in kernels and "contraction" not in kernels and not fallbacks(build.engine())
    feeds = {"i0": inputs[0]}
    (name, wanted), = literally(model, feeds).items()
    np.testing.assert_allclose(build.engine().run(feeds)[name], wanted, 1e-4, 1e-4)
    (again,) = literally(onnx_from_graph(graph_of(build.plan)), feeds).values()
    np.testing.assert_allclose(again, wanted, 1e-4, 1e-4)


def products_of_few_bits(depth: int, zeros: bool, level: int) -> onnx.ModelProto:
    """Return two products of the same rows with 4-bit weights."""
    random, blocks = np.random.default_rng(0), -(-depth // 32)
    constants: Arrays = {"s": random.uniform(0.1, 1, 48 * blocks).astype(np.float32)}
    constants |= {"p": random.integers(0, 256, (48, -(-blocks // 2))).astype(np.uint8)} if zeros else {}
    constants |= {f"{name}.q": random.integers(0, 256, (48, blocks, 16)).astype(np.uint8) for name in "yz"}
    nodes = [node("MatMulNBits", f"x {name}.q s" + " p" * zeros, name, domain="com.microsoft", K=depth, N=48, bits=4,
                  block_size=32, accuracy_level=level) for name in "yz"]
    model = small_model(nodes, {"x": ["N", 7, depth]}, ["y", "z"], constants)
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return model


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("depth", [128, 100])
def test_rows_that_may_be_rounded_are_rounded_once_and_multiplied_as_integers(depth: int, zeros: bool) -> None:
    x = np.random.default_rng(1).standard_normal((4, 7, depth), np.float32)
    build = built(products_of_few_bits(depth, zeros, level=4))
    kernels = [step.tactic.partition(":")[0] for step in build.plan.machine.steps]
    assert kernels == ["nest", "nest", "rounded_product", "rounded_product"] and not fallbacks(build.engine())
    scales, numbers = rounding.rounded(x, 32)
    feeds = {"x": rounding.real_rows(scales, numbers)[..., :depth]}
    for name, wanted in literally(products_of_few_bits(depth, zeros, level=0), feeds).items():
        np.testing.assert_allclose(build.engine().run({"x": x})[name], wanted, 1e-4, 1e-3)
    onnx.checker.check_model(onnx_from_graph(graph_of(build.plan)))


@pytest.mark.parametrize("target", ["avx2", "portable", "numpy"])
def test_rows_are_rounded_alike_for_every_target(target: str) -> None:
    model = products_of_few_bits(100, False, level=4)
    x = np.random.default_rng(1).standard_normal((4, 7, 100), np.float32)
    made = built(model, target=target).engine().run({"x": x})
    for name, wanted in built(model).engine().run({"x": x}).items():
        np.testing.assert_allclose(made[name], wanted, 1e-4, 1e-3)


def test_rows_whose_last_block_is_not_whole_are_rounded_by_kernels_in_every_precision() -> None:
    model = products_of_few_bits(100, False, level=4)
    x = np.random.default_rng(1).standard_normal((4, 7, 100), np.float32)
    build = built(model, precision="bf16")
    assert not fallbacks(build.engine())
    for name, wanted in built(model).engine().run({"x": x}).items():
        np.testing.assert_allclose(build.engine().run({"x": x})[name], wanted, 0.1, 0.02 * np.abs(wanted).max())


def test_a_layer_whose_input_is_not_quantised_stays_float() -> None:
    model = small_model([node("DequantizeLinear", "w wscale wzero", "b", axis=1), node("MatMul", "x b", "m"),
                         *pair("m", "y")], {"x": ["N", 5, 16]}, ["y"], {**NUMBERS, "w": weights(16, 8)})
    build, made, wanted = rounded(model)
    assert precisions(build) == ["fp32"]
    np.testing.assert_allclose(made, wanted, 1e-5, 1e-6)


@pytest.mark.parametrize("zeros", [np.full(8, 20, np.uint8), np.array([0, 255, 128, 20, 127, 129, 200, 3], np.uint8)],
                         ids=["one for all", "one a column"])
def test_weights_of_uint8_around_another_number_than_their_middle_are_multiplied_as_int8(zeros: Any) -> None:
    every = np.random.default_rng(3).permuted(np.linspace(0, 255, 16).astype(np.uint8)[:, None].repeat(8, 1), axis=0)
    build, made, wanted = rounded(layer({"w": every, "wzero": zeros}, node("Sigmoid", "m", "y")))
    assert set(precisions(build)) == {"int8"} and not fallbacks(build.engine())
    np.testing.assert_allclose(made, wanted, 1e-5, 1e-6)


@pytest.mark.parametrize("group", [1, 8])
def test_a_convolution_by_uint8_off_its_middle_adds_what_each_window_sees(group: int) -> None:
    """The sum over a window is smaller at the border."""
    w = np.random.default_rng(3).integers(0, 256, (8, 8 // group, 3, 3)).astype(np.uint8)
    w[:, 0, 0, :2] = 0, 255
    nodes = [*pair("x", "a"), node("DequantizeLinear", "w wscale wzero", "b", axis=0),
             node("Conv", "a b bias", "c", group=group, pads=[1, 1, 1, 1]), node("Relu", "c", "y")]
    model = small_model(nodes, {"x": ["N", 8, 7, 7]}, ["y"], {
        **NUMBERS, "w": w, "wzero": np.array([0, 255, 128, 20, 127, 129, 200, 3], np.uint8),
        "bias": np.arange(8, dtype=np.float32)})
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 8, 7, 7), np.float32)}
    build = built(model)
    assert set(precisions(build)) == {"int8"} and not fallbacks(build.engine())
    np.testing.assert_allclose(build.engine().run(feeds)["y"], literally(model, feeds)["y"], 1e-4, 1e-4)


def test_all_128_steps_below_zero_are_kept() -> None:
    w = weights(16, 8)
    w[0] = -128
    build, made, wanted = rounded(layer({"w": w}, node("Relu", "m", "y")))
    assert precisions(build) == ["int8"]
    np.testing.assert_allclose(made, wanted, 1e-5, 1e-5)


def test_activations_of_16_bits_are_rounded_in_float() -> None:
    model = layer({"zero": np.int16(5), "scale": np.float32(0.0001)}, node("Relu", "m", "y"))
    model.opset_import[0].version = 21
    build, made, wanted = rounded(model)
    assert precisions(build) == ["fp32"] and not fallbacks(build.engine())
    np.testing.assert_allclose(made, wanted, 1e-4, 1e-5)


def test_integers_of_16_bits_that_a_model_ends_with_are_made_by_kernels() -> None:
    zero, scale = np.uint16(1000), np.float32(0.01)
    model = small_model([node("QuantizeLinear", "x scale zero", "y")], {"x": ["N", 6]}, ["y"],
                        {"zero": zero, "scale": scale})
    model.opset_import[0].version = 21
    feeds = {"x": np.float32([[0, -0.005, 0.015, 3.14, -10.001, 645.35], [645.36, 1e5, -1e5, 1e12, -1e30, 42]])}
    build = built(model)
    assert not fallbacks(build.engine())
    wanted = np.clip(np.rint(feeds["x"] / scale) + 1000.0, 0, 65535).astype(np.uint16)
    np.testing.assert_array_equal(build.engine().run(feeds)["y"], wanted)


@pytest.mark.parametrize("target", ["", "portable", "numpy"])
@pytest.mark.parametrize("scale", [np.float32(0.5), np.float32([0.5, 2, 0.25, 1, 0.5, 0.5])], ids=["one", "of columns"])
def test_bytes_that_a_model_ends_with_are_made_by_one_kernel(scale: Any, target: str) -> None:
    """Ties round to even, and NaN becomes 0."""
    zero = np.full(scale.shape, 10, np.uint8)
    model = small_model([node("QuantizeLinear", "x scale zero", "y", **({"axis": 1} if scale.ndim else {}))],
                        {"x": ["N", 6]}, ["y"], {"zero": zero, "scale": scale})
    feeds = {"x": np.float32([[0, -0.25, 0.75, 0.25, -100, 300], [np.nan, np.inf, -np.inf, 122.5, 122.25, 1e30]])}
    build = built(model, target=target)
    wanted = np.nan_to_num(np.clip(np.rint(feeds["x"] / scale) + 10.0, 0, 255)).astype(np.uint8)
    np.testing.assert_array_equal(build.engine().run(feeds)["y"], wanted)
    assert len(build.plan.machine.steps) == 1


def test_a_range_of_nearly_all_numbers_takes_nothing_from_the_bias() -> None:
    """Padding with the lowest float32 used to enter the range."""
    model = layer({"scale": np.float32(1.3e36), "zero": np.uint8(255), "bias": -np.arange(8, dtype=np.float32),
                   "fine": np.float32(0.05)}, node("Add", "m bias", "n"), *pair("n", "y", "fine"))
    _, made, wanted = rounded(model)
    assert np.ptp(made) > 6
    np.testing.assert_allclose(made, wanted, 1e-5, 1e-5)


def test_an_input_that_a_float_layer_reads_too_is_quantised_for_the_integer_one() -> None:
    extra = [node("Softmax", "a", "s"), node("ReduceSum", "s axes", "t"), node("Add", "m t", "y")]
    build, made, wanted = rounded(layer({"axes": np.array([-1])}, *extra))
    assert precisions(build) == ["int8"]
    np.testing.assert_allclose(made, wanted, 1e-5, 1e-5)


@pytest.mark.parametrize("precision", ["int8", "best", "fp16", "bf16"])
def test_a_quantised_model_is_int8_in_every_precision_and_needs_no_calibration(precision: str) -> None:
    build = built(layer({}, node("Sigmoid", "m", "y")), precision=precision)
    assert precisions(build) == ["int8"]


def test_a_quantised_model_is_not_calibrated() -> None:
    calibration = Calibration([{"x": np.zeros((5, 16), np.float32)}])
    build = built(layer({}, node("Sigmoid", "m", "y")), precision="int8", calibration=calibration)
    assert "the model is quantised already: it is compiled as it is, and not calibrated" in build.notices


def test_what_a_recurrent_layer_makes_is_stored_as_the_model_rounds_it() -> None:
    recurrent = {name: weights(1, 32, size) / np.float32(400) for name, size in (("wx", 16), ("wh", 8))}
    nodes = [node("Transpose", "x", "steps", perm=[1, 0, 2]), node("LSTM", "steps wx wh", "h", hidden_size=8),
             node("Squeeze", "h one", "rows"), node("Transpose", "rows", "items", perm=[1, 0, 2]), *pair("items", "a"),
             node("DequantizeLinear", "w wscale wzero", "b", axis=1), node("MatMul", "a b", "y")]
    build, got, wanted = rounded(small_model(nodes, {"x": ["N", 5, 16]}, ["y"], {
        **NUMBERS, **recurrent, "one": np.array([1]), "w": weights(8, 8)}))
    graph = graph_of(build.plan)
    (cells,) = (node for node in graph.nodes if node.op == "Recurrence")
    assert graph.types[cells.outputs[0]].quant is not None and precisions(build)[-1] == "int8"
    np.testing.assert_allclose(got, wanted, 1e-4, 1e-5)


@pytest.mark.parametrize("op, gates", [("LSTM", 4), ("GRU", 3)])
def test_an_exported_recurrent_layer_is_read_back_as_the_integers_that_it_was(op: str, gates: int) -> None:
    """Quantisation of its states is kept in a model property; a build may keep the layer in float."""
    recurrent = {name: weights(1, gates * 8, size) / np.float32(400) for name, size in (("wx", 16), ("wh", 8))}
    nodes = [node("Transpose", "x", "steps", perm=[1, 0, 2]), node(op, "steps wx wh", "h", hidden_size=8),
             node("Transpose", "h", "y", perm=[2, 0, 1, 3])]
    model = small_model(nodes, {"x": ["N", 5, 16]}, ["y"], recurrent)
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 5, 16)).astype(np.float32)}
    first = built(model, precision="int8", calibration=Calibration([feeds]))
    exported = onnx_from_graph(graph_of(first.plan))
    again = built(exported)
    for name, wanted in first.engine().run(feeds).items():
        assert again.engine().run(feeds)[name].tobytes() == wanted.tobytes()
    assert precisions(again) == precisions(first) and "int8" in precisions(first)
    (layer_name,) = (part.name for part in exported.graph.node if part.op_type == op)
    assert "int8" not in [part.precision for part in graph_of(built(exported, keep_float=(layer_name,)).plan).nodes
                          if part.op == "Recurrence"]
    exported.metadata_props[0].value = "cells"
    with pytest.raises(ModelError, match="integer_states is not a JSON list of names: 'cells'"):
        built(exported)


def test_a_layer_that_is_to_stay_float_reads_what_was_rounded() -> None:
    model = layer({}, node("Sigmoid", "m", "y"))
    build = built(model, keep_float=("m",))
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 5, 16), np.float32)}
    assert precisions(build) == ["fp32"]
    np.testing.assert_allclose(build.engine().run(feeds)["y"], literally(model, feeds)["y"], 1e-5, 1e-6)
    with pytest.raises(ConfigError, match="no node of .* is called 'mm'"):
        built(model, keep_float=("mm",))


def test_a_depthwise_layer_may_have_a_scale_for_each_channel_of_its_input() -> None:
    numbers = {"s": np.linspace(0.01, 0.05, 8, dtype=np.float32), "z": np.zeros(8, np.uint8), "ws": np.float32(0.02),
               "wz": np.int8(0)}
    nodes = [node("Conv", "x v", "c"), node("Relu", "c", "r"), node("QuantizeLinear", "r s z", "q", axis=1),
             node("DequantizeLinear", "q s z", "a", axis=1), node("DequantizeLinear", "w ws wz", "b"),
             node("Conv", "a b", "d", group=8, pads=[1, 1, 1, 1]), node("Relu", "d", "y")]
    constants = {**numbers, "w": weights(8, 1, 3, 3),
                 "v": np.random.default_rng(2).standard_normal((8, 4, 1, 1)).astype(np.float32)}
    model = small_model(nodes, {"x": ["N", 4, 9, 9]}, ["y"], constants)
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 4, 9, 9), np.float32)}
    build = built(model)
    assert precisions(build) == ["fp32", "int8"] and not fallbacks(build.engine())
    assert off(build, model, feeds) < 1e-3


# ---- operators on integers
INTEGER_LIMITS = {"uint8": (0, 256), "int8": (-128, 128)}


def scaled(**numbers: tuple[float, Any]) -> Arrays:
    """Return NAME.s and NAME.z, the scale and zero point of each tensor NAME."""
    return {f"{name}{end}": np.asarray(value, kind) for name, (scale, zero) in numbers.items()
            for end, value, kind in ((".s", scale, np.float32), (".z", zero, np.asarray(zero).dtype))}


def assert_same_steps(made: NDArray[Any], wanted: NDArray[Any], step: float) -> None:
    """Assert that at most one number in a hundred differs, and by one step: sums midway between two steps may."""
    apart = np.rint((made - wanted) / step)
    assert made.shape == wanted.shape and np.abs(apart).max() <= 1 and np.mean(apart != 0) < 0.01


@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_UPPER"])
@pytest.mark.parametrize("zero", [np.uint8(0), np.uint8(130), np.int8(-7)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_of_integers_is_one_kernel_between_conversions(zero: Any, auto_pad: str, bias: bool) -> None:
    numbers = scaled(x=(0.03, zero), w=([0.01] * 4 + [0.02] * 4, np.zeros(8, np.int8)), y=(0.1, type(zero)(11)))
    window: dict[str, Any] = {"auto_pad": auto_pad, "strides": [2, 2]}
    nodes = [node("QuantizeLinear", "x x.s x.z", "q"),
             node("QLinearConv", "q x.s x.z w w.s w.z y.s y.z" + " b" * bias, "c",
                  **window | ({"pads": [1, 1, 1, 1]} if auto_pad == "NOTSET" else {})),
             node("DequantizeLinear", "c y.s y.z", "y")]
    constants = {**numbers, "w": weights(8, 4, 3, 3, steps=60), "b": np.arange(-400, 400, 100, np.int32)}
    model = small_model(nodes, {"x": ["N", 4, 9, 9]}, ["y"], constants)
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 4, 9, 9), np.float32)}
    build = built(model)
    assert precisions(build) == ["int8"] and not fallbacks(build.engine())
    made, wanted = build.engine().run(feeds)["y"], literally(model, feeds)["y"]
    assert_same_steps(made, wanted, 0.1)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_transposed_convolution_of_integers_may_have_groups(group: int) -> None:
    """ConvTranspose weights [cin, cout / group, ...] have a scale for each output channel of a group."""
    scales = np.linspace(0.01, 0.03, 8 // group)
    numbers = scaled(x=(0.03, np.uint8(100)), w=(list(scales), np.zeros(8 // group, np.int8)), y=(0.1, np.uint8(11)))
    nodes = [node("QuantizeLinear", "x x.s x.z", "q"), node("DequantizeLinear", "q x.s x.z", "r"),
             node("DequantizeLinear", "w w.s w.z", "v", axis=1),
             node("ConvTranspose", "r v", "c", strides=[2, 2], pads=[1, 0, 1, 0], group=group),
             node("QuantizeLinear", "c y.s y.z", "d"), node("DequantizeLinear", "d y.s y.z", "y")]
    constants = {**numbers, "w": weights(4, 8 // group, 3, 3, steps=60)}
    model = small_model(nodes, {"x": ["N", 4, 9, 9]}, ["y"], constants)
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 4, 9, 9), np.float32)}
    build = built(model)
    assert set(precisions(build)) == {"int8"} and not fallbacks(build.engine())
    assert_same_steps(build.engine().run(feeds)["y"], literally(model, feeds)["y"], 0.1)


@pytest.mark.parametrize("between", ["pool", "reshape"])
def test_integers_may_be_moved_between_two_layers(between: str) -> None:
    numbers = scaled(x=(0.03, np.uint8(130)), w=(0.01, np.int8(0)), y=(0.1, np.uint8(110)), z=(0.2, np.uint8(100)))
    move = (node("MaxPool", "c", "p", kernel_shape=[2, 2], strides=[2, 2]) if between == "pool" else
            node("Reshape", "c shape", "p"))
    nodes = [node("QuantizeLinear", "x x.s x.z", "q"), node("QLinearConv", "q x.s x.z w w.s w.z y.s y.z", "c"), move,
             node("QLinearConv", "p y.s y.z v w.s w.z z.s z.z", "d"), node("DequantizeLinear", "d z.s z.z", "y")]
    constants = {**numbers, "w": weights(8, 4, 1, 1, steps=60), "v": weights(8, 8, 1, 1, steps=60),
                 "shape": np.array([-1, 8, 2, 8])}
    model = small_model(nodes, {"x": ["N", 4, 4, 4]}, ["y"], constants)
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 4, 4, 4), np.float32)}
    build = built(model)
    assert precisions(build) == ["int8", "int8"] and not fallbacks(build.engine())
    made, wanted = build.engine().run(feeds)["y"], literally(model, feeds)["y"]
    assert_same_steps(made, wanted, 0.2)


def test_a_product_of_integers_is_one_kernel_between_conversions() -> None:
    numbers = scaled(x=(0.03, np.uint8(130)), w=([0.01, 0.02] * 4, np.zeros(8, np.int8)), y=(0.1, np.uint8(110)))
    nodes = [node("QuantizeLinear", "x x.s x.z", "q"), node("QLinearMatMul", "q x.s x.z w w.s w.z y.s y.z", "c"),
             node("DequantizeLinear", "c y.s y.z", "y")]
    model = small_model(nodes, {"x": ["N", 5, 16]}, ["y"], {**numbers, "w": weights(16, 8, steps=60)})
    build, made, wanted = rounded(model)
    assert precisions(build) == ["int8"] and not fallbacks(build.engine())
    assert_same_steps(made, wanted, 0.1)


@pytest.mark.parametrize("zero", [np.uint8(130), np.int8(-7)], ids=str)
def test_bytes_that_a_model_reads_and_makes_are_multiplied_as_integers(zero: Any) -> None:
    """Models whose images have channels last are written this way."""
    numbers = scaled(x=(0.03, zero), w=([0.01] * 4 + [0.02] * 4, np.zeros(8, np.int8)), y=(0.1, type(zero)(11)))
    nodes = [node("Transpose", "x", "q", perm=[0, 3, 1, 2]),
             node("QLinearConv", "q x.s x.z w w.s w.z y.s y.z", "c", pads=[1, 1, 1, 1]),
             node("Transpose", "c", "y", perm=[0, 2, 3, 1])]
    model = small_model(nodes, {"x": ["N", 9, 7, 4]}, ["y"], {**numbers, "w": weights(8, 4, 3, 3, steps=60)})
    kind = onnx.helper.np_dtype_to_tensor_dtype(zero.dtype)
    model.graph.input[0].type.tensor_type.elem_type = kind
    feeds = {"x": np.random.default_rng(1).integers(*INTEGER_LIMITS[zero.dtype.name], (4, 9, 7, 4)).astype(zero.dtype)}
    build = built(model)
    assert precisions(build) == ["int8"] and not fallbacks(build.engine())
    made, wanted = build.engine().run(feeds)["y"], literally(model, feeds)["y"]
    assert made.dtype == zero.dtype
    assert_same_steps(made.astype(np.float32), wanted.astype(np.float32), 1)


def test_an_attention_stores_what_the_model_rounds_behind_it() -> None:
    nodes = [node("Reshape", "x heads", "h"), node("Transpose", "h", "q", perm=[0, 2, 1, 3]),
             node("Transpose", "h", "k", perm=[0, 2, 3, 1]), node("MatMul", "q k", "s"),
             node("Softmax", "s", "p", axis=-1), node("MatMul", "p q", "o"), *pair("o", "r"),
             node("Transpose", "r", "t", perm=[0, 2, 1, 3]),
             node("Reshape", "t flat", "f"), node("DequantizeLinear", "w wscale wzero", "b", axis=1),
             node("MatMul", "f b", "y")]
    build, made, wanted = rounded(small_model(nodes, {"x": ["N", 5, 16]}, ["y"], {
        **NUMBERS, "w": weights(16, 8), "heads": np.array([0, 5, 2, 8]), "flat": np.array([0, 5, 16])}))
    assert [step.tactic.partition(":")[0] for step in build.plan.machine.steps] == ["attention", "contraction"]
    np.testing.assert_allclose(made, wanted, 0, 0.03 * 0.004 * 127)       # a step to the other side, by one weight


# ---- ranges found as the model runs
INTEGERS = {"s8": (weights(16, 8), np.int8(0)), "s8, off its middle": (weights(16, 8, steps=100), np.int8(-9)),
            "u8": (weights(16, 8).view(np.uint8), np.uint8(131)),
            "u8, a zero point a column": (weights(16, 8).view(np.uint8), np.arange(100, 108).astype(np.uint8))}


def dynamic(x: list[int | str], integers: str, *before: onnx.NodeProto) -> onnx.ModelProto:
    w, zero = INTEGERS[integers]
    nodes = [*before, onnx.helper.make_node("DynamicQuantizeLinear", ["a" if before else "x"], ["q", "s", "z"], "q"),
             node("MatMulInteger", "q w z wz", "i"), node("Cast", "i", "f", to=TensorProto.FLOAT),
             node("Mul", "s ws", "u"), node("Mul", "f u", "g"), node("Add", "g b", "y")]
    return small_model(nodes, {"x": x}, ["y"], {"w": w, "wz": zero, "ws": np.float32(0.01),
                                                "b": np.arange(8, dtype=np.float32)})


@pytest.mark.parametrize("integers", INTEGERS)
@pytest.mark.parametrize("shape", [(2, 5, 16), (6, 16)], ids=str)
def test_a_product_by_a_range_of_the_moment_is_compiled(shape: tuple[int, ...], integers: str) -> None:
    model = dynamic(list(shape), integers)
    build = build_engine(model, cache=False, timing=False)
    assert precisions(build)[-1] == "int8" and not fallbacks(build.engine())
    for spread in (1.0, 0.001, 300.0, 0.0):
        feeds = {"x": np.random.default_rng(1).normal(0.3, 1, shape).astype(np.float32) * np.float32(spread)}
        wanted = in_numpy(model, feeds)["y"] if spread else np.broadcast_to(np.arange(8), (*shape[:-1], 8))
        np.testing.assert_allclose(build.engine().run(feeds)["y"], wanted, 1e-4, 1e-5 * max(spread, 1))


def test_the_range_is_that_of_all_items_on_the_reference_too() -> None:
    model = dynamic(["N", 5, 16], "s8")
    build = built(model)
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 5, 16), np.float32)}
    for made in (build.engine().run(feeds), run(graph_of(build.plan), feeds)):
        np.testing.assert_allclose(made["y"], in_numpy(model, feeds)["y"], 1e-4, 1e-5)
    assert "depend on each other" in build.notices[0] and not fallbacks(build.engine())


def test_integers_of_a_range_of_the_moment_are_those_of_onnx_bit_for_bit() -> None:
    """A scale that is off by its last bit rounds ties differently, and half of these numbers are ties."""
    nodes = [onnx.helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "q")]
    model = small_model(nodes, {"x": [40, 16]}, ["q", "s", "z"], {})
    engine, random = build_engine(model, cache=False, timing=False).engine(), np.random.default_rng(0)
    for spread in 2.0 ** np.arange(-9, 9):
        x = random.normal(0.3, spread, (40, 16)).astype(np.float32)
        x[::2] = np.rint(4 * x[::2]) / 4
        made, wanted = engine.run({"x": x}), in_numpy(model, {"x": x})
        for name in ("q", "s", "z"):
            np.testing.assert_array_equal(made[name], wanted[name], name)


def test_what_is_never_negative_has_no_zero_point_to_take_off() -> None:
    model = dynamic([6, 16], "s8", node("Relu", "x", "a"))
    build = build_engine(model, cache=False, timing=False)
    feeds = {"x": np.random.default_rng(1).standard_normal((6, 16), np.float32)}
    np.testing.assert_allclose(build.engine().run(feeds)["y"], in_numpy(model, feeds)["y"], 1e-4, 1e-5)
    assert not any("reducemin" in step.name for step in build.plan.machine.steps)


@pytest.mark.parametrize("pads, zero, group", [
    (0, np.int8(0), 1), (1, np.int8(0), 1), (1, np.uint8(178), 1), (1, np.uint8(178), 4)], ids=str)
def test_a_convolution_by_a_range_of_the_moment_is_compiled(pads: int, zero: Any, group: int) -> None:
    nodes = [onnx.helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "q"),
             node("ConvInteger", "q w z wz", "i", pads=[pads] * 4, group=group), node("Add", "i b", "j"),
             node("Cast", "j", "f", to=TensorProto.FLOAT), node("Mul", "s ws", "u"), node("Mul", "f u", "y")]
    integers = weights(4, 4 // group, 3, 3).view(zero.dtype)
    bias = np.arange(-2000, 2000, 1000, np.int32).reshape(1, 4, 1, 1)
    model = small_model(nodes, {"x": [2, 4, 7, 7]}, ["y"], {"w": integers, "wz": zero, "b": bias,
                                                            "ws": np.float32(0.01)})
    build = build_engine(model, cache=False, timing=False)
    assert precisions(build)[-1] == "int8" and not fallbacks(build.engine())
    feeds = {"x": np.random.default_rng(1).normal(0.5, 1, (2, 4, 7, 7)).astype(np.float32)}
    np.testing.assert_allclose(build.engine().run(feeds)["y"], in_numpy(model, feeds)["y"], 1e-4, 1e-4)


@pytest.mark.parametrize("depth, zero", [(518, np.int8(0)), (519, np.int8(0)), (200, np.uint8(254))], ids=str)
def test_sums_that_are_read_as_integers_are_those_of_int8_where_float32_has_them_all(depth: int, zero: Any) -> None:
    integers = np.full((depth, 8), -127 if zero == 0 else 0, np.int8).view(zero.dtype)
    integers[::7, 1:] = 5
    model = small_model([node("QuantizeLinear", "x scale zero", "q"), node("MatMulInteger", "q w zero wz", "y")],
                        {"x": [6, depth]}, ["y"], {**NUMBERS, "w": integers, "wz": zero})
    build = build_engine(model, cache=False, timing=False)
    feeds = {"x": np.random.default_rng(1).uniform(50, 99, (6, depth)).astype(np.float32)}
    feeds["x"][0] = 1e4                                                     # 255 everywhere
    got, want = build.engine().run(feeds)["y"], in_numpy(model, feeds)["y"]
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.int32 and not fallbacks(build.engine())
    kernels = {step.tactic.partition(":")[0] for step in build.plan.machine.steps}
    assert "int8" in precisions(build) and ("integer_product" in kernels) == (depth == 519)
    assert any("its sums are read as integers" in str(note) for note in build.notes) == (depth == 519)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_an_lstm_that_rounds_its_states_multiplies_integers(direction: str) -> None:
    """Results differ by a step of the state where kernel and reference round differently."""
    count, size, hidden = 1 + (direction == "bidirectional"), 6, 9
    scales = [np.full(count, 0.01, np.float32), np.zeros(count, np.int8)] * 2
    random = np.random.default_rng(1)
    inputs = [random.standard_normal((4, 2, size), np.float32), weights(count, size, 4 * hidden),
              weights(count, hidden, 4 * hidden), random.standard_normal((count, 8 * hidden), np.float32)]
    model = model_of("DynamicQuantizeLSTM", [*inputs, None, None, None, None, *scales], (1, 2, 3, 8, 9, 10, 11), 3,
                     hidden_size=hidden, direction=direction)
    build = build_engine(model, cache=False, timing=False)
    kernels = {step.tactic.partition(":")[0]: step.precision for step in build.plan.machine.steps}
    assert kernels["contraction"] == kernels["recurrence"] == "int8" and not fallbacks(build.engine())
    feeds = {"i0": inputs[0]}
    for name, wanted in run(graph_from_onnx(model), feeds).items():
        np.testing.assert_allclose(build.engine().run(feeds)[name], wanted, 0, 0.02)
    with pytest.raises(ModelError, match="no recurrent layer with a rounded state"):
        onnx_from_graph(graph_of(build.plan))
