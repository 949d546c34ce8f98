"""INT8 models that join tensors of different ranges, with the error of each part of an output."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from infer_server.calibration.accuracy.measures import sqnr_db
from infer_server.cli.inspect_engine import describe, layers
from infer_server.engines.compiler.build import EngineBuild, build_engine
from infer_server.engines.compiler.ranges import Calibrated
from infer_server.engines.errors import ConfigError
from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ir.graph import Array, Graph
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.ops.reference import run
from infer_server.engines.passes.pipeline import optimise, simplify
from infer_server.engines.passes.quantization.quantize import edges_to_calibrate, quantize
from infer_server.engines.plan.plan import graph_of
from tests.engines.compiler.small_models import small_model

LEAST_DB = 25       # least SQNR of a part of an output; with one scale for unlike parts it is below 15


class Net:
    """Builder of a model, whose nodes are named after their first outputs."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(5)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Any] = {}

    def __call__(self, op: str, inputs: str, outputs: str, **attrs: Any) -> None:
        names = outputs.split()
        self.nodes.append(helper.make_node(op, inputs.split(), names, name=names[0], **attrs))

    def conv(self, x: str, y: str, channels: int, couts: int, *, scale: float = 1, kernel: int = 1, relu: bool = True,
             **attrs: Any) -> None:
        size = (couts, channels, kernel, kernel)
        self.constants[f"{y}.w"] = (scale * self.random.standard_normal(size) / np.sqrt(size[1] * kernel ** 2 / 2)
                                    ).astype(np.float32)
        self("Conv", f"{x} {y}.w", f"{y}.sum" if relu else y, pads=[kernel // 2] * 4, **attrs)
        if relu:
            self("Relu", f"{y}.sum", y)

    def model(self, *outputs: str) -> onnx.ModelProto:
        return small_model(self.nodes, {"x": ["N", 3, 16, 16]}, outputs, self.constants, opset=17)


def detector(tail: str) -> onnx.ModelProto:
    """Return boxes of up to some hundred pixels, scores, and keypoints with confidences, joined as by exporters."""
    net = Net()
    net.conv("x", "a", 3, 16, kernel=3, strides=[2, 2])
    net.conv("a", "b", 16, 16, kernel=3, strides=[2, 2])
    net.constants |= {"stride": np.float32(64), "rows": np.int64([0, -1, 16]), "four": np.int64([4, 6]),
                      "strides": np.float32([8] * 4 + [1] * 6).reshape(1, 10, 1), "two": np.int64([2, 1]),
                      "points": np.int64([0, 2, 3, 16]), "flat": np.int64([0, 6, 16])}
    for name, channels in (("box", 4), ("logit", 6)):
        net.conv("b", name, 16, channels, relu=False)
        net("Reshape", f"{name} rows", f"{name}s")
    net("Abs", "boxs", "side")
    net("Mul", "side stride", "pixels")
    net("Sigmoid", "logits", "score")
    net("Concat", "pixels score", "y" if tail == "concat" else "joined", axis=1)
    if tail == "strides":
        net("Mul", "joined strides", "y")
    elif tail == "split":
        net("Transpose", "joined", "turned", perm=[0, 2, 1])
        net("Split", "turned four", "y z", axis=2)
    elif tail == "keypoints":
        net("Reshape", "logits points", "point")
        net("Split", "point two", "at sure", axis=2)
        net("Mul", "at stride", "at_pixels")
        net("Sigmoid", "sure", "confidence")
        net("Concat", "at_pixels confidence", "pair", axis=2)
        net("Reshape", "pair flat", "z")
        net("Concat", "joined z", "y", axis=1)
    return net.model(*("y", "z")[:1 + (tail == "split")])


def levels() -> onnx.ModelProto:
    """Return Concats of boxes and logits at three levels, of all levels, and of results of the parts."""
    net, x, channels = Net(), "x", 3
    net.constants |= {"rows": np.int64([0, 10, -1]), "four": np.int64([4, 6]),
                      "strides": np.repeat(np.float32([8, 16, 32]), [64, 16, 4]).reshape(1, 1, 84)}
    for level in "123":
        net.conv(x, f"f{level}", channels, 16, kernel=3, strides=[2, 2])
        net.conv(f"f{level}", f"box{level}", 16, 4)
        net.conv(f"f{level}", f"logit{level}", 16, 6, relu=False)
        net("Concat", f"box{level} logit{level}", f"both{level}", axis=1)
        net("Reshape", f"both{level} rows", f"rows{level}")
        x, channels = f"f{level}", 16
    net("Concat", "rows1 rows2 rows3", "all", axis=2)
    net("Split", "all four", "boxes logits", axis=1)
    net("Mul", "boxes strides", "pixels")
    net("Sigmoid", "logits", "scores")
    net("Concat", "pixels scores", "y", axis=1)
    return net.model("y")


def skip() -> onnx.ModelProto:
    """Return a U-Net whose decoder is 100 times as large as the skip, which another layer reads as well."""
    net = Net()
    net.conv("x", "a", 3, 16, kernel=3)
    net("MaxPool", "a", "p", kernel_shape=[2, 2], strides=[2, 2])
    net.conv("p", "d", 16, 16, scale=100)
    net.constants["twice"] = np.float32([1, 1, 2, 2])
    net.nodes.append(helper.make_node("Resize", ["d", "", "twice"], ["u"], name="u", mode="nearest"))
    net("Concat", "a u", "joined", axis=1)
    net.conv("joined", "z", 32, 4, relu=False)
    net.conv("a", "y", 16, 4, kernel=3, relu=False)
    return net.model("y", "z")


def residual(shortcut_first: bool) -> onnx.ModelProto:
    """Return a residual block whose first layer and shortcut read one tensor, so that one kernel computes both."""
    net = Net()
    net.conv("x", "stem", 3, 16, kernel=3)
    branches = [("a", True), ("shortcut", False)]
    for name, relu in reversed(branches) if shortcut_first else branches:
        net.conv("stem", name, 16, 16, relu=relu)
    net.conv("a", "middle", 16, 16, kernel=3)
    net.conv("middle", "b", 16, 16, relu=False)
    net("Add", "b shortcut", "sum")
    net("Relu", "sum", "block")
    net.conv("block", "y", 16, 4, relu=False)
    return net.model("y")


def shuffle() -> onnx.ModelProto:
    """Return two tensors of different ranges with shuffled channels, one of which is also read alone."""
    net = Net()
    net.conv("x", "a", 3, 16, kernel=3)
    net.conv("a", "small", 16, 8)
    net.conv("a", "large", 16, 8, kernel=3, scale=100)
    net.constants |= {"groups": np.int64([0, 2, 8, 16, 16]), "whole": np.int64([0, 16, 16, 16]),
                      "halves": np.int64([8, 8])}
    net("Concat", "small large", "joined", axis=1)
    net("Reshape", "joined groups", "apart")
    net("Transpose", "apart", "turned", perm=[0, 2, 1, 3, 4])
    net("Reshape", "turned whole", "shuffled")
    net("Split", "shuffled halves", "left right", axis=1)
    net.conv("left", "y", 8, 4, relu=False)
    net.conv("right", "v", 8, 4, kernel=3, relu=False)
    net.conv("small", "z", 8, 4, relu=False)
    return net.model("y", "v", "z")


def inside_and_out() -> onnx.ModelProto:
    """Return a Concat that is a graph output and a convolution's input, and a sum and a gate of unlike ranges."""
    net = Net()
    net.conv("x", "a", 3, 16, kernel=3)
    net.conv("a", "b", 16, 16, scale=100)
    net("GlobalAveragePool", "a", "mean")
    net.conv("mean", "gate.sum", 16, 16, relu=False)
    net("Sigmoid", "gate.sum", "gate")
    net("Mul", "b gate", "c")
    net("Add", "a c", "d")
    net("Concat", "a d", "y", axis=1)
    net.conv("y", "z", 32, 4, relu=False)
    net.conv("a", "v", 16, 4, kernel=3, relu=False)
    return net.model("y", "z", "v")


def norm(kind: str) -> onnx.ModelProto:
    net = Net()
    net.conv("x", "a", 3, 16, kernel=3)
    net.constants |= {"scale": np.ones(16, np.float32), "bias": np.zeros(16, np.float32), "two": np.float32(2),
                      "tiny": np.float32(1e-3), "groups": np.int64([0, 4, -1]), "image": np.int64([0, 16, 16, 16]),
                      "four": np.ones(4, np.float32), "none": np.zeros(4, np.float32), "axis": np.int64([1])}
    if kind == "instance":
        net("InstanceNormalization", "a scale bias", "n")
    elif kind == "group":
        net("Reshape", "a groups", "rows")
        net("InstanceNormalization", "rows four none", "normed")
        net("Reshape", "normed image", "n")
    else:
        net("ReduceMean", "a", "mean", axes=[2, 3])
        net("Sub", "a mean", "d")
        net("Pow", f"{'a' if kind == 'rms' else 'd'} two", "square")
        net("ReduceMean", "square", "variance", axes=[2, 3])
        net("Add", "variance tiny", "more")
        net("Sqrt", "more", "deviation")
        net("Div", f"{'a' if kind == 'rms' else 'd'} deviation", "n")
    net.conv("n", "y", 16, 8, kernel=3, relu=False)
    return net.model("y")


def data(items: int, seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {"x": (random.random((items, 3, 16, 16)) * random.uniform(0.3, 1, (items, 1, 1, 1))).astype(np.float32)}


@dataclass(frozen=True)
class Ranges:
    """Recorder of the reference's minimum and maximum values: calibration without a compiler."""
    ranges: Mapping[str, tuple[float, float]]
    cache: str = ""

    def first(self, inputs: Any, pixels: bool) -> None:
        return None

    def calibrate(self, subject: Any, notify: Any, progress: Any) -> Calibrated:
        return Calibrated(Recipe(self.ranges), {})


def ranges_of(graph: Graph) -> dict[str, tuple[float, float]]:
    names = edges_to_calibrate(graph)
    seen = run(graph, data(8, 0), names)
    return {name: (float(seen[name].min()), float(seen[name].max())) for name in names}


def float_graph(model: onnx.ModelProto) -> Graph:
    return optimise(simplify(graph_from_onnx(model)))


def quality_of(model: onnx.ModelProto, keep_float: tuple[str, ...] = ()) -> Callable[..., float]:
    """Return a function that computes the SQNR of some of an output's channels."""
    graph, feeds = float_graph(model), data(8, 1)
    expected, answers = (run(each, feeds) for each in (graph, quantize(graph, ranges_of(graph), keep_float)))
    return lambda name, start=0, stop=None: sqnr_db(expected[name][:, start:stop], answers[name][:, start:stop])


def built(model: onnx.ModelProto, **options: Any) -> EngineBuild:
    options = {"precision": "int8", "calibration": Ranges(ranges_of(float_graph(model))), **options}
    return build_engine(model, timing=False, cache=False, max_batch=8, **options)


@pytest.mark.parametrize("model, parts", [
    (detector("concat"), [("y", 0, 4), ("y", 4, 10)]), (detector("strides"), [("y", 0, 4), ("y", 4, 10)]),
    (detector("split"), [("y", 0, None), ("z", 0, None)]),
    (detector("keypoints"), [("y", 0, 4), ("y", 4, 10), ("y", 10, 12), ("y", 12, 13), ("y", 15, 16)]),
    (levels(), [("y", 0, 4), ("y", 4, 10)]), (skip(), [("y", 0, None), ("z", 0, None)]),
    (shuffle(), [("y", 0, None), ("v", 0, None), ("z", 0, None)]),
    (inside_and_out(), [("y", 0, 16), ("y", 16, 32), ("z", 0, None), ("v", 0, None)])],
    ids=["boxes and scores", "times strides", "split", "keypoints", "levels", "skip", "shuffle", "inside and out"])
def test_each_part_keeps_its_precision(model: onnx.ModelProto, parts: Sequence[tuple[str, int, int | None]]) -> None:
    quality = quality_of(model)
    assert min(measured := [quality(*part) for part in parts]) > LEAST_DB, measured


@pytest.mark.parametrize("kind", ["instance", "group", "moments", "rms"])
def test_a_norm_computes_its_inside_in_float(kind: str) -> None:
    assert quality_of(norm(kind))("y") > LEAST_DB


def test_conversions_are_alike_on_every_target_and_in_the_exported_model() -> None:
    model, feeds = inside_and_out(), data(8, 1)
    build = built(model)
    answers = build.engine().run(feeds)
    assert any(step.name.endswith(".converted") for step in build.plan.machine.steps)
    for target, tolerance in (("portable", 0.0), ("numpy", 1e-6)):      # NumPy does not fuse multiplications and sums
        others = built(model, target=target).engine().run(feeds)
        for name, answer in answers.items():
            np.testing.assert_allclose(others[name], answer, rtol=0, atol=tolerance * np.abs(answer).max())
    again = run(float_graph(onnx_from_graph(graph_of(build.plan))), feeds)
    for name, answer in answers.items():
        assert sqnr_db(answer, again[name]) > 60


def test_kept_nodes_are_more_precise() -> None:
    plain, kept, behind = (quality_of(skip(), entries)("z") for entries in ((), ("joined", "u", "d"), ("p...", "a")))
    assert plain < kept < behind - 10, (plain, kept, behind)


@pytest.mark.parametrize("shortcut_first", [False, True])
@pytest.mark.parametrize("kept", ["stem", "a", "shortcut", "middle", "b", "y"])
def test_any_layer_of_a_residual_block_may_be_kept(kept: str, shortcut_first: bool) -> None:
    """If b is kept, the shortcut that only b reads stays float32, and what else its kernel computes does not."""
    model, feeds = residual(shortcut_first), data(8, 1)
    build = built(model, keep_float=(kept,))
    assert {step.precision for step in build.plan.machine.steps if kept in step.fuses} == {"fp32"}
    assert sqnr_db(run(float_graph(model), feeds)["y"], build.engine().run(feeds)["y"]) > LEAST_DB


def test_kept_nodes_are_inspected_as_such() -> None:
    plan = built(skip(), target="numpy", keep_float=("joined", "d")).plan
    assert plan.metadata["kept_float"] == ["d", "joined"] and "(kept)" in layers(plan)
    marked = {kernel["name"] for kernel in describe(plan)["kernels"] if kernel.get("kept_float")}
    assert "d" in marked and not marked & {"y.nhwc", "a"}


def test_entries_without_effect_are_refused() -> None:
    model = skip()
    with pytest.raises(ConfigError, match=r"no node of .* has a name that fits 'head/\*'"):
        built(model, keep_float=("head/*",))
    with pytest.raises(ConfigError, match="keep_float is for int8, best and weight_only; this build is fp16"):
        built(model, precision="fp16", calibration=None, keep_float=("d",))
    graph = float_graph(model)
    quantised = onnx_from_graph(quantize(graph, ranges_of(graph)))
    with pytest.raises(ConfigError, match="'u' is no convolution, matrix product or recurrent layer"):
        built(quantised, precision="fp32", calibration=None, keep_float=("u",))
