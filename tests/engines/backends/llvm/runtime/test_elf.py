"""The ELF loader: objects that LLVM emits run, and whatever else it is given has a named error."""
from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import struct

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.compile import compile_object
from infer_server.engines.backends.llvm.codegen.executor import scheduler_object
from infer_server.engines.backends.llvm.codegen.isa import AARCH64
from infer_server.engines.backends.llvm.runtime import elf
from infer_server.engines.backends.llvm.runtime.elf import LoadedCode
from infer_server.engines.errors import PlanCorruptError, PlanTargetError
from tests.engines.tiny import ISA, mix_object

# A constant pool, a table and a call between functions: one relocation of each kind that kernels need.
TEXT = """
@table = internal constant [4 x i64] [i64 10, i64 20, i64 30, i64 40]
define internal i64 @pick(i64 %i) noinline {
  %p = getelementptr i64, ptr @table, i64 %i
  %v = load i64, ptr %p
  ret i64 %v
}
define void @answer(ptr %out, i64 %i) {
  %v = call i64 @pick(i64 %i)
  store i64 %v, ptr %out
  %f = getelementptr double, ptr %out, i64 1
  %d = sitofp i64 %v to double
  %e = fmul double %d, 0x3FF3333333333333
  store double %e, ptr %f
  ret void
}
"""


def call(code: LoadedCode, name: str, *arguments: int) -> None:
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(code.addresses[name])(*arguments)


def test_tables_constants_and_calls_find_each_other() -> None:
    code = LoadedCode([compile_object(TEXT, ISA), mix_object("mix", 2, 2)])
    out = np.zeros(2)
    for i in range(4):
        call(code, "answer", out.ctypes.data, i)
        assert out[:1].view(np.int64)[0] == 10 * (i + 1)
        assert out[1] == 10 * (i + 1) * 1.2
    assert set(code.addresses) == {"answer", "mix"}


@pytest.mark.skipif(not platform.machine().startswith("x86"), reason="reads /proc/self/maps of x86 Linux")
def test_code_is_never_writable() -> None:
    code = LoadedCode([compile_object(TEXT, ISA)])
    address = code.addresses["answer"]
    with open("/proc/self/maps") as maps:
        segments = [line.split()[:2] for line in maps]
    found = [rights for segment, rights in segments
             if int(segment.split("-")[0], 16) <= address < int(segment.split("-")[1], 16)]
    assert found == ["r-xp"]


def test_an_undefined_symbol_is_named() -> None:
    text = "declare void @expm1(double)\ndefine void @f(double %x) {\n call void @expm1(double %x)\n ret void\n}"
    with pytest.raises(PlanCorruptError, match="'expm1', which none of the plan's objects defines"):
        LoadedCode([compile_object(text, ISA)])


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(PlanCorruptError, match="two code objects define 'mix'"):
        LoadedCode([mix_object("mix", 2, 2), mix_object("mix", 3, 2)])


def test_variables_are_refused() -> None:
    text = "@state = global i64 0\ndefine void @f() {\n store i64 1, ptr @state\n ret void\n}"
    with pytest.raises(PlanCorruptError, match="writable"):
        LoadedCode([compile_object(text, ISA)])


def test_code_of_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = compile_object(TEXT, ISA)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(PlanTargetError, match="the code is for .*, but this is riscv64"):
        LoadedCode([data])


def test_an_unknown_relocation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_patch_x86", "_patch_arm"):
        monkeypatch.setattr(elf, name, lambda *arguments: False)
    with pytest.raises(PlanCorruptError, match="relocation type [0-9]+ .* is not known"):
        LoadedCode([compile_object(TEXT, ISA)])


def test_garbage_has_a_named_error() -> None:
    data = compile_object(TEXT, ISA)
    rng = np.random.default_rng(0)
    for cut in range(0, len(data), 40):
        with pytest.raises((PlanCorruptError, PlanTargetError)):
            LoadedCode([data[:cut]])
    for _ in range(300):        # a changed byte may go unnoticed here (the plan's checksum finds it): only no crash
        changed = bytearray(data)
        changed[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        with contextlib.suppress(PlanCorruptError, PlanTargetError):
            LoadedCode([bytes(changed)])


@pytest.mark.parametrize(("kind", "start", "target", "place", "want"), [
    (283, 0x94000000, 0x11000, 0x10000, 0x94000400),            # bl +0x1000
    (283, 0x94000000, 0x0F000, 0x10000, 0x97FFFC00),            # bl -0x1000
    (275, 0x90000000, 0x15678, 0x10FFC, 0xB0000020),            # adrp x0, +5 pages: immlo 1, immhi 1
    (277, 0x91000000, 0x15678, 0, 0x9119E000),                  # add x0, x0, #0x678
    (299, 0x3DC00000, 0x15670, 0, 0x3DC19C00),                  # ldr q0, [x0, #0x670]: in units of 16 bytes
    (286, 0xF9400000, 0x15678, 0, 0xF9433C00),                  # ldr x0, [x0, #0x678]: in units of 8 bytes
])
def test_arm_instructions_are_patched_as_the_abi_says(kind: int, start: int, target: int, place: int,
                                                           want: int) -> None:
    memory = mmap.mmap(-1, 4096)
    struct.pack_into("<I", memory, 0, start)
    assert elf._patch_arm(memory, 0, kind, target, place)
    assert hex(struct.unpack_from("<I", memory, 0)[0]) == hex(want)


def test_the_executor_and_a_constant_pool_of_arm_need_no_other_relocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")     # loaded only, not run
    code = LoadedCode([scheduler_object(AARCH64), compile_object(TEXT, AARCH64)])
    assert {"run_steps", "run_chunks", "help", "answer"} <= set(code.addresses)
