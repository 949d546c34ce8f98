"""Tests of the PTX machine's instructions one by one, and of its refusals."""
from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest

from scripts.testing.gpu.ptx.machine import Machine
from scripts.testing.gpu.ptx.memory import Array, Memory
from scripts.testing.gpu.ptx.scalar import fused
from scripts.testing.gpu.ptx.text import Fault, parse

LANES = 32
REGISTERS = """.reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .b32 %f<9>; .reg .b64 %rd<9>;"""
# Lane t has the t-th word of each input in %r1 and %r2, and stores %r9 to the t-th of the output.
ENTRY = """.visible .entry k(
	.param .u64 k_param_0,
	.param .u64 k_param_1,
	.param .u64 k_param_2
)
.maxntid 128
{
	%s
	ld.param.u64 %%rd1, [k_param_0];
	ld.param.u64 %%rd2, [k_param_1];
	ld.param.u64 %%rd3, [k_param_2];
	mov.u32 %%r90, %%tid.x;
	mul.wide.u32 %%rd4, %%r90, 4;
	add.s64 %%rd1, %%rd1, %%rd4;
	add.s64 %%rd2, %%rd2, %%rd4;
	add.s64 %%rd3, %%rd3, %%rd4;
	ld.global.u32 %%r1, [%%rd1];
	ld.global.u32 %%r2, [%%rd2];
	%s
$DONE:
	st.global.u32 [%%rd3], %%r9;
	ret;
}
"""


def run(body: str, a: object = 0, b: object = 0, shared: int = 0, threads: int = LANES, blocks: int = 1) -> Array:
    """Return the words that the lanes store, as unsigned integers."""
    memory = Memory(1 << 16)
    inputs = [np.broadcast_to(np.asarray(x), blocks * threads).copy() for x in (a, b)]
    inputs = [x.view(np.uint32) if x.dtype.itemsize == 4 else x.astype(np.int64).astype(np.uint32) for x in inputs]
    at = [memory.allocate(x) for x in (*inputs, np.zeros(threads, np.uint32))]
    Machine(memory).launch(parse(ENTRY % (REGISTERS, body))["k"], (blocks,), threads, at, shared)
    return memory.array(at[2], np.uint32, (threads,))


def word(number: float) -> int:
    return int(np.float32(number).view(np.uint32))


# body -> (a, b, what lane 0 gives); numbers as in the PTX ISA
BY_HAND = {
    "add.s32 %r9, %r1, %r2;": (0x7FFFFFFF, 1, 0x80000000),
    "sub.s32 %r9, %r1, %r2;": (0, 1, 0xFFFFFFFF),
    "mul.lo.s32 %r9, %r1, %r2;": (0x10001, 0x10001, 0x20001),
    "mul.hi.u32 %r9, %r1, %r2;": (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFE),
    "mul.hi.s32 %r9, %r1, %r2;": (0xFFFFFFFF, 0xFFFFFFFF, 0),
    "mul.wide.s32 %rd5, %r1, %r2; shr.u64 %rd5, %rd5, 32; cvt.u32.u64 %r9, %rd5;": (-3, 5, 0xFFFFFFFF),
    "mul.wide.u32 %rd5, %r1, %r2; mul.hi.u64 %rd5, %rd5, %rd5; cvt.u32.u64 %r9, %rd5;":
        (1 << 31, 4, 4),
    "mov.b64 %rd5, {%r1, %r2}; { .reg .b32 tmp; mov.b64 {tmp, %r9}, %rd5; }": (5, 6, 6),
    "mad.lo.s32 %r9, %r1, %r2, 7;": (5, 6, 37),
    "mad.wide.u32 %rd5, %r1, %r2, 1; shr.u64 %rd5, %rd5, 32; cvt.u32.u64 %r9, %rd5;": (0xFFFFFFFF, 0xFFFFFFFF,
                                                                                    0xFFFFFFFE),
    "div.u32 %r9, %r1, %r2;": (0xFFFFFFFE, 3, 0x55555554),
    "div.s32 %r9, %r1, %r2;": (-7, 2, 0xFFFFFFFD),
    "rem.s32 %r9, %r1, %r2;": (-7, 2, 0xFFFFFFFF),
    "rem.u32 %r9, %r1, %r2;": (7, 4, 3),
    "min.s32 %r9, %r1, %r2;": (-1, 1, 0xFFFFFFFF),
    "min.u32 %r9, %r1, %r2;": (-1, 1, 1),
    "max.f32 %r9, %r1, %r2;": (word(np.nan), word(2), word(2)),
    "min.f32 %r9, %r1, %r2;": (word(0.0), word(-0.0), word(-0.0)),
    "neg.s32 %r9, %r1;": (5, 0, 0xFFFFFFFB),
    "abs.s32 %r9, %r1;": (-5, 0, 5),
    "not.b32 %r9, %r1;": (0xF0F0F0F0, 0, 0x0F0F0F0F),
    "and.b32 %r9, %r1, %r2;": (12, 10, 8),
    "or.b32 %r9, %r1, %r2;": (12, 10, 14),
    "xor.b32 %r9, %r1, %r2;": (12, 10, 6),
    "shl.b32 %r9, %r1, %r2;": (1, 31, 0x80000000),
    "shl.b32 %r9, %r1, 40;": (1, 0, 0),
    "shr.u32 %r9, %r1, %r2;": (0x80000000, 31, 1),
    "shr.s32 %r9, %r1, 99;": (0x80000000, 0, 0xFFFFFFFF),
    "shf.l.wrap.b32 %r9, %r1, %r2, 8;": (0x12345678, 0xABCDEF01, 0xCDEF0112),
    "shf.r.wrap.b32 %r9, %r1, %r2, 8;": (0x12345678, 0xABCDEF01, 0x01123456),
    "bfe.u32 %r9, %r1, 4, 8;": (0xABCD, 0, 0xBC),
    "bfe.s32 %r9, %r1, 4, 8;": (0xABCD, 0, 0xFFFFFFBC),
    "bfi.b32 %r9, %r1, %r2, 8, 4;": (0xAB, 0xFFFF0000, 0xFFFF0B00),
    "prmt.b32 %r9, %r1, %r2, 0x7531;": (0x33221100, 0x77665544, 0x77553311),
    "prmt.b32 %r9, %r1, %r2, 0x0008;": (0x80, 0, 0x808080FF),
    "dp4a.u32.s32 %r9, %r1, %r2, 5;": (0xFF010203, 0x80010203, (5 - 255 * 128 + 1 + 4 + 9) & 0xFFFFFFFF),
    "dp4a.s32.s32 %r9, %r1, %r2, 5;": (0xFF010203, 0x80010203, 5 + 128 + 1 + 4 + 9),
    "dp2a.lo.s32.s32 %r9, %r1, %r2, 5;": (0xFFFF0100, 0x7F7F02FE, 0xFFFFFE03),
    "dp2a.hi.s32.u32 %r9, %r1, %r2, 5;": (0xFFFF0100, 0xFE020000, 5 + 512 - 254),
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r9, 1, 2, %p1;": (-1, 1, 1),
    "setp.lt.u32 %p1, %r1, %r2; selp.b32 %r9, 1, 2, %p1;": (-1, 1, 2),
    "setp.ne.f32 %p1, %r1, %r2; selp.b32 %r9, 1, 2, %p1;": (word(np.nan), word(1), 2),
    "setp.neu.f32 %p1, %r1, %r2; selp.b32 %r9, 1, 2, %p1;": (word(np.nan), word(1), 1),
    "setp.nan.f32 %p1, %r1, %r2; selp.b32 %r9, 1, 2, %p1;": (word(np.nan), word(1), 1),
    "setp.eq.s32 %p1, %r1, %r2; not.pred %p2, %p1; @%p2 bra $DONE; mov.u32 %r9, 3;": (4, 4, 3),
    "add.rn.f32 %r9, %r1, %r2;": (word(1), word(2.0 ** -24), word(1)),
    "fma.rn.f32 %r9, %r1, %r1, %r2;": (word(1 + 2.0 ** -12), word(-1), word(2.0 ** -11 + 2.0 ** -24)),
    "cvt.rn.f16.f32 %rs1, %r1; add.rn.f32.f16 %r9, %rs1, %r2;": (word(1 + 2.0 ** -11), word(2.0 ** -20),
                                                                 word(1 + 2.0 ** -20)),
    "cvt.rn.f16.f32 %rs1, %r1; sub.rn.f32.f16 %r9, %rs1, %r2;": (word(3), word(2.0 ** -20), word(3 - 2.0 ** -20)),
    "cvt.rn.f16.f32 %rs1, %r1; fma.rn.f32.f16 %r9, %rs1, %rs1, %r2;": (
        word(1 + 2.0 ** -10), word(-1), word(2.0 ** -9 + 2.0 ** -20)),
    "cvt.f64.f32 %rd7, %r1; add.rn.f64 %rd8, %rd7, 0d3FF0000000000000; fma.rn.f64 %rd9, %rd7, 0d4000000000000000, "
    "0d3FF0000000000000; neg.f64 %rd9, %rd9; fma.rn.f64 %rd8, %rd8, %rd8, %rd9; cvt.rn.f32.f64 %r9, %rd8;":
        (word(2.0 ** -30), 0, word(2.0 ** -60)),
    "div.rn.f32 %r9, %r1, %r2;": (word(1), word(3), word(np.float32(1) / np.float32(3))),
    "rcp.rn.f32 %r9, %r1;": (word(0), 0, word(np.inf)),
    "ex2.approx.ftz.f32 %r9, %r1;": (word(-0.5), 0, word(np.sqrt(np.float32(0.5)))),
    "ex2.approx.ftz.f32 %r9, %r2;": (0, word(-127), 0),
    "ex2.approx.ftz.f32 %r9, %r1; add.rn.f32 %r9, %r9, %r2;": (word(-np.inf), word(5), word(5)),
    "sqrt.rn.f32 %r9, %r1;": (word(2), 0, word(np.sqrt(np.float32(2)))),
    "copysign.f32 %r9, %r1, %r2;": (word(-2), word(3), word(-3)),
    "neg.f32 %r9, %r1;": (word(0), 0, word(-0.0)),
    "abs.f32 %r9, %r1;": (word(-3), 0, word(3)),
    "cvt.rni.s32.f32 %r9, %r1;": (word(-2.5), 0, 0xFFFFFFFE),
    "cvt.rzi.s32.f32 %r9, %r1;": (word(3e9), 0, 0x7FFFFFFF),
    "cvt.rzi.u32.f32 %r9, %r1;": (word(-1), 0, 0),
    "cvt.rni.s32.f32 %r9, %r2;": (0, word(np.nan), 0),
    "cvt.rni.f32.f32 %r9, %r1;": (word(0.5), 0, word(0)),
    "cvt.rmi.f32.f32 %r9, %r1;": (word(-0.5), 0, word(-1)),
    "cvt.rpi.f32.f32 %r9, %r1;": (word(0.5), 0, word(1)),
    "cvt.rn.f32.s32 %r9, %r1;": (-16777217, 0, word(-16777216)),
    "cvt.rn.f32.u32 %r9, %r1;": (-1, 0, word(2.0 ** 32)),
    "cvt.u16.u32 %rs1, %r1; cvt.s32.s8 %r9, %rs1;": (0x1FF, 0, 0xFFFFFFFF),
    "cvt.u16.u32 %rs1, %r1; cvt.rn.f32.u8 %r9, %rs1;": (0x1FF, 0, word(255)),
    "cvt.rn.f16.f32 %rs1, %r1; cvt.u32.u16 %r9, %rs1;": (word(1 + 2.0 ** -11), 0, 0x3C00),
    "cvt.rn.f16x2.f32 %r9, %r1, %r2;": (word(1), word(-2), 0x3C00C000),
    "cvt.rn.bf16x2.f32 %r9, %r1, %r2;": (word(1 + 2.0 ** -8), word(1 + 3 * 2.0 ** -8), 0x3F803F82),
    "cvt.rn.bf16x2.f32 %r9, %r2, %r1;": (word(-3.4e38), word(np.nan), 0x7FFFFF80),
    "mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r9, {%rs2, %rs1};": (0x12345678, 0, 0x56781234),
    "mov.b32 {%rs1, _}, %r1; cvt.f32.f16 %r9, %rs1;": (0x12343C00, 0, word(1)),
    "mov.b32 %r9, 0f40490FDB;": (0, 0, 0x40490FDB),
}


@pytest.mark.parametrize(("body", "a", "b", "wanted"), [(body, *rest) for body, rest in BY_HAND.items()],
                         ids=[body.partition(" ")[0] for body in BY_HAND])
def test_an_instruction_of_a_thread_gives_what_the_manual_says(body: str, a: int, b: int, wanted: int) -> None:
    assert hex(run(body.replace(";", ";\n"), a, b)[0]) == hex(wanted)


def test_a_fused_product_is_rounded_once() -> None:
    """Inputs include cases that float64 alone rounds twice: a tie that a third, tiny part decides."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        x, y, z = (rng.standard_normal(3) * 2.0 ** rng.integers(-30, 30, 3)).astype(np.float32)
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        got, = fused(*(np.array([v], np.float32) for v in (x, y, z)))
        near = [np.nextafter(got, np.float32(side)) for side in (-np.inf, np.inf)]
        assert all(abs(Fraction(float(got)) - exact) <= abs(Fraction(float(other)) - exact) for other in near)
    halfway = np.float32(1 + 2.0 ** -23)        # + 2**-24 is a tie, which 2**-60 more turns up
    assert fused(*(np.array([v], np.float32) for v in (2.0 ** -12 + 2.0 ** -36, 2.0 ** -12, halfway)))[0] > halfway


def test_threads_may_write_parts_of_a_word() -> None:
    body = _store_shared("cvt.u16.u32 %rs1, %r1;\nst.shared.u8 [%r80], %rs1;\nbar.sync 0;\nand.b32 %r80, %r80, 124;\n"
                         "ld.shared.u32 %r9, [%r80];\n", 0)
    got = run(body, np.arange(LANES), shared=128)
    np.testing.assert_array_equal(got, np.repeat(np.arange(LANES, dtype=np.uint8).view(np.uint32), 4))


def test_threads_may_write_parts_of_a_word_one_after_the_other() -> None:
    """Even threads write first, then odd ones."""
    body = _store_shared("cvt.u16.u32 %rs1, %r1;\nand.b32 %r82, %r90, 1;\nsetp.eq.u32 %p1, %r82, 0;\n"
                         "@%p1 st.shared.u8 [%r80], %rs1;\n@!%p1 st.shared.u8 [%r80], %rs1;\nbar.sync 0;\n"
                         "and.b32 %r80, %r80, 124;\nld.shared.u32 %r9, [%r80];\n", 0)
    got = run(body, np.arange(LANES), shared=128)
    np.testing.assert_array_equal(got, np.repeat(np.arange(LANES, dtype=np.uint8).view(np.uint32), 4))


def test_what_is_loaded_beside_others_and_read_by_nobody_may_be_anything() -> None:
    body = _store_shared("st.shared.u32 [%r80], %r1;\nld.shared.v4.u32 {%r9, %r10, %r11, %r12}, [%r80];\n")
    np.testing.assert_array_equal(run(body, np.arange(LANES), shared=512), np.arange(LANES))
    with pytest.raises(Fault, match="nothing wrote"):
        run(body + "add.u32 %r9, %r9, %r12;\n", np.arange(LANES), shared=512)


def test_lanes_exchange_registers() -> None:
    got = run("shfl.sync.bfly.b32 %r9, %r1, 16, 31, -1;\n", np.arange(LANES))
    np.testing.assert_array_equal(got, np.arange(LANES) ^ 16)


def test_threads_that_part_meet_again() -> None:
    body = """mov.u32 %r9, 0;
    setp.gt.u32 %p1, %r1, 3;
    @%p1 bra $LARGE;
    add.u32 %r9, %r9, 1;
    bra $BOTH;
$LARGE:
    add.u32 %r9, %r9, 2;
$BOTH:
    shfl.sync.bfly.b32 %r8, %r9, 16, 31, -1;
    add.u32 %r9, %r9, %r8;
"""
    np.testing.assert_array_equal(run(body, np.arange(LANES)), [3] * 4 + [4] * 12 + [3] * 4 + [4] * 12)


def test_a_loop_runs_for_as_many_turns_as_each_thread_has() -> None:
    body = """mov.u32 %r9, 0;
$AGAIN:
    add.u32 %r9, %r9, 1;
    setp.lt.u32 %p1, %r9, %r1;
    @%p1 bra $AGAIN;
"""
    np.testing.assert_array_equal(run(body, np.arange(1, LANES + 1)), np.arange(1, LANES + 1))


# ---- matrices
def _store_shared(register: str, shift: int = 4) -> str:
    """Store word t of shared memory, or 16 bytes of it."""
    return f"shl.b32 %r80, %r90, {shift};\nmov.u32 %r81, shared;\nadd.u32 %r80, %r80, %r81;\n{register}"


def test_tiles_of_shared_memory_come_as_fragments() -> None:
    """Lane 8 i + r names row r of tile i; lane 4 g + t gets word t of row g."""
    body = _store_shared("st.shared.v4.u32 [%r80], {%r1, %r2, %r90, %r1};\nbar.sync 0;\n"
                         "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r9, %r13}, [%r80];\n")
    words = np.stack([np.arange(LANES) + 100, np.arange(LANES) + 200, np.arange(LANES), np.arange(LANES) + 100], 1)
    got = run(body, np.arange(LANES) + 100, np.arange(LANES) + 200, shared=512)
    np.testing.assert_array_equal(got, words[16 + np.arange(LANES) // 4, np.arange(LANES) % 4])


def test_tiles_of_shared_memory_come_across() -> None:
    """Lane 4 g + t gets the halves of column g in rows 2 t and 2 t + 1."""
    body = _store_shared("st.shared.v4.u32 [%r80], {%r1, %r2, %r90, %r1};\nbar.sync 0;\n"
                         "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r10, %r11, %r9, %r13}, [%r80];\n")
    low, high = np.arange(LANES) * 3 + 1, np.arange(LANES) * 5 + 2
    got = run(body, low + (high << 16), low * 7, shared=512)
    g, t = np.arange(LANES) // 4, np.arange(LANES) % 4

    def half(row: np.ndarray) -> np.ndarray:
        """Return column g of a row of tile 2."""
        words = np.stack([low + (high << 16), low * 7, np.arange(LANES), low + (high << 16)], 1)
        return words[16 + row, g // 2] >> (16 * (g % 2)) & 0xFFFF
    np.testing.assert_array_equal(got, half(2 * t) + (half(2 * t + 1) << 16))


@pytest.mark.parametrize(("kind_a", "kind_b"), [("u8", "s8"), ("s8", "u8"), ("u8", "u8"), ("s8", "s8")])
@pytest.mark.parametrize(("shape", "d", "a", "b"), [
    ("m16n8k32", ["%r9", "%r10", "%r11", "%r12"], ["%r1", "%r20", "%r20", "%r20"],
     ["%r2", "%r20"]),
    ("m8n8k16", ["%r9", "%r10"], ["%r1"], ["%r2"])], ids=["m16n8k32", "m8n8k16"])
def test_the_first_sums_of_a_product_are_of_row_g_and_column_2_t(
        shape: str, d: list[str], a: list[str], b: list[str], kind_a: str, kind_b: str) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.integers(0, 256, (8, 16)) - 128 * (kind == "s8") for kind in (kind_a, kind_b))
    lists = ", ".join("{" + ", ".join(part) + "}" for part in (d, a, b, ["%r20"] * len(d)))
    got = run(f"mov.u32 %r20, 0;\nmma.sync.aligned.{shape}.row.col.s32.{kind_a}.{kind_b}.s32 {lists};\n",
              x.astype(np.uint8).view(np.uint32).ravel(), w.astype(np.uint8).view(np.uint32).ravel())
    np.testing.assert_array_equal(got.view(np.int32).reshape(8, 4), (x @ w.T)[:, ::2])


def test_halves_multiply_into_floats() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-4, 5, (8, 8)).astype(np.float16) for _ in range(2))
    body = ("mov.u32 %r20, 0;\nmma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r9, %r10, %r11, %r12}, {%r1, %r20}, "
            "{%r2}, {%r20, %r20, %r20, %r20};\n")
    got = run(body, x.view(np.uint32).ravel(), w.view(np.uint32).ravel()).view(np.float32)
    np.testing.assert_array_equal(got.reshape(8, 4), (x.astype(np.float32) @ w.astype(np.float32).T)[:, ::2])


@pytest.mark.parametrize(("a", "b", "element", "lane"), [
    (17, 2, 0, 19),         # row 5 and column 2 of the first quads
    (6, 21, 7, 4),          # row 2 and column 5 of the second
    (27, 15, 3, None)])     # of the third and of the fourth: they never meet
def test_quads_multiply_rows_of_their_own(a: int, b: int, element: int, lane: int | None) -> None:
    x, w = np.zeros((2, LANES, 2), np.float16)
    x[a], w[b] = (2, 1), (3, 0)
    sums = ["%r9" if e == element else f"%r{30 + e}" for e in range(8)]
    body = (f"mov.u32 %r20, 0;\nmov.u32 %r21, {word(1)};\nmma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 "
            f"{{{', '.join(sums)}}}, {{%r20, %r1}}, {{%r20, %r2}}, {{{', '.join(['%r21'] * 8)}}};\n")
    got = run(body, x.view(np.uint32).ravel(), w.view(np.uint32).ravel()).view(np.float32)
    np.testing.assert_array_equal(got, [1 + 6 * (number == lane) for number in range(LANES)])


# ---- what it refuses
FAULTS = {
    "outside of what is allocated": "ld.global.u32 %r9, [%rd1+4096];",
    "not a multiple of 4": "ld.global.u32 %r9, [%rd1+2];",
    "beyond": "mov.u32 %r80, shared;\nld.shared.u32 %r9, [%r80+128];",
    "nothing wrote": "mov.u32 %r80, shared;\nld.shared.u32 %r9, [%r80];",
    "two threads write to one word": "mov.u32 %r80, shared;\nst.shared.u32 [%r80], %r1;",
    "two threads write to one place": "mov.u32 %r80, shared;\ncvt.u16.u32 %rs1, %r1;\nst.shared.u8 [%r80], %rs1;",
    "without a barrier between": _store_shared("st.shared.u32 [%r80], %r1;\nxor.b32 %r82, %r80, 4;\n"
                                               "ld.shared.u32 %r9, [%r82];", 2),
    "another thread reads, without a barrier": _store_shared(
        "st.shared.u32 [%r80], %r1;\nbar.sync 0;\nxor.b32 %r82, %r80, 4;\nld.shared.u32 %r9, [%r82];\n"
        "st.shared.u32 [%r80], %r1;", 2),
    "not all threads reach": "mov.u32 %r9, 0;\nsetp.gt.u32 %p1, %r90, 3;\n@%p1 bra $DONE;\nbar.sync 0;",
    "reads what another thread of the launch wrote": "st.global.u32 [%rd3], %r1;\nxor.b32 %r80, %r90, 1;\n"
                                                     "sub.u32 %r80, %r80, %r90;\nmul.wide.s32 %rd5, %r80, 4;\n"
                                                     "add.s64 %rd5, %rd3, %rd5;\nld.global.u32 %r9, [%rd5];",
    "has yet to bring": _store_shared("cp.async.ca.shared.global [%r80], [%rd1], 4;\n"
                                      "ld.shared.u32 %r9, [%r80];", 2),
    "takes 16 of 4 bytes": _store_shared("cp.async.ca.shared.global [%r80], [%rd1], 4, 16;"),
    "copies 4 bytes": _store_shared("cp.async.cg.shared.global [%r80], [%rd1], 4, 0;"),
    "'.ftz' is not known here": "add.ftz.f32 %r9, %r1, %r2;",
    "'popc.b32 %r9, %r1' is not known here": "popc.b32 %r9, %r1;",
    "read before it is written": "add.u32 %r9, %r1, %r50;",
    "has 32 bits, not 64": "add.s64 %rd5, %r1, %rd1;",
    "this product is not known": "mma.sync.aligned.m16n8k16.row.col.s32.u8.u8.s32 {%r9, %r9, %r9, %r9}, "
                                 "{%r1, %r1, %r1, %r1}, {%r2, %r2}, {%r1, %r1, %r1, %r1};",
    "has no guard here": "setp.gt.u32 %p1, %r90, 3;\n@%p1 shfl.sync.bfly.b32 %r9, %r1, 16, 31, -1;",
    "only exchanges of a whole warp": "shfl.sync.bfly.b32 %r9, %r1, 8, 15, -1;",
    "only barrier 0 of the whole block": "bar.sync 1;",
    "overwrites what another thread of the launch wrote": "st.global.u32 [%rd3], %r1;\nxor.b32 %r80, %r90, 1;\n"
                                                          "sub.u32 %r80, %r80, %r90;\nmul.wide.s32 %rd5, %r80, 4;\n"
                                                          "add.s64 %rd5, %rd3, %rd5;\nst.global.u32 [%rd5], %r1;",
    "overwrites what another thread writes": _store_shared("st.shared.u32 [%r80], %r1;\nxor.b32 %r82, %r80, 4;\n"
                                                           "st.shared.u32 [%r82], %r1;", 2),
    "st.shared.u8 [%r82], %rs1': overwrites what another thread writes": _store_shared(
        "cvt.u16.u32 %rs1, %r1;\nst.shared.u8 [%r80], %rs1;\nxor.b32 %r82, %r80, 1;\nst.shared.u8 [%r82], %rs1;", 0),
    "st.shared.u16 [%r82], %rs1': overwrites what another thread writes": _store_shared(
        "cvt.u16.u32 %rs1, %r1;\nst.shared.u8 [%r80], %rs1;\nand.b32 %r82, %r80, -2;\nsetp.ne.u32 %p1, %r82, %r80;\n"
        "@%p1 st.shared.u16 [%r82], %rs1;", 0),
    "st.shared.u8 [%r83], %rs1': overwrites what another thread writes": _store_shared(
        "st.shared.u32 [%r80], %r1;\ncvt.u16.u32 %rs1, %r1;\nxor.b32 %r83, %r80, 4;\nst.shared.u8 [%r83], %rs1;", 2),
    "st.shared.u8 [%r84], %rs1': overwrites what another thread writes": _store_shared(
        "st.shared.u32 [%r80], %r1;\ncvt.u16.u32 %rs1, %r1;\nst.shared.u8 [%r80], %rs1;\nxor.b32 %r84, %r80, 5;\n"
        "st.shared.u8 [%r84], %rs1;", 2),
    "[%rd1+2], 4': an address is not a multiple of 4": _store_shared(
        "cp.async.ca.shared.global [%r80], [%rd1+2], 4;", 2),
    "2 registers": "ld.global.v4.u32 {%r1, %r2}, [%rd1];",
    "a field of no bits": "bfe.u32 %r9, %r1, 4, 0;",
    "or beyond the register": "bfe.u32 %r9, %r1, 28, 8;",
    "a field that reaches the register's end": "bfi.b32 %r9, %r1, %r2, 28, 8;",
    "this conversion is not known": "cvt.rn.bf16.f32 %rs1, %r1;",
    "'.local .b8 x' is not known here": ".local .b8 x;",
    "a register of that name and another type": ".reg .b64 %r<9>;",
}


@pytest.mark.parametrize(("fault", "body"), FAULTS.items(), ids=FAULTS)
def test_what_a_gpu_may_let_pass_is_refused(fault: str, body: str) -> None:
    with pytest.raises(Fault, match=re.escape(fault)):
        run(body + "\n", np.arange(LANES), shared=512 if "beyond" not in fault else 128)


def test_two_blocks_that_write_to_one_place_are_found() -> None:
    with pytest.raises(Fault, match="another thread of the launch wrote|two threads write"):
        run("mov.u32 %r9, 1;\n", blocks=2)


def test_a_block_of_more_threads_than_it_was_compiled_for_is_refused() -> None:
    with pytest.raises(Fault, match="256 threads a block, compiled for 128"):
        run("mov.u32 %r9, 1;\n", threads=256)


def test_a_copy_that_was_waited_for_is_there_for_its_own_thread() -> None:
    body = _store_shared("cp.async.ca.shared.global [%r80], [%rd1], 4, %r2;\ncp.async.commit_group;\n"
                         "cp.async.wait_group 0;\nld.shared.u32 %r9, [%r80];\n", 2)
    got = run(body, 0x11223344, np.arange(LANES) % 5, shared=128)
    wanted = [0x11223344 & ((1 << 8 * taken) - 1) for taken in range(5)]
    np.testing.assert_array_equal(got, np.array(wanted)[np.arange(LANES) % 5])


def test_each_block_has_shared_memory_of_its_own() -> None:
    body = ("mov.u32 %r70, %ctaid.x;\nadd.u32 %r71, %r1, %r70;\n"
            + _store_shared("st.shared.u32 [%r80], %r71;\nbar.sync 0;\nld.shared.u32 %r9, [%r80];\n", 2)
            + "setp.ne.u32 %p1, %r70, 0;\n@%p1 ret;\n")
    np.testing.assert_array_equal(run(body, np.arange(2 * LANES), shared=128, blocks=2), np.arange(LANES))


def test_who_wrote_what_is_told_apart_over_any_number_of_launches() -> None:
    memory, places = Memory(64), np.arange(4)
    for launch in range(600):
        memory.begin_launch()
        memory.reads(places, places)
        memory.writes(places, 1, places + launch)
        memory.reads(places, places + launch)
        with pytest.raises(Fault):
            memory.reads(places[:1], places[1:2] + launch)
