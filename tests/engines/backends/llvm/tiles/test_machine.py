"""Tile machine: it decodes instructions, computes as their meaning in LLVM IR does, and refuses what CPUs refuse."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX512_AMX, AVX512_AMX_FP16, AVX512_VNNI
from infer_server.engines.backends.llvm.codegen.tiles import AMX_FP16, Tiles, product_of_bytes
from infer_server.engines.codegen.ir_builder import Module, Value
from infer_server.engines.codegen.types import I64, PTR
from infer_server.engines.lowering.problems.problem import Array
from tests.engines.backends.llvm.emulation import EMULATION
from tests.engines.backends.llvm.jit import LoadedKernel, runs_here
from tests.engines.backends.llvm.tiles.jobs import compiled, counting
from tests.engines.backends.llvm.tiles.machine import Instruction, TileError, decode, trapping
from tests.engines.backends.llvm.tiles.trapped import KernelJob, Result, run_trapped

TRAPPED = pytest.mark.skipif(not runs_here(AVX512_VNNI), reason="instructions other than tiles need AVX-512 VNNI")
BYTES = [product_of_bytes(left, right) for left in (False, True) for right in (False, True)]
RAX, RBX, RSI, R9, R15 = 0, 3, 6, 9, 15
Write = Callable[[Tiles, list[Value]], None]

# Bytes as LLVM's assembler gives them
ENCODINGS: Mapping[str, tuple[str, Instruction]] = {
    "tileloadd 32(%rax,%rbx,4), %tmm1": ("c4e27b4b4c9820", Instruction("tileloadd", 7, (1, 0, 0), RAX, RBX, 4, 32)),
    "tileloadd (%rsi,%r9), %tmm5": ("c4a27b4b2c0e", Instruction("tileloadd", 6, (5, 0, 0), RSI, R9)),
    "tilestored %tmm2, -256(%r15,%rbx)": (
        "c4c27a4b941f00ffffff", Instruction("tilestored", 10, (2, 0, 0), R15, RBX, 1, -256)),
    "ldtilecfg 8(%rip)": ("c4e278490508000000", Instruction("ldtilecfg", 9, displacement=8, relative=True)),
    "ldtilecfg (%rax)": ("c4e2784900", Instruction("ldtilecfg", 5, base=RAX)),
    "tilerelease": ("c4e27849c0", Instruction("tilerelease", 5)),
    "tilezero %tmm7": ("c4e27b49f8", Instruction("tilezero", 5, (7, 0, 0))),
    "tdpbssd %tmm3, %tmm2, %tmm1": ("c4e2635eca", Instruction("tdpbssd", 5, (1, 2, 3))),
    "tdpbsud %tmm3, %tmm2, %tmm1": ("c4e2625eca", Instruction("tdpbsud", 5, (1, 2, 3))),
    "tdpbuud %tmm3, %tmm2, %tmm1": ("c4e2605eca", Instruction("tdpbuud", 5, (1, 2, 3))),
    "tdpbusd %tmm3, %tmm2, %tmm1": ("c4e2615eca", Instruction("tdpbusd", 5, (1, 2, 3))),
    "tdpbf16ps %tmm3, %tmm2, %tmm1": ("c4e2625cca", Instruction("tdpbf16ps", 5, (1, 2, 3))),
    "tdpfp16ps %tmm3, %tmm2, %tmm1": ("c4e2635cca", Instruction("tdpfp16ps", 5, (1, 2, 3)))}


@pytest.mark.parametrize("text", ENCODINGS)
def test_an_instruction_is_decoded(text: str) -> None:
    code, instruction = ENCODINGS[text]
    found = decode(bytes.fromhex(code))
    if instruction.name in ("tilerelease", "tilezero"):
        assert (found.name, found.length, found.tiles[0]) == (instruction.name, 5, instruction.tiles[0])
    else:
        assert found == instruction


@pytest.mark.parametrize("code, error", [
    ("c5f877", LookupError), ("62f27d481010", LookupError), ("c4e2f35cca", LookupError),        # vzeroupper, EVEX, W
    ("c4e2235eca", TileError), ("c4e2635dca", LookupError), ("c462635eca", TileError), ("c4e27b4b08", TileError)])
def test_other_instructions_and_tiles_that_do_not_exist_are_refused(code: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode(bytes.fromhex(code))


def test_instructions_that_need_no_permission_get_a_form_that_traps() -> None:
    code = bytes.fromhex("c4e278490508000000" "c4e2635eca" "c4e27849c0")
    found = trapping(code)
    assert found == bytes.fromhex("c4e2f8490508000000" "c4e2635eca" "c4e2f849c0")
    assert [decode(found[at:]).name for at in (0, 14)] == ["ldtilecfg", "tilerelease"]


# ---- execution
def job_of(write: Write, *arrays: Array) -> KernelJob:
    """Return what `write(tiles, addresses)` emits, on the arrays."""
    return KernelJob(compiled(module_of(write, len(arrays)), AVX512_AMX_FP16), "kernel", arrays)


def module_of(write: Write, operands: int, emulation: dict[str, str] | None = None) -> Module:
    module = Module(emulation)
    f = module.function("kernel", operands=PTR, a=I64, b=I64, c=I64, d=I64)
    write(Tiles(f), [f.load(PTR, f.parameters["operands"] + 8 * i) for i in range(operands)])
    return module


def product(instruction: str, rows: int = 16, depth: int = 16, columns: int = 16) -> Write:
    """Return the emitter of c += a b for operands of 64 bytes a row."""
    def write(tiles: Tiles, at: list[Value]) -> None:
        tiles.configure({0: (rows, 4 * columns), 1: (rows, 4 * depth), 2: (depth, 4 * columns)})
        for register in range(3):
            tiles.load(register, at[register], 64)
        tiles.multiply(instruction, 0, 1, 2)
        tiles.store(0, at[0], 64)
        tiles.release()
    return write


def operands_of(instruction: str) -> list[Array]:
    random = np.random.default_rng(0)
    if instruction in BYTES:
        a, b = (random.integers(0, 256, (16, 64)).astype(np.uint8) for _ in range(2))
        return [random.integers(-1 << 31, 1 << 31, (16, 16)).astype(np.int32), a, b]
    dtype = ml_dtypes.bfloat16 if instruction == "tdpbf16ps" else np.float16
    floats = [random.standard_normal((16, 32)).astype(dtype) for _ in range(2)]
    floats[0][0, :4] = [1e-39, -1e-39, 3e38, np.inf] if instruction == "tdpbf16ps" else [6e-8, -6e-8, 6e4, np.inf]
    sums = random.standard_normal((16, 16)).astype(np.float32)
    sums[0, :2] = 1e-40, 1e38
    return [sums, *(array.view(np.uint16) for array in floats)]


@TRAPPED
@pytest.mark.parametrize("instruction", [*BYTES, *(name for _, name in AMX_FP16.products if name not in BYTES)])
@pytest.mark.parametrize("shape", [(16, 16, 16), (5, 3, 7)])
def test_a_product_equals_its_meaning_in_ir_and_this_cpu(instruction: str, shape: tuple[int, int, int],
                                                         tmp_path: Path) -> None:
    write, arrays = product(instruction, *shape), operands_of(instruction)
    result, = run_trapped([job_of(write, *arrays)], tmp_path)
    result.check()
    got = result.outputs["0"].view(np.uint32)
    emulated = [array.copy() for array in arrays]
    LoadedKernel(module_of(write, 3, EMULATION).text(), "kernel", AVX512_AMX_FP16, emulate=True)(emulated, (0, 1))
    np.testing.assert_array_equal(got, emulated[0].view(np.uint32).ravel())
    if runs_here(AVX512_AMX_FP16 if instruction == "tdpfp16ps" else AVX512_AMX):
        native = [array.copy() for array in arrays]
        LoadedKernel(module_of(write, 3).text(), "kernel", AVX512_AMX_FP16)(native, (0, 1))
        np.testing.assert_array_equal(got, native[0].view(np.uint32).ravel())
    assert result.counts == {"ldtilecfg": 1, "tileloadd": 3, instruction: 1, "tilestored": 1, "tilerelease": 1}


def refused(write: Write, folder: Path) -> Result:
    result, = run_trapped([job_of(write, np.zeros(2048, np.uint8))], folder)
    return result


@TRAPPED
@pytest.mark.parametrize("shapes, error", [
    ({0: (16, 64), 1: (16, 64), 2: (8, 64)}, "#UD: tdpbusd"),       # K of b is less than that of a
    ({0: (15, 64), 1: (16, 64), 2: (16, 64)}, "#UD: tdpbusd"),
    ({0: (16, 64), 1: (16, 64)}, "#UD: tile 2 is not configured")])
def test_what_a_cpu_refuses_is_an_error(shapes: dict[int, tuple[int, int]], error: str, tmp_path: Path) -> None:
    def write(tiles: Tiles, _: list[Value]) -> None:
        tiles.configure(shapes)
        tiles.multiply("tdpbusd", 0, 1, 2)
        tiles.release()
    assert error in refused(write, tmp_path).error


@TRAPPED
def test_released_tiles_cannot_be_stored_and_a_configuration_of_zeros_releases_them(tmp_path: Path) -> None:
    def write(tiles: Tiles, at: list[Value]) -> None:
        tiles.configure({0: (16, 64)})
        tiles.f.run("llvm.x86.ldtilecfg", at[0])
        tiles.store(0, at[0], 64)
    assert "#UD: tile 0 is not configured" in refused(write, tmp_path).error


@TRAPPED
def test_an_invalid_configuration_is_an_error(tmp_path: Path) -> None:
    def write(tiles: Tiles, at: list[Value]) -> None:
        tiles.f.run("llvm.x86.ldtilecfg", at[0])
    memory = np.zeros(64, np.uint8)
    memory[[0, 48]] = 1         # palette 1, a row of no bytes
    result, = run_trapped([job_of(write, memory)], tmp_path)
    assert "#GP: configuration" in result.error


@TRAPPED
def test_a_job_that_counts_computes_nothing(tmp_path: Path) -> None:
    result, = run_trapped([counting(job_of(product("tdpbusd"), *operands_of("tdpbusd")))], tmp_path)
    assert result.counts["tdpbusd"] == 1 and not result.outputs and not result.error
