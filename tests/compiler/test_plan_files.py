"""What the file of a compiled plan takes and gives: each weight once, and the graph back, bit for bit."""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from engines.builder import relower
from engines.plan import Plan
from engines.planfile import read_plan, write_plan
from engines.runtime import Engine
from tests.compiler.zoo_engines import compiled
from tests.zoo import Net, Tensor, architecture, images_for

BYTES = {"int8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
TARGETS = ("avx512_bf16", "avx2", "aarch64_i8mm", "portable")
DEALT = ("int8", "avx2")        # weights lie beside their places in the sum: no packing of bytes alone


@architecture(size=24)
def heavy(net: Net, x: Tensor) -> Tensor:
    """Nearly all of it is weights: of full and of narrow panels, of a matrix product, and depthwise ones."""
    x = net.conv_bn_act(x, 256, 3, stride=4, name="stem")
    x = net.conv_bn_act(x, 256, 3, groups=256, name="depthwise")
    x = net.conv_bn_act(x, 440, 3, stride=2, name="wide")
    return net.linear(net.flatten(net.global_avg_pool(x)), 300, name="fc")


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plan]:
    """(precision, target) -> the plan of the heavy model; made once."""
    folder, model = tmp_path_factory.mktemp("heavy"), heavy()
    return cache(lambda precision, target="": compiled(model, folder, precision=precision, target=target).plan)


def written(plan: Plan, folder: Path) -> tuple[Plan, int]:
    """(the plan as it is read again, the size of its file)"""
    write_plan(plan, folder / "m.plan")
    return read_plan(folder / "m.plan"), (folder / "m.plan").stat().st_size


def weights(plan: Plan) -> int:
    return sum(array.size for array in plan.graph_arrays.values() if array.ndim > 1)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("precision", BYTES)
def test_a_plan_is_hardly_larger_than_its_weights(plan_of: Callable[..., Plan], tmp_path: Path, precision: str,
                                                  target: str) -> None:
    plan = plan_of(precision, target)
    _, size = written(plan, tmp_path)
    assert weights(plan) > 1e6
    if (precision, target) != DEALT:
        assert size <= 1.1 * weights(plan) * BYTES[precision]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("precision", BYTES)
def test_a_plan_read_from_its_file_is_compiled_for_another_machine_to_the_bit(
        plan_of: Callable[..., Plan], tmp_path: Path, precision: str, target: str) -> None:
    made, here = plan_of(precision, target), plan_of(precision)
    read, _ = written(made, tmp_path)
    assert read.packed == made.packed
    assert len(made.packed) >= 3 or (precision, target) == DEALT
    moved = relower(read)
    assert moved.target == here.target and moved.constants == here.constants
    x = {"input": images_for(heavy(), 2)}
    for name, value in Engine(moved).run(x).items():
        np.testing.assert_array_equal(value, Engine(here).run(x)[name])


def test_the_graph_of_an_int8_plan_is_read_back_as_it_was(plan_of: Callable[..., Plan], tmp_path: Path) -> None:
    made = plan_of("int8")
    read, _ = written(made, tmp_path)
    assert dict(read.graph) == made.graph
    assert list(read.graph_arrays) == list(made.graph_arrays)
    for name, array in made.graph_arrays.items():
        assert read.graph_arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(read.graph_arrays[name], array)
