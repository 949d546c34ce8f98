"""Warp instructions: shuffles, ldmatrix and matrix products."""
from __future__ import annotations

import re

import numpy as np

from scripts.testing.gpu.ptx.machine import TYPES, WARP, Run, action
from scripts.testing.gpu.ptx.memory import Array
from scripts.testing.gpu.ptx.text import Fault, Instruction


def _extents(word: str) -> tuple[int, int, int]:
    """Parse m16n8k32 into 16, 8, 32."""
    match = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", word)
    assert match, word
    return int(match[1]), int(match[2]), int(match[3])


@action("shfl", modifiers="sync bfly")
def _shfl(run: Run, i: Instruction) -> None:
    if i.operands[3:] != ("31", "-1"):
        raise Fault("only exchanges of a whole warp are known here")
    values, distance = run.warps(run.get(i.one(1), "b32")), int(i.one(2))
    run.put(i.one(0).partition("|")[0], values[:, np.arange(WARP) ^ distance].reshape(-1))


@action("ldmatrix", modifiers="sync aligned m8n8 x4 trans shared")
def _ldmatrix(run: Run, i: Instruction) -> None:
    block, thread = run.who
    offsets = run.shared.at(block, run.address(i.one(1)), 16)
    run.shared.reads(block, thread, offsets, 16)
    rows = run.shared.bytes.view(np.uint32)[run.warps(offsets // 4)[:, :, None] + np.arange(4)]    # [warp][lane][4]
    for n, name in enumerate(i.several(0)):
        tile = rows[:, 8 * n:8 * n + 8]
        if "trans" in i.op:
            tile = np.ascontiguousarray(tile.view(np.uint16).swapaxes(1, 2)).view(np.uint32)
        run.put(name, tile.reshape(-1))


_BYTES = ("u8", "s8")
_SHAPES = {*((shape, "s32", a, b, "s32") for shape in ("m16n8k32", "m8n8k16") for a in _BYTES for b in _BYTES),
           ("m16n8k16", "f32", "f16", "f16", "f32"), ("m16n8k16", "f32", "bf16", "bf16", "f32"),
           ("m16n8k8", "f32", "f16", "f16", "f32")}


@action("mma", modifiers="sync aligned row col m16n8k32 m8n8k16 m16n8k16 m16n8k8 m8n8k4 u8 s8 bf16")
def _mma(run: Run, i: Instruction) -> None:
    if i.op[3:] == ("m8n8k4", "row", "col", "f32", "f16", "f16", "f32"):
        _quads(run, i)
        return
    if (i.op[3], *i.op[6:]) not in _SHAPES or i.op[4:6] != ("row", "col"):
        raise Fault("this product is not known here")
    m, _, k = _extents(i.op[3])
    d, a, b, c = (i.several(n) for n in range(4))
    type_d, type_a, type_b, type_c = i.op[6:]
    left, right = (_elements(type_, np.stack([run.warps(run.get(name, "b32")) for name in names]))
                   for type_, names in ((type_a, a), (type_b, b)))
    # register [2 * half of K + half of the rows]: [registers][warp][8 rows][elements of four lanes]
    rows, width = m // 8, left.shape[-1]
    x = np.concatenate([np.concatenate([left[rows * j + i] for j in range(k // width)], -1) for i in range(rows)], 1)
    w = np.concatenate([right[j] for j in range(k // width)], -1)
    sums = np.matmul(x.astype(np.float64), w.astype(np.float64).swapaxes(1, 2)).reshape(-1, rows, 8, 4, 2)
    for e, name in enumerate(d):
        products = sums[:, e // 2, :, :, e % 2].reshape(-1, WARP)
        run.put(name, _added(run.warps(run.get(c[e], type_c)), products).reshape(-1))
    assert type_d == type_c


def _quads(run: Run, i: Instruction) -> None:
    """Compute four products of 8 x 8 x 4, the q-th by lanes 4 q to 4 q + 3 and 16 + 4 q to 16 + 4 q + 3.

    A lane has one row of a and one of b; of the sums it has its own row and the one two below, and columns 0, 1, 4 and
    5 from its own.
    """
    d, a, b, c = (i.several(n) for n in range(4))

    def rows(names: list[str]) -> Array:
        """Return [warp][q][8 rows][4 of K]."""
        words = np.stack([run.warps(run.get(name, "b32")) for name in names], -1)
        return np.moveaxis(words.view(np.float16).reshape(-1, 2, 4, 4, 4), 1, 2).reshape(-1, 4, 8, 4).astype(np.float64)
    sums, lane = np.matmul(rows(a), rows(b).swapaxes(2, 3)), np.arange(WARP)
    for e, name in enumerate(d):
        products = sums[:, lane // 4 % 4, lane // 16 * 4 + (lane & 1) + (e & 2), (e & 4) + (lane & 2) + (e & 1)]
        run.put(name, _added(run.warps(run.get(c[e], "f32")), products).reshape(-1))


def _added(before: Array, products: Array) -> Array:
    """Add products to sums; sums of integers wrap."""
    if before.dtype.kind == "i":
        return (before.astype(np.int64) + products.astype(np.int64)).astype(np.int32)
    return (before.astype(np.float64) + products).astype(np.float32)


_GROUPED = {("k32", "s32", "u8", "s8"): ("1",), ("k16", "f32", "f16", "f16"): ("1", "1", "1", "0", "0"),
            ("k16", "f32", "bf16", "bf16"): ("1", "1", "1", "0", "0")}      # the operands behind the descriptors


@action("wgmma", modifiers="sync aligned fence commit_group wait_group mma_async u8 s8 bf16 "
        + " ".join(f"m64n{n}k{k}" for n in range(8, 257, 8) for k in (16, 32)))
def _wgmma(run: Run, i: Instruction) -> None:
    """Compute m64 products: a lane's sums are those of mma.m16n8 on its warp's 16 pixels, for each 8 couts in turn.

    Sums are available at once, as the instructions that wait for them follow in the same inline assembly.
    """
    if i.op[1] != "mma_async":
        return
    m, n, k = _extents(i.op[4])
    types = i.op[5:]
    if _GROUPED.get((f"k{k}", *types)) != i.operands[3:]:
        raise Fault("this product is not known here")
    left, right = (_described(run, i.one(at), extent, type_) for at, extent, type_ in ((1, m, types[1]),
                                                                                   (2, n, types[2])))
    # [block][warp][row half][8 rows][8 couts][4 lanes][2]
    sums = np.matmul(left, right.swapaxes(1, 2)).reshape(-1, 4, 2, 8, n // 8, 4, 2)
    for e, name in enumerate(i.several(0)):
        products = sums[:, :, e // 2 % 2, :, e // 4, :, e % 2].reshape(-1)
        run.put(name, _added(run.get(name, types[0]), products))


def _described(run: Run, operand: str, rows: int, type_: str) -> Array:
    """Return the rows of 32 bytes of a matrix descriptor: [groups of warps][rows][elements], in float64."""
    group, blocks = 4 * WARP, run.who[0][::4 * WARP]
    values = run.get(operand, "b64").reshape(-1, group)
    if np.any(values != values[:, :1]) or np.any(values[:, 0] >> np.uint64(62) != 1):
        raise Fault("a descriptor that differs among the threads, or is not of rows turned by 128 bytes")
    start = (values[:, 0] & np.uint64(0x3FFF)).astype(np.int64) << 4
    step = (values[:, 0] >> np.uint64(32) & np.uint64(0x3FFF)).astype(np.int64) << 4
    row = np.arange(rows)
    at = start[:, None, None] + row[:, None] // 8 * step[:, None, None] + row[:, None] % 8 * 128 + np.arange(0, 32, 16)
    at ^= (at >> 7 & 7) << 4
    offsets = run.shared.at(blocks[:, None, None], at, 16)
    run.shared.reads_grouped(np.broadcast_to(blocks[:, None, None], offsets.shape), offsets, 16)
    bytes_ = run.shared.bytes[offsets[..., None] + np.arange(16)].reshape(len(blocks), rows, 32)
    return _values(type_, bytes_).astype(np.float64)


def _values(type_: str, bytes_: Array) -> Array:
    if type_ == "bf16":
        return (bytes_.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bytes_.view({"u8": TYPES["u8"], "s8": TYPES["s8"], "f16": TYPES["f16"]}[type_])


def _elements(type_: str, words: Array) -> Array:
    """Reshape registers [registers][warp][32 lanes] to [registers][warp][8][elements of 4 lanes]."""
    values = _values(type_, np.ascontiguousarray(words).view(np.uint8))
    return values.reshape(*words.shape[:2], 8, -1)
