"""Models from ONNX Runtime's optimiser are compiled completely and correctly."""
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.runtime.engine import Engine

TOKENS, HIDDEN, HEADS = 16, 32, 2
RNG = np.random.default_rng(11)


class Layer:
    """First layer of a transformer: nodes and random constants."""

    def __init__(self):
        self.nodes, self.constants = [], {}

    def constant(self, name, *shape):
        self.constants[name] = (RNG.standard_normal(shape) / 5).astype(np.float32)
        return name

    def add(self, op, inputs, outputs, domain="com.microsoft", **attrs):
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **attrs))

    def model(self, inputs):
        graph = helper.make_graph(
            self.nodes, "layer", [helper.make_tensor_value_info(name, TensorProto.INT32, ["N", TOKENS])
                                  for name in inputs], [helper.make_empty_tensor_value_info("y")],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()])
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def with_projections(layer, given):
    weights = [layer.constant("weights", HIDDEN, 3 * HIDDEN), layer.constant("bias", 3 * HIDDEN)]
    layer.add("Attention", [given, *weights, "mask"], ["attended"], num_heads=HEADS)


def of_many_heads(layer, given):
    for part in "qkv":
        layer.add("MatMul", [given, layer.constant(f"weights_{part}", HIDDEN, HIDDEN)], [part], domain="")
    layer.add("MultiHeadAttention", [*"qkv", layer.constant("bias", 3 * HIDDEN), "mask"], ["attended"],
              num_heads=HEADS)


def transformer(attention, gelu):
    layer = Layer()
    tables = [layer.constant(name, *shape) for name, shape in (
        ("words", (50, HIDDEN)), ("positions", (TOKENS, HIDDEN)), ("segments", (2, HIDDEN)), ("gamma", (HIDDEN,)),
        ("beta", (HIDDEN,)))]
    layer.add("EmbedLayerNormalization", ["ids", "types", *tables, "mask"], ["embedded", "lengths"])
    attention(layer, "embedded")
    layer.add("MatMul", ["attended", layer.constant("out", HIDDEN, HIDDEN)], ["projected"], domain="")
    norm = [layer.constant(name, HIDDEN) for name in ("gamma_1", "beta_1", "bias_1")]
    layer.add("SkipLayerNormalization", ["projected", "embedded", *norm], ["normed"])
    layer.add("FusedMatMul", ["normed", layer.constant("up", 2 * HIDDEN, HIDDEN)], ["wide"], transB=1, alpha=0.5)
    layer.add(gelu, ["wide", layer.constant("bias_2", 2 * HIDDEN)], ["active"])
    layer.add("MatMul", ["active", layer.constant("down", 2 * HIDDEN, HIDDEN)], ["narrow"], domain="")
    layer.add("SkipSimplifiedLayerNormalization", ["narrow", "normed", layer.constant("gamma_2", HIDDEN)], ["y"])
    return layer.model(["ids", "types", "mask"])


@pytest.mark.parametrize("attention, gelu", [(with_projections, "BiasGelu"), (of_many_heads, "FastGelu")])
def test_a_transformer_of_fused_operators_is_compiled_as_a_whole(attention, gelu):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = transformer(attention, gelu)
    feeds = {"ids": RNG.integers(0, 50, (3, TOKENS)), "types": RNG.integers(0, 2, (3, TOKENS)),
             "mask": np.arange(TOKENS) < np.array([[TOKENS], [9], [1]])}
    feeds = {name: array.astype(np.int32) for name, array in feeds.items()}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, feeds)
    builder = Builder(BuildConfig(timing=False))
    plan = builder.plan(builder.graph(model))
    assert not any(step.fallback for step in plan.machine.steps)
    np.testing.assert_allclose(Engine(plan).run(feeds)["y"], expected, 1e-3, 1e-4)
