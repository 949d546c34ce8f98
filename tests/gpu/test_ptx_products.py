"""Tests of the PTX machine's matrix products: elements of each lane by the figures of the PTX ISA."""
from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from scripts.testing.gpu.ptx.machine import Machine
from scripts.testing.gpu.ptx.memory import Array, Memory
from scripts.testing.gpu.ptx.text import Fault, parse

# Each thread has so many words one after the other at %rd1, and room for as many sums at %rd2.
ENTRY = """.visible .entry k(
	.param .u64 k_param_0,
	.param .u64 k_param_1
)
{
	.reg .b32 %%r<99>; .reg .b32 %%d<9>; .reg .b64 %%rd<9>;
	ld.param.u64 %%rd1, [k_param_0];
	ld.param.u64 %%rd2, [k_param_1];
	mov.u32 %%r90, %%tid.x;
	mul.wide.u32 %%rd3, %%r90, %d;
	add.s64 %%rd1, %%rd1, %%rd3;
	mul.wide.u32 %%rd3, %%r90, %d;
	add.s64 %%rd2, %%rd2, %%rd3;
	%s
	ret;
}
"""
TYPES = {"u8": np.dtype(np.uint8), "s8": np.dtype(np.int8), "f16": np.dtype(np.float16),
         "bf16": np.dtype(ml_dtypes.bfloat16)}
WARP = 32
LANE = np.arange(WARP)
G, T = LANE // 4, LANE % 4      # the figures' groupID and threadID_in_group


def run(body: list[str], words: Array, sums: int, dtype: str, shared: int = 0) -> Array:
    """Run code and return the stored registers %d0, %d1, ... as [thread][sum]. words: [thread][word]."""
    memory, threads = Memory(1 << 16), len(words)
    stores = [f"st.global.u32 [%rd2+{4 * e}], %d{e}" for e in range(sums)]
    text = ENTRY % (words.nbytes // threads, 4 * sums, ";\n\t".join([*body, *stores]) + ";")
    at = [memory.allocate(words), memory.allocate(4 * sums * threads)]
    Machine(memory).launch(parse(text)["k"], (1,), threads, at, shared)
    return memory.array(at[1], np.float32 if dtype == "f32" else np.int32, (threads, sums))


def drawn(dtype: str, rows: int, depth: int, seed: int) -> Array:
    """Draw numbers whose sums are exact."""
    low, high = (-8, 9) if "f" in dtype else (np.iinfo(TYPES[dtype]).min, np.iinfo(TYPES[dtype]).max + 1)
    return np.random.default_rng(seed).integers(low, high, (rows, depth)).astype(TYPES[dtype])


def names(first: str, count: int, start: int = 0) -> str:
    return "{" + ", ".join(f"{first}{start + n}" for n in range(count)) + "}"


@pytest.mark.parametrize(("shape", "types"), [
    ((16, 8, 32), ("s32", "u8", "s8")), ((8, 8, 16), ("s32", "u8", "s8")), ((16, 8, 16), ("f32", "f16", "f16")),
    ((16, 8, 8), ("f32", "f16", "f16")), ((16, 8, 16), ("f32", "bf16", "bf16"))], ids=str)
def test_a_warp_multiplies_a_tile_by_a_tile(shape: tuple[int, int, int], types: tuple[str, str, str]) -> None:
    """Lane 4 g + t holds parts of a, of b and of the sums.

    Its registers of a are word t of rows g and g + 8, then of their next 16 bytes; those of b are the same of column g;
    its sums are columns 2 t and 2 t + 1 of row g, then of row g + 8.
    """
    (m, n, k), (type_d, type_a, type_b) = shape, types
    a, b = drawn(type_a, m, k, 0), drawn(type_b, n, k, 1)
    start = np.arange(m * n).reshape(m, n) * 3

    def parts(matrix: Array) -> list[Array]:
        words = np.ascontiguousarray(matrix).view(np.uint32)
        return [words[G + 8 * half, T + 4 * step] for step in range(words.shape[1] // 4)
                for half in range(len(matrix) // 8)]
    places = [(G + 8 * half, 2 * T + odd) for half in range(m // 8) for odd in range(2)]
    c = [start[place].astype(np.float32 if type_d == "f32" else np.int32).view(np.uint32) for place in places]
    words = np.stack([*parts(a), *parts(b), *c], 1)
    of_a, of_b, of_c = len(parts(a)), len(parts(b)), len(c)
    body = [f"ld.global.u32 %r{at}, [%rd1+{4 * at}]" for at in range(words.shape[1])]
    body.append(f"mma.sync.aligned.m{m}n{n}k{k}.row.col.{type_d}.{type_a}.{type_b}.{type_d} {names('%d', of_c)}, "
                f"{names('%r', of_a)}, {names('%r', of_b, of_a)}, {names('%r', of_c, of_a + of_b)}")
    got, wanted = run(body, words, of_c, type_d), start + a.astype(np.int64) @ b.astype(np.int64).T
    for e, place in enumerate(places):
        np.testing.assert_array_equal(got[:, e], wanted[place])


# ---- products of four warps, out of shared memory
PIXELS, COUTS, ROW, COLUMNS_AT = 64, 16, 128, 8192
FENCE = "fence.proxy.async.shared::cta"


def descriptor(address: int) -> int:
    """Return a descriptor of 128-byte rows with 128-byte swizzle; groups of eight rows are 1024 bytes apart."""
    return address >> 4 | 1024 >> 4 << 32 | 1 << 62


def image(a: Array, b: Array, begin: int) -> Array:
    """Return shared memory with the matrices in 128-byte rows, with 128-byte swizzle.

    begin: the matrix's first byte in each row.
    """
    memory = np.zeros(COLUMNS_AT + COUTS * ROW, np.uint8)
    for place, matrix in ((0, a), (COLUMNS_AT, b)):
        for r, row in enumerate(np.ascontiguousarray(matrix).view(np.uint8)):
            for chunk in range(len(row) // 16):
                turned = (begin // 16 + chunk) ^ r % 8
                at = place + r * ROW + 16 * turned
                memory[at:at + 16] = row[16 * chunk:16 * chunk + 16]
    return memory


def grouped(types: str, a: Array, b: Array, begin: int = 0,
            change: Callable[[str], str] = lambda text: text) -> Array:
    """Return [thread][sum] of a wgmma, with initial sums e. change: applied to each line."""
    words = image(a, b, begin).view(np.uint32).reshape(4 * WARP, -1)
    type_d, scales = ("s32", "1") if ".s32" in types else ("f32", "1, 1, 1, 0, 0")
    count, own = COUTS // 2, words.shape[1]
    body = ["mov.u32 %r80, shared", f"mul.lo.u32 %r81, %r90, {4 * own}", "add.u32 %r80, %r80, %r81"]
    for at in range(0, own, 4):
        body += [f"ld.global.v4.u32 {names('%r', 4)}, [%rd1+{4 * at}]",
                 f"st.shared.v4.u32 [%r80+{4 * at}], {names('%r', 4)}"]
    body += [f"mov.u32 %d{e}, {np.float32(e).view(np.uint32) if type_d == 'f32' else e}" for e in range(count)]
    body += [FENCE, "bar.sync 0", f"mov.u64 %rd4, {descriptor(begin)}",
             f"mov.u64 %rd5, {descriptor(COLUMNS_AT + begin)}", "wgmma.fence.sync.aligned",
             f"wgmma.mma_async.sync.aligned.m{PIXELS}n{COUTS}{types} {names('%d', count)}, %rd4, %rd5, {scales}",
             "wgmma.commit_group.sync.aligned", "wgmma.wait_group.sync.aligned 0"]
    return run([line for line in map(change, body) if line], words, count, type_d, len(words.tobytes()))


@pytest.mark.parametrize("begin", [0, 32, 96])
@pytest.mark.parametrize("types", ["k32.s32.u8.s8", "k16.f32.f16.f16", "k16.f32.bf16.bf16"])
def test_four_warps_multiply_rows_of_shared_memory(types: str, begin: int) -> None:
    """For 32 bytes of K, lane 4 g + t of warp w has rows 16 w + g and 16 w + g + 8 of each eight columns."""
    _, _, type_a, type_b = types.split(".")
    depth = 32 // TYPES[type_a].itemsize
    a, b = drawn(type_a, PIXELS, depth, 0), drawn(type_b, COUTS, depth, 1)
    got = grouped(types, a, b, begin)
    products = a.astype(np.int64) @ b.astype(np.int64).T
    for e in range(COUTS // 2):
        rows = np.repeat(np.arange(0, PIXELS, 16), WARP) + np.tile(G, 4) + e // 2 % 2 * 8
        columns = np.tile(2 * T, 4) + e // 4 * 8 + e % 2
        np.testing.assert_array_equal(got[:, e], products[rows, columns] + e)


@pytest.mark.parametrize(("fault", "old", "new"), [
    ("without a fence.proxy.async", FENCE, ""),
    ("a descriptor that differs", "wgmma.fence.sync.aligned", "cvt.u64.u32 %rd4, %r90"),
    ("is not of rows turned by 128 bytes", str(descriptor(0)), str(descriptor(0) | 1 << 63)),
    ("this product is not known", "u8.s8", "s8.s8"), ("'.m64n12k32' is not known", "n16", "n12"),
    ("aligned to 16, or beyond", str(descriptor(COLUMNS_AT)), str(descriptor(COLUMNS_AT + 1024)))])
def test_a_product_of_four_warps_that_a_gpu_would_not_make_is_refused(fault: str, old: str, new: str) -> None:
    a, b = drawn("u8", PIXELS, 32, 0), drawn("s8", COUTS, 32, 1)
    with pytest.raises(Fault, match=fault):
        grouped("k32.s32.u8.s8", a, b, change=lambda text: text.replace(old, new))
