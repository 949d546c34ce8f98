"""Convolutions and pools over volumes run on the kernels of images, in every precision and batch size."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from infer_server.engines.plan.plan import Step
from infer_server.engines.runtime.engine import Engine
from tests.engines.compiler.small_models import assert_right, node, small_model
from tests.engines.compiler.test_attention import built
from tests.zoo import run_onnx

CHANNELS = 16


def u_net() -> onnx.ModelProto:
    """Return a 3D U-Net with one strided level, a skip connection, a pool and a classifier."""
    random = np.random.default_rng(0)

    def weights(*shape: int) -> NDArray[np.float32]:
        return (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    nodes = [node("Conv", "x w", "a", pads=[1] * 6), node("InstanceNormalization", "a scale bias", "n"),
             node("Relu", "n", "r"), node("Conv", "r down", "d", pads=[1] * 6, strides=[2] * 3),
             node("ConvTranspose", "d up", "u", strides=[2] * 3), node("Concat", "u r", "both", axis=1),
             node("Conv", "both v", "e", pads=[1] * 6), node("Relu", "e", "f"),
             node("MaxPool", "f", "p", kernel_shape=[3, 2, 2], strides=[2] * 3, pads=[1, 0, 0, 1, 0, 0]),
             node("Conv", "p out bias", "y")]
    for part in nodes:
        part.name = part.output[0]      # ONNX Runtime wants each name once
    c = CHANNELS
    constants = {"w": weights(c, 2, 3, 3, 3), "scale": 1 + weights(c), "bias": weights(c),
                 "down": weights(c, c, 3, 3, 3), "up": weights(c, c, 2, 2, 2), "v": weights(c, 2 * c, 3, 3, 3),
                 "out": weights(c, c, 1, 1, 1)}
    return small_model(nodes, {"x": ["N", 2, 6, 8, 10]}, ["y"], constants)


def families(steps: Sequence[Step]) -> set[str]:
    return {step.tactic.partition(":")[0] for step in steps}


TILED = {"permute", "halo_fill", "contraction", "global_pool", "pointwise", "pool"}


def test_a_network_of_volumes_has_the_kernels_of_images() -> None:
    engine = assert_right(u_net(), tolerance=2e-5)
    assert families(engine.plan.machine.steps) <= TILED


def test_volumes_are_quantised_like_images(tmp_path: Path) -> None:
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 2, 6, 8, 10)).astype(np.float32)}
    engine = built(u_net(), tmp_path, feeds, precision="int8")
    assert families(engine.plan.machine.steps) <= TILED
    expected = run_onnx(u_net(), feeds)["y"]
    for runner in (engine, Engine(engine.plan, threads=2)):
        error = np.linalg.norm(runner.run(feeds)["y"] - expected) / np.linalg.norm(expected)
        assert error < 0.05


@pytest.mark.parametrize("kernel, attrs", [
    ((2, 1, 3), {"strides": [2, 1, 3], "dilations": [1, 2, 1], "pads": [0, 1, 2, 1, 0, 0]}),
    ((3, 3, 3), {"pads": [1] * 6, "group": 6}), ((3, 2, 1), {"group": 2})], ids=str)
def test_any_window_over_volumes_is_a_contraction(kernel: tuple[int, ...], attrs: dict[str, Any]) -> None:
    weights = np.random.default_rng(0).standard_normal((6, 6 // attrs.get("group", 1), *kernel)).astype(np.float32)
    model = small_model([node("Conv", "x w", "y", **attrs)], {"x": ["N", 6, 5, 7, 8]}, ["y"], {"w": weights})
    assert "contraction" in families(assert_right(model, tolerance=2e-5).plan.machine.steps)


def test_a_transposed_window_over_volumes_is_a_contraction_for_each_phase() -> None:
    weights = np.random.default_rng(0).standard_normal((5, 7, 3, 4, 3)).astype(np.float32)
    attrs = {"strides": [2] * 3, "pads": [1] * 6, "output_padding": [1, 0, 0]}
    model = small_model([node("ConvTranspose", "x w", "y", **attrs)], {"x": ["N", 5, 3, 4, 5]}, ["y"], {"w": weights})
    assert families(assert_right(model, tolerance=2e-5).plan.machine.steps) <= TILED
