"""Code of the tile micro-kernels for the layers of real models, and how often they configure the tile registers."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX512_AMX, AVX512_VNNI
from infer_server.engines.backends.llvm.tuning.candidates import Candidate
from infer_server.engines.codegen.ir_builder import Module
from tests.engines.backends.llvm.jit import assembly, runs_here, spills
from tests.engines.backends.llvm.tiles.layers import MODELS, Layer, candidates_of, count_job, tiled
from tests.engines.backends.llvm.tiles.trapped import run_trapped

TRAPPED = pytest.mark.skipif(not runs_here(AVX512_VNNI), reason="instructions other than tiles need AVX-512 VNNI")
MOST_CONFIGURATIONS = 700       # in MobileNetV2, one item; each takes AMX.configure_cycles


def kernels_of(model: str, precision: str = "int8") -> dict[Layer, Candidate]:
    """Return the tile kernels of a model; in float precisions all tensors are stored in the precision."""
    layers = MODELS[model]
    return tiled(candidates_of(layers if precision == "int8" else [replace(layer, stored="") for layer in layers],
                            AVX512_AMX, precision))


def ir_of(one: Candidate) -> str:
    module = Module()
    one.kernel.emit(module, "kernel", AVX512_AMX, one.tactic)
    return module.text()


def executed(candidates: Mapping[Layer, Candidate], folder: Path) -> dict[tuple[Layer, Candidate], Counter[str]]:
    """Count the tile instructions of each kernel for one item."""
    results = run_trapped([count_job(one, AVX512_AMX) for one in candidates.values()], folder)
    return {one: result.counts for one, result in zip(candidates.items(), results, strict=True)}


def test_the_layers_are_those_of_the_models() -> None:
    """Multiply-accumulates of convolutions and matrix products; those of MobileNetV2 without depthwise layers."""
    macs = {model: sum(layer.count * layer.rows * layer.cols * layer.cin * layer.cout * layer.taps[0] * layer.taps[1]
                       for layer in layers) for model, layers in MODELS.items()}
    assert {model: round(count / 1e6) for model, count in macs.items()} == {
        "ResNet-50": 4089, "MobileNetV2": 280, "MiniLM": 1359, "recogniser": 656}
    assert {model: sum(layer.count for layer in layers) for model, layers in MODELS.items()} == {
        "ResNet-50": 53, "MobileNetV2": 36, "MiniLM": 26, "recogniser": 33}


@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_no_micro_kernel_spills_vectors_and_each_kernel_releases_once(model: str, precision: str) -> None:
    candidates = kernels_of(model, precision)
    assert len(candidates) > 0.85 * len(MODELS[model])      # the others have one pixel
    for layer, one in candidates.items():
        text = assembly(ir_of(one), AVX512_AMX)
        assert spills(text[text.index("\ntile_"):]) == 0, f"{layer}: {one.tactic}"
        assert text.count("\ttilerelease") == 1, f"{layer}: {one.tactic}"


def test_a_spill_is_noticed() -> None:
    assert spills("\tvmovups\t%zmm3, 64(%rsp)\n\tvmovups\t64(%rsp), %zmm3\n\tmovq\t%rax, 8(%rsp)") == 2


@TRAPPED
@pytest.mark.parametrize("model", ["MobileNetV2", "MiniLM"])
def test_a_kernel_configures_once_unless_it_has_tiles_of_several_shapes(model: str, tmp_path: Path) -> None:
    counts = executed(kernels_of(model), tmp_path)
    for (layer, one), count in counts.items():
        shapes = len(set(re.findall(r"@tiles\.[0-9a-f.]+", ir_of(one))))
        assert count["tilerelease"] == 1 and (count["ldtilecfg"] == 1) == (shapes == 1), f"{layer}: {one.tactic}"
    total = sum(layer.count * count["ldtilecfg"] for (layer, _), count in counts.items())
    most = sorted(counts, key=lambda one: -one[0].count * counts[one]["ldtilecfg"])[:5]
    assert total <= MOST_CONFIGURATIONS, f"{total} configurations, most of them by " + ", ".join(
        f"{layer.count} x {counts[layer, one]['ldtilecfg']} {layer}: {one.tactic}" for layer, one in most)
