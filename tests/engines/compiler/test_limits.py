"""Types that a plan cannot hold, and sizes that no machine has, are refused by name."""
from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from onnx import TensorProto

from infer_server.engines import capacity
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.errors import ConfigError, ModelError
from tests.engines.compiler.small_models import assert_right, engine_of, node, small_model

CONVOLUTION = small_model([node("Conv", "x w", "y")], {"x": ["n", 3, 64, 64]}, ["y"],
                          {"w": np.ones((16, 3, 1, 1), np.float32)})


def test_a_tensor_of_a_type_that_no_plan_holds_is_refused_by_name() -> None:
    nodes = [node("Cast", "x", "t", to=TensorProto.STRING), node("Cast", "t", "y", to=TensorProto.FLOAT)]
    with pytest.raises(ModelError, match=r"tensor 't', of node 'cast' \([a-z.]*Cast\), is of type \w+, which"):
        engine_of(small_model(nodes, {"x": ["n", 4]}, ["y"], opset=21))


def test_weights_of_four_bits_become_floats_at_build() -> None:
    assert_right(small_model(
        [node("Cast", "c", "w4", to=TensorProto.INT4), node("DequantizeLinear", "w4 scale", "w"),
         node("MatMul", "x w", "y")], {"x": ["n", 4]}, ["y"],
        {"c": np.arange(-8, 8).reshape(4, 4).astype(np.float32), "scale": np.float32(0.25)}, opset=21))


@pytest.mark.parametrize("scales", [[0.5, 1, 2, 2], [1, 1.2, 2, 2]])
def test_items_and_channels_that_are_resized_are_not_taken_for_pixels(scales: list[float]) -> None:
    """The kernel resizes rows and columns only; here the reference does the work."""
    resize = node("Resize", "x r scales", "y", mode="linear")
    assert_right(small_model([resize], {"x": [2, 3, 4, 4]}, ["y"],
                             {"r": np.zeros(0, np.float32), "scales": np.float32(scales)}))


def with_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(capacity, "memory_limit", lambda: size)


def test_a_batch_that_does_not_fit_is_refused_with_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 2_000_000)
    builder = Builder(BuildConfig(timing=False, max_batch=8))
    with pytest.raises(ConfigError, match=r"tensors \('y.*' alone .* GB\) take .* GB, .* for a batch of 8; lower"):
        builder.plan(builder.graph(CONVOLUTION))


def test_a_batch_that_fits_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 2_000_000)
    builder = Builder(BuildConfig(timing=False, max_batch=2))
    builder.plan(builder.graph(CONVOLUTION))


def test_a_limit_on_the_process_is_a_limit_on_the_model() -> None:
    """`ulimit -v` sets RLIMIT_AS, which counts memory that the process already has."""
    script = ("import resource; from infer_server.engines import capacity; size = capacity._address_space(); "
              "resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), -1)); print(capacity.memory_limit())")
    limit = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert 0.9 * 2**30 < limit <= 2**30


def test_an_item_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 300_000)
    with pytest.raises(ConfigError, match="too much for one item"):
        engine_of(CONVOLUTION)


def test_an_extent_that_depends_on_data_is_said_to() -> None:
    with pytest.raises(ModelError, match=r"'nonzero' \(NonZero\).*: an extent of the result depends on data"):
        engine_of(small_model([node("NonZero", "x", "y")], {"x": [4]}, ["y"]))
