import re
from inspect import signature

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.compile import compile_object
from infer_server.engines.backends.llvm.codegen.isa import ALL, PORTABLE
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.lowering.epilogue.program import COPY, INSTRUCTIONS, EpilogueProgram, ProgramBuilder
from infer_server.engines.lowering.problems.convolution import Depthwise
from infer_server.engines.lowering.problems.elementwise import Pointwise
from infer_server.engines.lowering.problems.images import Pool
from infer_server.engines.lowering.problems.movement import Lookup, Permute
from infer_server.engines.lowering.problems.rows import Norm, Softmax
from infer_server.engines.lowering.problems.view import dense_view
from scripts.testing.suite import numpy_dtype, run
from tests.engines.backends.llvm.jit import PLAINER, assembly, plainer
from tests.engines.backends.llvm.runner import CpuRunner, kernel_of
from tests.engines.backends.runners import EVERY_ISA

PLAIN = EpilogueProgram((), 0, 0)


def calls(text):
    """Return the names that an assembly text calls or jumps to (labels begin with a dot)."""
    return set(re.findall(r"^\s+(?:callq?|jmp|bl?)\s+([A-Za-z_]\w*)", text, re.MULTILINE))


def every_instruction():
    """Return a program that chains all instructions."""
    b = ProgramBuilder(False)
    value = b.operand()
    for op in INSTRUCTIONS:
        machine_value_and_others = signature(INSTRUCTIONS[op]).parameters
        value = b.add(op, value, *[2.0] * (len(machine_value_and_others) - 2))
    return b.program()


def problems():
    """Return a problem of every family for every dtype."""
    image, row = dense_view("uint8", (6, 6, 24)), dense_view("float32", (3, 65))
    yield Depthwise(dense_view("uint8", (8, 8, 24)), image, (), PLAIN, "int8", (3, 3))
    yield Pool(image, image, (), PLAIN, "average", (3, 3), (1, 1), (1, 1, 1, 1))
    yield Softmax((row,), row)
    yield Norm((row,), row)
    yield Lookup(dense_view("int64", (4,)), dense_view("float32", (4, 9)), 10)
    yield Permute(dense_view("uint8", (6, 6)), dense_view("uint8", (6, 6)))
    for source in ("uint8", "int8", "bool", "int32", "int64", "float16", "bfloat16"):
        yield Pointwise((dense_view(source, (41,)),), dense_view("float32", (41,)), COPY, uniform=True)
    for target in ("uint8", "int8", "float16", "bfloat16"):
        yield Pointwise((dense_view("float32", (41,)),), dense_view(target, (41,)), COPY, uniform=True)
    yield Pointwise((dense_view("float32", (41,)),), dense_view("float32", (41,)), every_instruction(), uniform=True)


@pytest.mark.parametrize("isa", [isa for isa in ALL if isa.name in PLAINER], ids=lambda isa: isa.name)
def test_texts_that_are_compiled_once_for_several_cpus_give_each_of_them_the_same_code(isa):
    """Kernels without instructions of their own CPU are tested in the code of a plainer one."""
    compared = 0
    for problem in problems():
        module, kernel = Module(), kernel_of(problem)
        kernel.emit(module, "kernel", isa, kernel.tactics(isa)[0])
        if (other := plainer(module.text(), isa)) is not isa:
            assert compile_object(module.text(), isa) == compile_object(module.text(), other)
            compared += 1
    assert compared > 5


@EVERY_ISA
def test_objects_call_nothing_but_themselves(cpu):
    for problem in problems():
        module, kernel = Module(), kernel_of(problem)
        kernel.emit(module, "kernel", cpu.isa, kernel.tactics(cpu.isa)[0])
        text = assembly(module.text(), cpu.isa)
        called = calls(text) - set(module.functions)
        assert not called, f"{problem.family} on {cpu.isa.name} calls {called}"


def test_a_call_of_a_library_would_be_seen():
    text = "declare float @llvm.sin.f32(float)\ndefine float @f(float %x) {\n" \
           "  %y = call float @llvm.sin.f32(float %x)\n  %z = fadd float %y, %y\n  ret float %z\n}\n"
    assert calls(assembly(text, PORTABLE)) == {"sinf"}


def test_an_object_is_an_elf_file_for_its_machine():
    text = "define void @f() { ret void }"
    for isa in ALL:
        code = compile_object(text, isa)
        assert code[:4] == b"\x7fELF"
        if isa.triple:
            assert code[18] == 183      # EM_AARCH64


@pytest.mark.parametrize("source, target", [("float16", "float32"), ("float32", "float16")])
def test_the_portable_path_converts_halves_exactly(source, target):
    random = np.random.default_rng(0)
    if source == "float16":
        x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
        x = x[~np.isnan(x)]
    else:
        x = random.integers(0, 1 << 32, 60_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
        near = random.integers(0x33000000, 0x47900000, 60_000).astype(np.uint32).view(np.float32)   # float16's range
        x = np.concatenate([x[~np.isnan(x)], near, -near, np.float32([65519, 65520, 2.0 ** -25, np.inf])])
    b = ProgramBuilder(False)
    b.operand()
    spec = Pointwise((dense_view(source, x.shape),), dense_view(target, x.shape), b.program(), uniform=True)
    got, = run(spec, CpuRunner(PORTABLE), [x[None]], {"program": []})
    with np.errstate(over="ignore"):
        expected = x.astype(numpy_dtype(target))
    bits = f"u{got.itemsize}"
    np.testing.assert_array_equal(got[0].view(bits), expected.view(bits))
