"""Norms of channels: a single kernel if they stand alone, right anywhere."""
from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from infer_server.engines import build_engine
from infer_server.engines.ir.graph import Array
from tests.engines.compiler.open_models import by_onnx_runtime, node, random
from tests.engines.compiler.small_models import small_model
from tests.engines.compiler.test_attention import family

SCALES = {"s": random(6, seed=1), "b": random(6, seed=2)}


def norm(*shape: Any, computed: bool = False) -> onnx.ModelProto:
    inputs = {"x": list(shape), **({"s": [6], "b": [6]} if computed else {})}
    return small_model([node("InstanceNormalization", "x s b", "y", epsilon=1e-3)], inputs, ["y"],
                       {} if computed else SCALES)


def expected(x: Array) -> Array:
    wide, over = x.astype(np.float64), tuple(range(2, x.ndim))
    scale, bias = (SCALES[name].reshape(-1, *(1 for _ in over)) for name in "sb")
    normed = (wide - wide.mean(over, keepdims=True)) / np.sqrt(wide.var(over, keepdims=True) + 1e-3)
    return np.asarray(normed * scale + bias)


def answers(model: onnx.ModelProto, feed: dict[str, Array], **options: Any) -> list[str]:
    """Check the model's output and return the families of its kernels."""
    engine: Any = build_engine(model, cache=False, timing=False, **options).engine()
    np.testing.assert_allclose(engine.run(feed)["y"], expected(feed["x"]), rtol=1e-4, atol=1e-4)
    return [family(step) for step in engine.plan.machine.steps]


@pytest.mark.parametrize("target", ["", "portable", "numpy"])
@pytest.mark.parametrize("shape", [(2, 6, 37), (2, 6, 5, 7), (2, 6, 3, 4, 5), (1, 6, 1, 1)], ids=str)
def test_alone_it_is_one_kernel(shape: tuple[int, ...], target: str) -> None:
    """Values far from 0 show a variance computed as the difference of two large sums."""
    families = answers(norm(*shape), {"x": 100 + random(*shape)}, target=target)
    assert families == ["norm"] or target == "numpy"


def test_a_scale_and_a_bias_may_be_computed() -> None:
    assert "norm" in answers(norm(2, 6, 5, 7, computed=True), {"x": random(2, 6, 5, 7), **SCALES})


def test_open_extents_may_be_any() -> None:
    model = norm("N", 6, "H", "W")
    engine = build_engine(model, cache=False, timing=False).engine()
    for shape in ((1, 6, 8, 8), (2, 6, 5, 9), (1, 6, 20, 3)):
        feed = {"x": random(*shape)}
        np.testing.assert_allclose(engine.run(feed)["y"], by_onnx_runtime(model, feed)["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_of_half_precision_it_is_as_exact_as_that(precision: str) -> None:
    model, feed = norm(2, 6, 5, 7), {"x": random(2, 6, 5, 7)}
    got = build_engine(model, cache=False, timing=False, precision=precision).engine().run(feed)["y"]
    np.testing.assert_allclose(got, by_onnx_runtime(model, feed)["y"], atol=0.05)
