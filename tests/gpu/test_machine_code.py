"""NVIDIA's assembler compiles kernels without spills, and with few instructions beside the products."""
from __future__ import annotations

import pickle
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from infer_server.engines.backends.cuda.codegen import assemble
from infer_server.engines.backends.cuda.codegen.gpu import GPUS
from infer_server.engines.backends.cuda.kernels.contraction.contraction import GpuContraction
from infer_server.engines.backends.cuda.kernels.contraction.tile import Tile
from infer_server.engines.backends.cuda.kernels.recurrent.warps import Tiled
from infer_server.engines.lowering.epilogue.program import EpilogueProgram, ProgramBuilder
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.images import Pool
from infer_server.engines.lowering.problems.matmul import Attention
from infer_server.engines.lowering.problems.view import dense_view
from infer_server.engines.machine import object_cache
from scripts.testing.gpu.cases import product
from scripts.testing.gpu.runner import Way, every_way, text_of, way_of
from scripts.testing.recurrence import Case as Layer
from scripts.testing.recurrence import node_of
from tests.gpu.network import Plans

NO_SPILLS = "0 bytes spill stores, 0 bytes spill loads"


@cache
def assembler() -> str:
    """Return the version of the assembler, or "" if none is installed."""
    try:
        return subprocess.run([assemble.ptxas(), "--version"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return ""


def assembled(ptx: str, target: str) -> tuple[bytes, str]:
    """Return a cubin and the assembler's report, from the object cache if they are there.

    Skips the test without an assembler.
    """
    objects = object_cache.current() if assembler() else None
    key = object_cache.digest("ptxas", assembler(), target, ptx)
    if objects and (content := objects.fetch(key)) is not None:
        cubin, report = pickle.loads(content)
        return cubin, report
    try:
        made = assemble.report_of(ptx, GPUS[target])
    except FileNotFoundError as missing:
        pytest.skip(f"no assembler for {target}: install the extra 'cuda' ({missing})")
    if objects:
        objects.store(key, pickle.dumps(made))
    return made


@pytest.fixture(scope="module")
def disassembler() -> None:
    """Skip a test without a disassembler, before anything is compiled for it."""
    if not shutil.which(assemble.nvdisasm()):
        pytest.skip("no disassembler: install the extra 'cuda'")


def test_ptx_comes_from_the_object_cache_for_the_same_ir_and_gpu(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(object_cache.VARIABLE, str(tmp_path / "objects"))
    compiled: list[str] = []
    compile_ = assemble._ptx_of
    monkeypatch.setattr(assemble, "_ptx_of", lambda text, gpu: compiled.append(gpu.name) or compile_(text, gpu))
    texts = [assemble.ptx_of("define void @f() { ret void }", GPUS[name]) for name in ("sm_61", "sm_80", "sm_61")]
    assert texts[0] == texts[2] and ".target sm_61" in texts[0] and ".target sm_80" in texts[1]
    assemble.ptx_of("define void @g() { ret void }", GPUS["sm_61"])
    assert compiled == ["sm_61", "sm_80", "sm_61"]
    monkeypatch.setenv(object_cache.VARIABLE, object_cache.OFF)
    assert assemble.ptx_of("define void @f() { ret void }", GPUS["sm_80"]) == texts[1] and len(compiled) == 4


@pytest.mark.parametrize("target", ["sm_61", "sm_80", "sm_90a"])
def test_the_cubin_of_a_network_spills_nothing(target: str, plans: Plans) -> None:
    *_, code = plans(target).machine.code       # the PTX
    _, report = assembled(code.decode(), target)
    spills = [line for line in report.splitlines() if "spill" in line]
    assert spills and all(NO_SPILLS in line for line in spills)


@pytest.mark.parametrize(("target", "dtype", "precision"), [
    ("sm_61", "float16", "fp16"), ("sm_75", "bfloat16", "bf16")])
def test_the_cubin_of_a_product_of_few_features_spills_nothing_where_threads_multiply(
        target: str, dtype: str, precision: str) -> None:
    x, y = dense_view(dtype, (1, 1, 28)), dense_view(dtype, (1, 1, 64))
    problem = Contraction(x, y, (), EpilogueProgram(), precision, (1, 1))
    way = Way(GpuContraction(problem, GPUS[target], (256, 256)), Tile(64, 64, (2, 2), 64, 2))
    _, report = assembled(text_of(way), target)
    assert NO_SPILLS in report


def test_the_cubin_of_a_convolution_of_halves_spills_nothing() -> None:
    """Without a limit on resident blocks, the assembler spills to fit another block."""
    b, residual = ProgramBuilder(True), dense_view("float16", (7, 7, 64))
    shifted = b.add("add", b.operand(), b.constant(np.ones(64)))
    b.add("max", b.constant(np.zeros(1)), b.add("add", shifted, b.accumulator))
    problem = Contraction(dense_view("float16", (9, 9, 64)), residual, (residual,), b.program(), "fp16", (3, 3))
    way = Way(GpuContraction(problem, GPUS["sm_75"], (64, 64, 64)), Tile(32, 64, (1, 2), 64, 2))
    _, report = assembled(text_of(way), "sm_75")
    assert NO_SPILLS in report


@pytest.mark.parametrize("target", ["sm_70", "sm_80"])
def test_the_cubin_of_a_pool_of_floats_spills_nothing(target: str) -> None:
    x, y = dense_view("float32", (3, 80, 480)), dense_view("float32", (1, 40, 480))
    problem = Pool(x, y, (), EpilogueProgram(), "average", (3, 2), (3, 2), (0, 0, 0, 0))
    way, = every_way(problem, GPUS[target])
    _, report = assembled(text_of(way), target)
    assert NO_SPILLS in report


def test_a_recurrent_layer_on_tensor_cores_has_all_registers_of_its_threads() -> None:
    """Each of 512 threads has 128 registers, so a spill shows a real shortage."""
    layer = Layer(node_of("LSTM"), 256, "int16", steps=28)
    way = Way(way_of(layer.spec, GPUS["sm_80"]).kernel, Tiled(8, 1, 9, 1))
    _, report = assembled(text_of(way), "sm_80")
    assert "Used 128 registers" in report


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.usefixtures("disassembler")
def test_the_sass_of_the_loop_over_k_is_little_more_than_its_products(target: str) -> None:
    """A block of 128 pixels by 128 output channels and 64 bytes of K has 64 products."""
    view, program = dense_view("uint8", (16, 16, 256)), EpilogueProgram()
    problem = Contraction(view, dense_view("uint8", (14, 14, 256)), (), program, "int8", (3, 3))
    way = Way(GpuContraction(problem, GPUS[target], (256, 256)), Tile(128, 128, (2, 2), 64, 4))
    cubin, report = assembled(text_of(way), target)
    loop = max(loops(assemble.sass_of(cubin)), key=len)
    assert NO_SPILLS in report
    assert sum("IMMA" in line for line in loop) == 64 and len(loop) <= 150


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize(("precision", "least"), [("int8", 17), ("fp16", 14)])
@pytest.mark.usefixtures("disassembler")
def test_the_sass_of_a_product_of_two_tensors_has_many_multiply_adds_to_an_instruction(
        precision: str, least: int, across: bool) -> None:
    problem, _, _ = product(precision, across, rows=256, depth=2048, columns=256)
    way, *_ = every_way(problem, GPUS["sm_80"])
    assert str(way.tactic) == "64 x 64 a block, in shared memory"
    cubin, report = assembled(text_of(way), "sm_80")
    loop = max(loops(assemble.sass_of(cubin)), key=len)
    assert NO_SPILLS in report
    of_lane = 32 * 32 * 64 // problem.a.size // 32
    assert of_lane / len(loop) >= least


def loops(sass: str) -> list[list[str]]:
    """Return the instructions from each label to a branch back to it."""
    lines = [line for line in sass.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/|\.L_", line)]
    labels = {line.strip().rstrip(":"): at for at, line in enumerate(lines) if line.startswith(".L_")}
    return [[line for line in lines[labels[target]:at + 1] if not line.startswith(".L_")]
            for at, line in enumerate(lines)
            for target in re.findall(r"BRA.*`\((\.L_\w+)\)", line) if labels.get(target, at) < at]


@pytest.mark.parametrize(("target", "units", "precision", "most"), [
    ("sm_75", 64, "int16", 950), ("sm_80", 64, "int16", 800), ("sm_80", 256, "int8", 800),
    ("sm_80", 512, "int8", 1700)])
@pytest.mark.usefixtures("disassembler")
def test_the_sass_of_a_step_of_a_recurrent_layer_is_so_many_instructions(
        target: str, units: int, precision: str, most: int) -> None:
    """An LSTM step for 8 items has 16 units a warp, or 32 with two tiles.

    That is four or eight updates a lane, of at least 150 instructions. Tactics with more items do not spill either.
    """
    case = Layer(node_of("LSTM"), units, precision, 1)
    ways = [way for way in every_way(case.spec, GPUS[target]) if isinstance(way.tactic, Tiled)]
    reports = []
    for way in ways:
        cubin, report = assembled(text_of(way), target)
        reports.append((max(map(len, loops(assemble.sass_of(cubin)))), report))
    assert reports and all(NO_SPILLS in report for _, report in reports)
    assert ways[0].tactic.items == 8 and 600 * ways[0].tactic.tiles <= reports[0][0] <= most


@pytest.mark.parametrize(("target", "product", "copy"), [
    ("sm_75", "IMMA", "LDG"), ("sm_80", "IMMA", "LDGSTS")])
def test_the_sass_of_a_network_has_the_products_of_its_architecture(target: str, product: str, copy: str,
                                                                  plans: Plans) -> None:
    *_, code = plans(target).machine.code       # the PTX
    cubin = assemble.cubin_of(code.decode(), GPUS[target])
    try:
        found = assemble.classes(assemble.sass_of(cubin)) if cubin else {}
    except (FileNotFoundError, subprocess.CalledProcessError):
        found = {}
    if not found:
        pytest.skip("no assembler or disassembler: install the extra 'cuda'")
    assert found[product] and found[copy]


@pytest.mark.parametrize("target", ["sm_80", "sm_120"])
def test_the_cubin_of_an_attention_spills_nothing_by_any_tactic(target: str) -> None:
    """128 columns need the most registers; for 32 the assembler may limit them for more blocks."""
    for columns in (32, 128):
        view = dense_view("float16", (4, 40, columns))
        for way in every_way(Attention(view, view, view, view, None, EpilogueProgram(), "fp16"), GPUS[target]):
            _, report = assembled(text_of(way), target)
            assert NO_SPILLS in report, way.tactic


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("dtype", "most"), [("uint8", 32), ("float16", 12), ("bfloat16", 12)])
@pytest.mark.usefixtures("disassembler")
def test_the_sass_of_an_attention_is_so_many_instructions_a_score(dtype: str, most: int, target: str) -> None:
    """It has 64 columns, any number of keys, and 32 scores a lane in an iteration; both loops are checked."""
    view = dense_view(dtype, (4, 384, 64))
    precision = {"uint8": "int8", "float16": "fp16", "bfloat16": "bf16"}[dtype]
    way, *_ = every_way(Attention(view, view, view, view, None, EpilogueProgram(), precision), GPUS[target])
    assert str(way.tactic) == "64 queries a block, keys in shared memory"
    cubin, report = assembled(text_of(way), target)
    sizes = sorted(map(len, loops(assemble.sass_of(cubin))))[-2:]
    assert NO_SPILLS in report
    assert sum(sizes) / 32 <= most
