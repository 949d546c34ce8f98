"""Weight-only builds: packed weights, their values, the rest of the model, and what is refused."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from infer_server import Calibration, EngineCache, WeightOnly, load_engine
from infer_server.engines.compiler.build import EngineBuild, build_engine
from infer_server.engines.compiler.specialise import relower
from infer_server.engines.compiler.weight_only.quantise import kept_names, quantise_weights
from infer_server.engines.errors import ConfigError
from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.frontend.onnx_file import read_model
from infer_server.engines.frontend.weight_only.groups import nearest
from infer_server.engines.frontend.weight_only.layers import SMALLEST, find_layers
from infer_server.engines.plan.plan import graph_of
from infer_server.engines.plan.weights import weights_text
from tests.engines.compiler.half_models import halved
from tests.engines.compiler.weight_only.models import Arrays, encoder, ids, model, normal, product, sqnr_db

SCHEMES = [WeightOnly("int8"), WeightOnly("int4"), WeightOnly("int4", 128)]


def built(proto: onnx.ModelProto, scheme: WeightOnly | None, **options: Any) -> EngineBuild:
    return build_engine(proto, cache=False, timing=False, weight_only=scheme, **options)


def kernels(build: EngineBuild) -> list[str]:
    return [step.tactic.partition(":")[0] for step in build.plan.machine.steps if step.macs]


def by_onnx_runtime(proto: onnx.ModelProto, feeds: Arrays) -> Arrays:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize("depth, width", [(200, 96), (33, 513), (32, 512), (1030, 17), (20, 820)])
@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_a_product_is_that_of_the_decoded_weights(scheme: WeightOnly, depth: int, width: int) -> None:
    weight, x = normal(depth, width), normal(3, 5, depth, seed=5)
    build = built(product(weight), scheme)
    real = nearest(weight.T.copy(), scheme.bits, scheme.group or depth).real().T
    np.testing.assert_allclose(build.engine().run({"x": x})["y"], x @ real, 1e-4, 1e-3)
    assert kernels(build) == ["blocked_product" if scheme.bits == 4 else "contraction"]
    stored = sum(array.nbytes for array in graph_of(build.plan).constants.values())
    assert stored <= weight.size * scheme.bits / 8 + 4 * width * (2 * -(-depth // (scheme.group or depth)) + 1)


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_a_gemm_keeps_its_bias(scheme: WeightOnly, trans: int) -> None:
    weight, x = normal(100, 200), normal(4, 200 if trans else 100, seed=5)
    build = built(product(weight, transB=trans), scheme)
    rows = weight if trans else weight.T.copy()
    expected = x @ nearest(rows, scheme.bits, scheme.group or rows.shape[1]).real().T + normal(len(rows), seed=1)
    np.testing.assert_allclose(build.engine().run({"x": x})["y"], expected, 1e-4, 1e-3)


@pytest.mark.parametrize("values", [0.0, 0.5, -0.25])
def test_constant_weights_are_exact(values: float) -> None:
    weight, x = np.full((128, 130), values, np.float32), normal(2, 5, 128, seed=5)
    weight[40:70] = 0
    made = built(product(weight), WeightOnly("int4")).engine().run({"x": x})["y"]
    np.testing.assert_allclose(made, x @ weight, 1e-4, 1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_layers_tables_and_the_rest_of_a_model(scheme: WeightOnly, precision: str) -> None:
    build = built(encoder(), scheme, precision=precision)
    expected = built(encoder(), None).engine().run(ids())["y"]
    assert sqnr_db(expected, build.engine().run(ids())["y"]) > (30 if scheme.bits == 8 else 13)
    report = build.plan.metadata["weights"]
    assert [(layer["node"], layer["bits"]) for layer in report["layers"]] == [
        ("embedding", 8), ("first", scheme.bits), ("second", scheme.bits)]
    assert report["float_layers"] == {"small": f"fewer than {SMALLEST} weights (1040)"}
    assert scheme.bits == 8 or kernels(build).count("blocked_product") == 2
    quantised = [array for array in graph_of(build.plan).constants.values() if array.dtype.itemsize == 1]
    assert sum(array.size for array in quantised) == sum(
        np.prod(layer["shape"]) * layer["bits"] // 8 for layer in report["layers"])


def test_rows_are_rounded_to_bytes_at_accuracy_level_4() -> None:
    build = built(encoder(), WeightOnly("int4", accuracy_level=4))
    assert "nest" in {step.tactic.partition(":")[0] for step in build.plan.machine.steps}
    level0 = built(encoder(), WeightOnly("int4")).engine().run(ids())["y"]
    assert sqnr_db(level0, build.engine().run(ids())["y"]) > 30


def test_a_plan_is_written_read_compiled_again_and_cached(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "cache")
    build, other = (build_engine(encoder(), cache=cache, timing=False, weight_only=WeightOnly("int4", size))
                    for size in (32, 64))
    assert other.cached is None
    assert build_engine(encoder(), cache=cache, timing=False, weight_only=WeightOnly("int4", 32)).cached
    build.save(tmp_path / "m.plan")
    expected = build.engine().run(ids())["y"]
    np.testing.assert_array_equal(load_engine(tmp_path / "m.plan").run(ids())["y"], expected)
    np.testing.assert_allclose(EngineBuild(relower(build.plan, "portable")).engine().run(ids())["y"], expected, 1e-3,
                               1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_specialisations_of_a_model_with_open_shapes_keep_packed_weights(precision: str) -> None:
    proto = encoder()
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "T"
    engine = built(proto, WeightOnly("int4"), precision=precision, symbolic_plans=False).engine()
    feeds = {"ids": np.random.default_rng(0).integers(0, 300, (2, 11))}
    fixed = encoder()
    fixed.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 11
    expected = built(fixed, WeightOnly("int4"), precision=precision).engine().run(feeds)["y"]
    np.testing.assert_allclose(engine.run(feeds)["y"], expected, 1e-2, 1e-2)
    steps = engine.at({"ids": (2, 11)}).plan.machine.steps
    assert "blocked_product" in {step.tactic.partition(":")[0] for step in steps}


def test_onnx_runtime_runs_the_exported_model() -> None:
    for scheme in (*SCHEMES, WeightOnly("int4", accuracy_level=4)):
        build = built(encoder(), scheme)
        exported = onnx_from_graph(graph_of(build.plan), packed=True)
        assert sum(node.op_type == "MatMulNBits" for node in exported.graph.node) == (2 if scheme.bits == 4 else 0)
        made, expected = by_onnx_runtime(exported, ids())["y"], build.engine().run(ids())["y"]
        assert sqnr_db(expected, made) > (30 if scheme.accuracy_level else 80)
        np.testing.assert_allclose(built(exported, None).engine().run(ids())["y"], expected, 1e-2, 1e-2)


@pytest.mark.parametrize("depth", [20, 40, 300])
def test_a_channel_with_one_scale_is_exported_in_blocks(depth: int) -> None:
    integers = np.random.default_rng(0).integers(-8, 8, (depth, SMALLEST // depth + 1))
    integers[0] = -8
    build = built(product(integers.astype(np.float32) / 4), WeightOnly("int4"))
    x = normal(2, 5, depth, seed=5)
    made = by_onnx_runtime(onnx_from_graph(graph_of(build.plan), packed=True), {"x": x})["y"]
    np.testing.assert_allclose(made, build.engine().run({"x": x})["y"], 1e-4, 1e-3)


# ---- which weights
def shared(*nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("y",), **constants: Any) -> onnx.ModelProto:
    """Return nodes on x [N, 5, 200] and weights w [200, 200]."""
    return model(list(nodes), {"x": (TensorProto.FLOAT, ["N", 5, 200])}, dict.fromkeys(outputs, ["N", 5, 200]),
                 {"w": normal(200, 200), **constants})


def named(op: str, inputs: str, output: str, **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], output, **attrs)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_weights_behind_a_transpose_are_found_and_packed_once(scheme: WeightOnly) -> None:
    proto = shared(named("Transpose", "w", "t", perm=[1, 0]), named("MatMul", "x t", "h"), named("MatMul", "h t", "y"))
    source, report = quantise_weights(read_model(proto), scheme)
    assert len(report["layers"]) == 1 and "w" not in source.weights
    assert ("Transpose" in [node.op_type for node in source.proto.graph.node]) == (scheme.bits == 8)
    real = nearest(normal(200, 200), scheme.bits, scheme.group or 200).real()
    x = normal(2, 5, 200, seed=5)
    np.testing.assert_allclose(built(proto, scheme).engine().run({"x": x})["y"], x @ real.T @ real.T, 1e-3, 1e-1)


def test_tied_embeddings_are_a_table_of_bytes_and_packed_weights() -> None:
    nodes = [named("Gather", "w ids", "e"), named("Transpose", "w", "t", perm=[1, 0]), named("MatMul", "e t", "y")]
    proto = model(nodes, {"ids": (TensorProto.INT64, ["N", 5])}, {"y": ["N", 5, 300]}, {"w": normal(300, 100)})
    source, report = quantise_weights(read_model(proto), WeightOnly("int4"))
    assert [(layer["node"], layer["bits"]) for layer in report["layers"]] == [("e", 8), ("y", 4)]
    assert source.weights.keys() == {"w.int8", "w.scales", "w.int4", "w.scales.1"}
    feeds = {"ids": np.arange(10).reshape(2, 5)}
    made = built(proto, WeightOnly("int4")).engine().run(feeds)["y"]
    assert sqnr_db(by_onnx_runtime(proto, feeds)["y"], made) > 15


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_a_float16_model_is_quantised(scheme: WeightOnly) -> None:
    proto = halved(encoder())
    build = built(proto, scheme)
    assert len(build.plan.metadata["weights"]["layers"]) == 3
    assert scheme.bits == 8 or kernels(build).count("blocked_product") == 2
    stored = sum(array.nbytes for array in graph_of(build.plan).constants.values())
    assert stored < 0.6 * build.plan.metadata["weights"]["float_bytes"]
    expected = built(encoder(), scheme).engine().run(ids())["y"]
    assert sqnr_db(expected, build.engine().run(ids())["y"]) > 25


@pytest.mark.parametrize("nodes, reason", [
    ([named("MatMul", "x w", "h"), named("Add", "h v", "y")], ""),
    ([named("MatMul", "x w", "h"), named("ReduceSum", "w", "s", keepdims=0), named("Add", "h s", "y")],
     "'s' reads its weights, too"),
    ([named("MatMul", "x w", "h"), named("Transpose", "w", "t"), named("MatMul", "h t", "y")],
     "its weights are read along both axes"),
    ([named("MatMul", "x nan", "y")], "weights that are not finite"),
    ([named("MatMul", "x few", "y")], f"fewer than {SMALLEST} weights (1000)"),
    ([named("MatMul", "x w", "y"), named("Identity", "w", "out")], "its weights are an output of the model"),
])
def test_weights_that_stay_float_say_why(nodes: list[onnx.NodeProto], reason: str) -> None:
    outputs = ("y", "out") if nodes[-1].output[0] == "out" else ("y",)
    nan = normal(200, 200)
    nan[3, 4] = np.nan
    found = find_layers(read_model(shared(*nodes, outputs=outputs, v=normal(200), nan=nan, few=normal(200, 5))))
    assert bool(found.layers) == (not reason) and (not reason or reason in found.kept.values())


@pytest.mark.parametrize("entry, left", [
    ("first", ["embedding", "second"]), ("[fs]*", ["embedding"]), ("first...", ["embedding"]),
    ("emb*", ["first", "second"])])
def test_nodes_stay_float_by_name(entry: str, left: list[str]) -> None:
    source = read_model(encoder())
    found = find_layers(source, kept_names(source, (entry,)))
    assert [layer.node for layer in found.layers] == left


def test_products_of_a_program_are_quantised_in_fp32() -> None:
    """Compress makes the number of rows depend on the data."""
    nodes = [named("MatMul", "x w", "h"), named("ReduceMax", "h", "m", axes=[-1], keepdims=0),
             named("Greater", "m two", "c"), named("Compress", "h c", "rows", axis=0), named("MatMul", "rows v", "y")]
    proto = model(nodes, {"x": (TensorProto.FLOAT, ["N", 200])}, {"y": ["M", 100]},
                  {"w": normal(200, 200) / 14, "v": normal(200, 100) / 14, "two": np.float32(2.5)})
    build, x = built(proto, WeightOnly("int8")), normal(40, 200, seed=5)
    assert build.plan.program and len(build.plan.metadata["weights"]["layers"]) == 2
    expected, made = built(proto, None).engine().run({"x": x})["y"], build.engine().run({"x": x})["y"]
    assert made.shape == expected.shape and sqnr_db(expected, made) > 30
    with pytest.raises(ConfigError, match="packed in fp32 builds alone: leave --bf16 out"):
        built(proto, WeightOnly("int8"), precision="bf16")
    with pytest.raises(ConfigError, match="leave it out to round to the nearest"):
        built(proto, WeightOnly("int8"), calibration=Calibration([{"x": x}]))


def test_weights_that_a_kept_node_shares_stay_float() -> None:
    source = read_model(shared(named("MatMul", "x w", "h"), named("MatMul", "h w", "y")))
    assert len(find_layers(source).layers) == 2 and not find_layers(source, ("h",)).layers


# ---- refusals and text
@pytest.mark.parametrize("options, message", [
    ({"type": "int3"}, "--weight-only int3: there is no such type of weights; did you mean 'int8'"),
    ({"type": "int8", "group_size": 32}, "INT8 weights have one scale per output channel"),
    ({"type": "int4", "group_size": 48}, "a group has 32, 64, 128 weights"),
    ({"type": "int4", "accuracy_level": 2}, "it is 0 .rows are float. or 4"),
    ({"type": "int8", "accuracy_level": 4}, "--accuracy-level 4 is of --weight-only int4"),
])
def test_contradictory_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WeightOnly(**options)


@pytest.mark.parametrize("options, message", [
    ({"precision": "int8"}, "--weight-only int4 leaves activations in float, and --int8"),
    ({"precision": "best"}, "and --best"),
    ({"keep_float": ("frist",)}, "no node of small is called 'frist'; did you mean 'first'"),
    ({"keep_float": ("*",)}, "has no weights to quantise.*'embedding': kept in float"),
    ({"calibration": Calibration(ids, calibrator="mse")}, "leave --calibrator"),
])
def test_contradictory_builds_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(encoder(), WeightOnly("int4"), **options)
    with pytest.raises(ConfigError, match="weight_only is a WeightOnly"):
        built(encoder(), "int4", **options)     # type: ignore[arg-type]


def test_a_model_with_quantised_activations_is_refused() -> None:
    pair = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]), named("MatMul", "d w", "y")]
    with pytest.raises(ConfigError, match="is quantised already"):
        built(shared(*pair, s=np.float32(0.05), z=np.uint8(128)), WeightOnly("int4"))


def test_the_report_counts_weights_bits_bytes_and_errors() -> None:
    seen: list[tuple[str, int, int]] = []
    build = built(encoder(), WeightOnly("int4"), progress=lambda *stage: seen.append(stage[:3]))
    assert [(done, of) for stage, done, of in seen if stage == "quantising"] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    report, plain = build.plan.metadata["weights"], encoder()
    assert report["float_bytes"] == sum(4 * np.prod(array.dims) for array in plain.graph.initializer)
    assert report["bytes"] < report["float_bytes"] / 4 and 5 < report["bits"] < 8
    assert all(18 < layer["sqnr_db"] < (50 if layer["bits"] == 8 else 24) for layer in report["layers"])
    text = weights_text(build.plan.metadata)
    for words in ("weights: 0.11 of 0.11 M are quantised", "1 table of INT8, a scale for each row",
                  "2 matrices of INT4, a scale for 32 weights, rounded to the nearest", "SQNR of the weights",
                  "1 stays float, 1 of them: fewer than 16384 weights"):
        assert words in text
    assert not weights_text(built(encoder(), None).plan.metadata)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_in_constant_nodes_are_quantised(kind):
    weights = np.random.default_rng(0).standard_normal((256, 96)).astype(np.float32)
    nodes = [helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weights, "w")),
             helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 256])],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 96])])
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    build = build_engine(source, weight_only=WeightOnly(kind), timing=False, cache=False)
    assert [layer["node"] for layer in build.plan.metadata["weights"]["layers"]] == ["product"]
    x = np.random.default_rng(1).standard_normal((3, 256)).astype(np.float32)
    assert np.corrcoef(build.engine().run({"x": x})["y"].ravel(), (x @ weights).ravel())[0, 1] > 0.98
