"""Plans for tile registers give the bytes of plans for vectors, their tile instructions executed by a TileMachine."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from infer_server.calibration.workflow import Calibration
from infer_server.engines.backends.llvm.codegen.isa import (
    AVX512_AMX,
    AVX512_AMX_FP16,
    AVX512_BF16,
    AVX512_VNNI,
    isa_named,
)
from infer_server.engines.compiler.build import build_engine
from infer_server.engines.compiler.specialise import relower
from infer_server.engines.plan.file import write_plan
from infer_server.engines.plan.plan import Plan
from infer_server.engines.preprocess import load_preprocess
from infer_server.engines.runtime.engine import Engine
from tests.engines.backends.llvm.jit import runs_here
from tests.engines.backends.llvm.tiles.trapped import Arrays, PlanJob, Result, run_trapped
from tests.engines.compiler.small_models import node, small_model
from tests.engines.compiler.zoo_engines import relative_error

pytestmark = pytest.mark.skipif(not runs_here(AVX512_VNNI), reason="instructions other than tiles need AVX-512 VNNI")
BFLOAT = pytest.mark.skipif(not runs_here(AVX512_BF16), reason="instructions other than tiles need AVX-512 BF16")
DIGITS = Path(__file__).resolve().parents[5] / "scripts" / "demo_data"
ITEMS = 2
# Precision -> target, instruction, tolerance of the largest output: sums of another order, stored in 8 or 11 bits
FLOATS = {"bf16": (AVX512_AMX, "tdpbf16ps", 2e-2), "fp16": (AVX512_AMX_FP16, "tdpfp16ps", 2e-3)}
MATRIX = [64, 96]


def convolution(channels: int, size: int, couts: int, taps: int, stride: int = 1, groups: int = 1) -> onnx.ModelProto:
    """Return a convolution, and a 1x1 convolution that reads its stored output and adds it."""
    random = np.random.default_rng(0)
    weights = random.standard_normal((couts, channels // groups, taps, taps)).astype(np.float32)
    pointwise = random.standard_normal((couts, couts, 1, 1)).astype(np.float32)
    nodes = [node("Conv", "x w", "conv", strides=[stride] * 2, pads=[taps // 2] * 4, group=groups),
             node("Relu", "conv", "relu"), node("Conv", "relu v", "second"), node("Add", "second relu", "y")]
    return small_model(nodes, {"x": ["N", channels, size, size]}, ["y"], {
        "w": weights / (taps * (channels / groups) ** 0.5), "v": pointwise / couts ** 0.5})


def matrix_product() -> onnx.ModelProto:
    random = np.random.default_rng(0)
    inner, outer = MATRIX
    weights = [random.standard_normal(shape).astype(np.float32) / 8 for shape in ((inner, outer), (outer, inner))]
    nodes = [node("MatMul", "x w", "product"), node("Relu", "product", "relu"), node("MatMul", "relu v", "y")]
    return small_model(nodes, {"x": ["N", 20, inner]}, ["y"], {"w": weights[0], "v": weights[1]})


# Name -> model, number of its steps that use tile registers
LAYERS: dict[str, tuple[Callable[[], onnx.ModelProto], int]] = {
    "3x3": (lambda: convolution(64, 14, 64, 3), 2),
    "3x3 on 7x7 pixels": (lambda: convolution(64, 7, 64, 3), 2),
    "3x3, stride 2": (lambda: convolution(32, 15, 64, 3, stride=2), 2),
    "1x1": (lambda: convolution(96, 14, 64, 1), 2),
    "1x1, stride 2, a run that is no multiple of a block": (lambda: convolution(70, 15, 40, 1, stride=2), 2),
    "7x7, stride 2, the first layer": (lambda: convolution(3, 33, 64, 7, stride=2), 2),
    "depthwise, on vectors": (lambda: convolution(32, 14, 32, 3, groups=32), 1),
    "matrix product with weights": (matrix_product, 2),
}


def feeds_for(model: onnx.ModelProto, items: int) -> Arrays:
    value, = model.graph.input
    shape = [items, *(dim.dim_value for dim in value.type.tensor_type.shape.dim[1:])]
    return {value.name: np.random.default_rng(1).standard_normal(shape).astype(np.float32)}


def plan_of(model: onnx.ModelProto | Path, calibration: Arrays, precision: str, folder: Path) -> Plan:
    """Build for tile registers, with the tactics that cost least."""
    np.savez(folder / "calibration.npz", **calibration)
    ranges = Calibration(folder / "calibration.npz", "minmax") if precision == "int8" else None
    return build_engine(model, calibration=ranges, cache=False, timing=False, precision=precision, max_batch=ITEMS,
                        target=FLOATS.get(precision, (AVX512_AMX,))[0].name).plan


def trapped(plan: Plan, feeds: Arrays, folder: Path) -> Result:
    write_plan(plan, folder / "m.plan")
    result, = run_trapped([PlanJob(folder / "m.plan", feeds)], folder)
    result.check()
    return result


def steps_on_tiles(plan: Plan) -> int:
    return sum(" amx" in step.tactic for step in plan.machine.steps)


def compare(plan: Plan, feeds: Arrays, folder: Path, targets: list[str], tolerance: float = 0.0) -> Result:
    """Compare a plan's outputs on a TileMachine with those on tile registers, if there are, and on vectors."""
    result = trapped(plan, feeds, folder)
    if runs_here(isa_named(plan.machine.target)):
        for name, native in Engine(plan).run(feeds).items():
            np.testing.assert_array_equal(result.outputs[name], native)
    for target in targets:
        for name, vectors in Engine(relower(plan, target)).run(feeds).items():
            assert vectors.std() > 0
            if tolerance:
                assert relative_error(result.outputs[name], vectors) < tolerance
            else:
                np.testing.assert_array_equal(result.outputs[name], vectors)
    return result


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_bytes_equals_vectors_bit_for_bit(name: str, tmp_path: Path) -> None:
    make, steps = LAYERS[name]
    feeds = feeds_for(make(), ITEMS)
    plan = plan_of(make(), feeds, "int8", tmp_path)
    assert steps_on_tiles(plan) == steps
    result = compare(plan, feeds, tmp_path, ["avx512_vnni"])
    assert result.counts["tdpbusd"] and result.counts["tilerelease"] == steps


@BFLOAT
@pytest.mark.parametrize("precision", FLOATS)
@pytest.mark.parametrize("name", ["3x3 on 7x7 pixels", "1x1", "matrix product with weights"])
def test_a_layer_of_16_bit_floats_agrees_with_vectors(name: str, precision: str, tmp_path: Path) -> None:
    make, steps = LAYERS[name]
    _, instruction, tolerance = FLOATS[precision]
    feeds = feeds_for(make(), 1)
    plan = plan_of(make(), feeds, precision, tmp_path)
    assert steps_on_tiles(plan) == steps
    assert compare(plan, feeds, tmp_path, ["avx512_bf16"], tolerance).counts[instruction]


def digits(folder: str, items: int) -> Arrays:
    preprocess = load_preprocess(DIGITS / "preprocess.toml")
    paths = sorted((DIGITS / folder).glob("*.png"))[::-(-128 // items)][:items]
    return {"image": np.concatenate([preprocess.apply(path, ["N", 1, 28, 28]) for path in paths])}


def test_a_whole_network_of_bytes_equals_vectors_bit_for_bit(tmp_path: Path) -> None:
    plan = plan_of(DIGITS / "model.onnx", digits("calibration", 16), "int8", tmp_path)
    assert steps_on_tiles(plan) >= 9
    targets = ["avx512_vnni", *["avx512_bf16"] * runs_here(AVX512_BF16)]
    compare(plan, digits("test", ITEMS), tmp_path, targets)


@BFLOAT
@pytest.mark.parametrize("precision", FLOATS)
def test_a_whole_network_of_16_bit_floats_agrees_with_vectors(precision: str, tmp_path: Path) -> None:
    plan = plan_of(DIGITS / "model.onnx", {}, precision, tmp_path)
    assert steps_on_tiles(plan) >= 9
    compare(plan, digits("test", 1), tmp_path, ["avx512_bf16"], FLOATS[precision][2])
