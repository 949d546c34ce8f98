"""A plan file stores weights as kernels read them, and the graph, bit for bit."""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from infer_server.engines.backends.llvm.codegen.isa import best_isa
from infer_server.engines.backends.llvm.runtime.expansion import expand
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.backends.llvm.session import LlvmSession
from infer_server.engines.compiler.specialise import relower
from infer_server.engines.errors import PlanTargetError
from infer_server.engines.loading import load_engine
from infer_server.engines.lowering.calls.calls import ProblemCall
from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.file import read_plan, write_plan
from infer_server.engines.plan.plan import EXPANDED, Plan, graph_of
from infer_server.engines.runtime.engine import Engine
from tests.engines.compiler.small_models import engine_of, node, small_model
from tests.engines.compiler.zoo_engines import compiled
from tests.zoo import Net, Tensor, architecture, images_for

BYTES = {"int8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
TARGETS = ("avx512_bf16", "avx2", "aarch64_i8mm", "portable")
PAIRED = ("int8", "avx2")       # weights lie beside their places in the sum, which take an eighth of their room


@architecture(size=48)
def heavy(net: Net, x: Tensor) -> Tensor:
    """Return a model that is mostly weights: full and narrow panels, a matrix product, depthwise and Winograd."""
    x = net.conv_bn_act(x, 256, 3, stride=4, name="stem")
    x = net.conv_bn_act(x, 256, 3, groups=256, name="depthwise")
    x = net.conv_bn_act(x, 80, 3, name="winograd")
    x = net.conv_bn_act(x, 1000, 3, stride=2, name="wide")
    return net.linear(net.flatten(net.global_avg_pool(x)), 300, name="fc")


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plan]:
    """Return the plan of the heavy model by (precision, target), built once."""
    folder, model = tmp_path_factory.mktemp("heavy"), heavy()
    return cache(lambda precision, target="": compiled(model, folder, precision=precision, target=target).plan)


def written(plan: Plan, folder: Path) -> tuple[Plan, int]:
    """Write a plan; return the plan as it is read again and the size of its file."""
    write_plan(plan, folder / "m.plan")
    return read_plan(folder / "m.plan"), (folder / "m.plan").stat().st_size


def weights(plan: Plan) -> int:
    return sum(array.size for array in plan.weights.values() if array.ndim > 1)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("precision", BYTES)
def test_a_stripped_plan_is_hardly_larger_than_its_weights_and_a_whole_one_by_the_graphs(
        plan_of: Callable[..., Plan], tmp_path: Path, precision: str, target: str) -> None:
    plan = plan_of(precision, target)
    _, size = written(plan, tmp_path)
    _, stripped = written(plan.strip(), tmp_path)
    assert weights(plan) > 1e6
    assert stripped <= (1.15 if (precision, target) == PAIRED else 1.1) * weights(plan) * BYTES[precision]
    own = sum(array.nbytes for array in plan.weights.values())
    assert own <= size - stripped <= 1.01 * own


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("precision", BYTES)
def test_a_plan_read_from_its_file_is_compiled_for_another_machine_to_the_bit(
        plan_of: Callable[..., Plan], tmp_path: Path, precision: str, target: str) -> None:
    made, here = plan_of(precision, target), plan_of(precision)
    read, _ = written(made, tmp_path)
    moved = relower(read)
    assert moved.machine.target == here.machine.target and moved.machine.constants == here.machine.constants
    x = {"input": images_for(heavy(), 2)}
    for name, value in Engine(moved).run(x).items():
        np.testing.assert_array_equal(value, Engine(here).run(x)[name])


def test_a_stripped_plan_runs_as_before_and_is_not_compiled_for_another_machine(plan_of: Callable[..., Plan],
                                                                                tmp_path: Path) -> None:
    plan = plan_of("int8")
    read, _ = written(plan.strip(), tmp_path)
    x = {"input": images_for(heavy(), 2)}
    for name, value in Engine(read).run(x).items():
        np.testing.assert_array_equal(value, Engine(plan).run(x)[name])
    with pytest.raises(PlanTargetError, match="stripped of its weights, so it runs on .* only"):
        relower(read)
    written(plan.with_machine(target="amx9", cpu={"features": ["amx_int4096"]}).strip(), tmp_path)
    with pytest.raises(PlanTargetError, match="made for 'amx9'.* lacks amx_int4096; it is stripped .*without --strip"):
        load_engine(tmp_path / "m.plan")


@pytest.mark.parametrize("nodes", [
    [node("Add", "x table", "y")],                                                          # read as any tensor
    [node("Cast", "x", "ids", to=TensorProto.INT64), node("Gather", "table ids", "y")],     # packed as it is
], ids=["an operand", "a table"])
def test_a_constant_that_kernels_read_as_it_is_is_written_once(nodes: list[onnx.NodeProto], tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    plan = engine_of(small_model(nodes, {"x": ["n", 300, 8]}, ["y"], {"table": table})).plan
    read, size = written(plan, tmp_path)
    assert written(plan.strip(), tmp_path)[1] == pytest.approx(size, abs=200)
    assert any(array.nbytes >= table.nbytes for array in plan.weights.values())
    assert [array.tobytes() for array in read.weights.values()] == [a.tobytes() for a in plan.weights.values()]


def test_the_graph_of_an_int8_plan_is_read_back_as_it_was(plan_of: Callable[..., Plan], tmp_path: Path) -> None:
    made = plan_of("int8")
    read, _ = written(made, tmp_path)
    assert dict(read.graph) == made.graph
    assert list(read.weights) == list(made.weights)
    for name, array in made.weights.items():
        assert read.weights[name].dtype == array.dtype
        np.testing.assert_array_equal(read.weights[name], array)


@pytest.mark.parametrize(("precision", "target", "made_bytes"), [
    ("int8", "avx512_bf16", 36 * 256 * 80 * 2), ("fp32", "avx512_bf16", 36 * 256 * 80 * 4), ("bf16", "avx512_bf16", 0),
    ("int8", "aarch64_i8mm", 0), ("int8", "portable", None)])
def test_what_takes_more_room_where_it_is_read_is_made_when_the_plan_is_loaded(
        plan_of: Callable[..., Plan], precision: str, target: str, made_bytes: int | None) -> None:
    plan = plan_of(precision, target)
    if made_bytes is None:      # every weight is an int32
        made_bytes = sum(4 * array.size for array in plan.weights.values() if array.ndim > 1)
        assert plan.machine.expanded_bytes >= made_bytes
    else:
        assert plan.machine.expanded_bytes == made_bytes


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_made_constants_are_what_packing_means_bit_for_bit(plan_of: Callable[..., Plan], tmp_path: Path, precision: str,
                                                           threads: int) -> None:
    """Expanded constants of the reread plan equal the packing; plans for tile registers have none."""
    target = best_isa(frozenset(name for name in detect().features if not name.startswith("amx_"))).name
    read, _ = written(plan_of(precision, target), tmp_path)
    constants = np.frombuffer(read.machine.constants, np.uint8)
    made = expand(read.machine, LoadedPlan(read).kernel, constants.ctypes.data, threads).bytes
    session = LlvmSession(read.machine.target, TimingCache(), timing=False)
    chosen = session.choose(graph_of(read), read.max_batch)
    compared = 0
    for step, call in zip(read.machine.steps, chosen.lowered.calls, strict=True):
        if not isinstance(call, ProblemCall):
            continue
        constants = chosen.choices[call.problem].kernel.expanded_constants(
            session.isa, chosen.choices[call.problem].tactic, call.constants)
        for operand, constant in zip(step.operands[len(call.inputs):], constants, strict=False):
            if operand.buffer == EXPANDED:
                np.testing.assert_array_equal(made[operand.offset:][:constant.nbytes], constant.view(np.uint8))
                compared += constant.nbytes
    assert compared == sum(item.bytes for item in read.machine.expanded) > 1e6
