"""NumPy model of the tile registers that executes the tile instructions of finished machine code.

A process without permission to use tile registers receives SIGILL at a tile instruction, on CPUs with AMX and without.
The handler decodes the instruction where it lies in memory, executes it on tiles in NumPy, and resumes behind it. All
other instructions run on the CPU. So a test covers the object code of a plan: its encodings, addresses, strides and
configurations.

    code = trapping(code)
    with TileMachine() as machine:
        ...                                     # run it
    machine.counts["tdpbusd"]

LDTILECFG and TILERELEASE touch no tile data, so a CPU with AMX executes them without permission. `trapping` sets VEX.W
in them, which raises #UD on every CPU.

What raises #UD or #GP on a CPU raises TileError when the `with` block ends. One thread at a time may execute tile
instructions.

References: Intel SDM (VEX prefix, LDTILECFG, TILELOADD, TILESTORED, TDPBUSD, TDPBF16PS, TDPFP16PS); the ucontext_t of
Linux for x86-64 (uc_mcontext.gregs).
"""
from __future__ import annotations

import ctypes
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILES, ROWS, ROW_BYTES = 8, 16, 64
_LANES = ROW_BYTES // 4
_TILE_BYTES = ROWS * ROW_BYTES

_SIGACTION_BYTES, _FLAGS_AT, _SA_SIGINFO = 152, 136, 0x4
_GREGS_AT, _GREGS, _RIP = 40, 23, 16                                            # in ucontext_t
_GREG_OF = (13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7)               # of rax, rcx, rdx, rbx, rsp, ...
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

# (opcode, pp of the VEX prefix) -> instruction, for register and for memory operands
_REGISTER_FORMS = {(0x49, 0): "tilerelease", (0x49, 3): "tilezero", (0x5E, 0): "tdpbuud", (0x5E, 1): "tdpbusd",
                   (0x5E, 2): "tdpbsud", (0x5E, 3): "tdpbssd", (0x5C, 2): "tdpbf16ps", (0x5C, 3): "tdpfp16ps"}
_MEMORY_FORMS = {(0x49, 0): "ldtilecfg", (0x4B, 1): "tileloaddt1", (0x4B, 2): "tilestored", (0x4B, 3): "tileloadd"}
# LDTILECFG and TILERELEASE: VEX prefix of the map 0F38 (with R, and any X and B), W = 0, L = 0, no pp; opcode
_UNTRAPPED = re.compile(rb"(\xc4[\x82\xa2\xc2\xe2])\x78(\x49)")
_W = 0x80


def trapping(code: bytes) -> bytes:
    """Return the code with VEX.W set in LDTILECFG and TILERELEASE."""
    return _UNTRAPPED.sub(lambda found: found[1] + b"\xf8" + found[2], code)


class TileError(Exception):
    """Error for what a CPU refuses with #UD or #GP."""


@dataclass(frozen=True)
class Instruction:
    """Decoded tile instruction.

    The address of memory is the sum of the displacement and the base register or, if `relative`, the instruction's end.
    """
    name: str
    length: int
    tiles: tuple[int, int, int] = (0, 0, 0)     # ModRM.reg, ModRM.rm, VEX.vvvv: c, a, b of a product
    base: int | None = None
    index: int | None = None                    # register of the stride between rows
    scale: int = 1
    displacement: int = 0
    relative: bool = False


@cache
def decode(code: bytes) -> Instruction:
    """Decode the tile instruction at the start of `code`.

    Raises
    ------
    LookupError
        It is no tile instruction.
    TileError
        It names a tile that does not exist.
    """
    wide = len(code) > 3 and code[2] & _W and (code[3], code[2] & 3) != (0x49, 0)
    if len(code) < 5 or code[0] != 0xC4 or code[1] & 0x1F != 2 or code[2] & 4 or wide:      # map 0F38, L = 0
        raise LookupError(code.hex(" "))
    extended = [~code[1] >> bit & 1 for bit in (7, 6, 5)]       # R, X, B
    form, modrm, vvvv = (code[3], code[2] & 3), code[4], ~code[2] >> 3 & 15
    mod, reg, rm = modrm >> 6, modrm >> 3 & 7, modrm & 7
    if extended[0] or vvvv >= TILES or mod == 3 and extended[2]:
        raise TileError(f"#UD: no such tile register: {code[:5].hex(' ')}")
    if mod == 3:
        return Instruction(_REGISTER_FORMS[form], 5, (reg, rm, vvvv))
    index, scale, at, base = None, 1, 5, rm
    if rm == 4:
        at, base = 6, code[5] & 7
        number = code[5] >> 3 & 7 | extended[1] << 3
        index, scale = (None, 1) if number == 4 else (number, 1 << (code[5] >> 6))
    elif form[0] == 0x4B:
        raise TileError("#UD: a tile is loaded and stored by an address with an SIB byte only")
    absent = mod == 0 and base == 5
    size = (4 if absent else 0, 1, 4)[mod]
    return Instruction(_MEMORY_FORMS[form], at + size, (reg, 0, 0), None if absent else base | extended[2] << 3, index,
                       scale, int.from_bytes(code[at:at + size], "little", signed=True), absent and rm != 4)


def _at(address: int) -> Instruction:
    """Decode the instruction at an address, without reading beyond it: the page may end there."""
    code = ctypes.string_at(address, 5)
    if code[0] == 0xC4 and code[4] >> 6 != 3:
        length = 5 + (code[4] & 7 == 4)
        code = ctypes.string_at(address, length)
        absent = code[4] >> 6 == 0 and code[length - 1] & 7 == 5
        code = ctypes.string_at(address, length + (4 if absent else (0, 1, 4)[code[4] >> 6]))
    return decode(code)


class TileMachine:
    """Tile registers, and the count of each instruction that was executed.

    Bytes outside a tile's configured rows and columns are always zero.
    """

    def __init__(self, execute: bool = True) -> None:
        """Make a machine. execute: False to count instructions only, which leaves registers and memory as they are."""
        self._memory = np.zeros((TILES, ROWS, ROW_BYTES), np.uint8)
        self._rows, self._row_bytes = [0] * TILES, [0] * TILES
        self._execute = execute
        self.counts: Counter[str] = Counter()
        self._error: Exception | None = None
        self._handler = _HANDLER(self._on_illegal)
        self._before = ctypes.create_string_buffer(_SIGACTION_BYTES)

    def __enter__(self) -> TileMachine:
        action = ctypes.create_string_buffer(_SIGACTION_BYTES)
        ctypes.c_void_p.from_buffer(action).value = ctypes.cast(self._handler, ctypes.c_void_p).value
        ctypes.c_int32.from_buffer(action, _FLAGS_AT).value = _SA_SIGINFO
        self._sigaction(action, self._before)
        return self

    def __exit__(self, *_: object) -> None:
        self._sigaction(self._before, None)
        if self._error:
            raise self._error

    @staticmethod
    def _sigaction(action: Any, before: Any) -> None:
        assert ctypes.CDLL(None).sigaction(signal.SIGILL, action, before) == 0

    def _on_illegal(self, _: int, __: int, context: int) -> None:
        registers = (ctypes.c_int64 * _GREGS).from_address(context + _GREGS_AT)
        try:
            instruction = _at(registers[_RIP])
        except (LookupError, TileError) as error:       # the instruction again, without this handler: the process ends
            print(f"no tile instruction: {error}", flush=True)
            self._sigaction(self._before, None)
            return
        registers[_RIP] += instruction.length
        self.counts[instruction.name] += 1
        if not self._execute:
            return
        try:
            self._run(instruction, registers)
        except Exception as error:      # ctypes would print and discard it
            self._error = self._error or error

    def _run(self, instruction: Instruction, registers: Any) -> None:
        name, (c, a, b) = instruction.name, instruction.tiles
        if name.startswith("tdp"):
            self._multiply(name, c, a, b)
        elif name == "tilezero":
            self._memory[self._configured(c)] = 0
        elif name == "tilerelease":
            self._configure(bytes(64))
        else:
            address = registers[_GREG_OF[instruction.base]] if instruction.base is not None else \
                registers[_RIP] if instruction.relative else 0
            address += instruction.displacement
            if name == "ldtilecfg":
                self._configure(ctypes.string_at(address, 64))
            else:
                index = instruction.index
                stride = 0 if index is None else registers[_GREG_OF[index]] * instruction.scale
                self._move(self._configured(c), address, stride, store=name == "tilestored")

    # ---- instructions
    def _configure(self, memory: bytes) -> None:
        palette, start = memory[:2]
        words, rows = np.frombuffer(memory[16:48], np.uint16).tolist(), list(memory[48:64])
        if palette > 1 or start or any(memory[2:16]) or any(words[TILES:]) or any(rows[TILES:]) or palette and any(
                row > ROWS or size > ROW_BYTES or (row == 0) != (size == 0)
                for row, size in zip(rows, words, strict=True)):
            raise TileError(f"#GP: configuration {memory.hex()}")
        self._rows, self._row_bytes = rows[:TILES], words[:TILES]
        self._memory[:] = 0

    def _configured(self, tile: int) -> int:
        if not self._rows[tile]:
            raise TileError(f"#UD: tile {tile} is not configured")
        return tile

    def _move(self, tile: int, address: int, stride: int, store: bool) -> None:
        own, size = self._memory.ctypes.data + tile * _TILE_BYTES, self._row_bytes[tile]
        if not store:
            self._memory[tile] = 0
        for row in range(self._rows[tile]):
            here, there = own + row * ROW_BYTES, address + row * stride
            ctypes.memmove(there if store else here, here if store else there, size)

    def _multiply(self, name: str, c: int, a: int, b: int) -> None:
        for tile in (c, a, b):
            self._configured(tile)
        rows, sizes = self._rows, self._row_bytes
        if len({a, b, c}) < 3 or any(sizes[tile] % 4 for tile in (a, b, c)) or \
                (rows[c], sizes[c], sizes[a]) != (rows[a], sizes[b], 4 * rows[b]):
            raise TileError(f"#UD: {name} of tiles {c, a, b}: {rows}, {sizes}")
        left, right = self._memory[a], self._memory[b]
        if name in _WIDEN:
            sums, widen, inside = self._memory[c].view(np.float32), _WIDEN[name], np.s_[:rows[c], :sizes[c] // 4]
            sums[inside] = float_products(sums, widen(left), widen(right), rows[b])[inside]
            return
        x = left.view(_SIGN[name[4]]).astype(np.float32)        # 64 products of bytes sum up exactly in float32
        quads = right.view(_SIGN[name[5]]).reshape(ROWS, _LANES, 4).transpose(0, 2, 1).reshape(ROW_BYTES, _LANES)
        words = self._memory[c].view(np.int32)
        words += (x @ quads.astype(np.float32)).astype(np.int32)        # it wraps


_SIGN = {"u": np.uint8, "s": np.int8}


def _flushed(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Replace denormals by zeros of their sign."""
    return np.where(np.abs(x) < np.float32(2.0 ** -126), np.copysign(np.float32(0), x), x)


def _widened_bfloat(part: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _flushed((part.view(np.uint16).astype(np.uint32) << 16).view(np.float32))


def _widened_half(part: NDArray[np.uint8]) -> NDArray[np.float32]:
    return part.view(np.float16).astype(np.float32)


_WIDEN: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {"tdpbf16ps": _widened_bfloat,
                                                                        "tdpfp16ps": _widened_half}


def float_products(c: NDArray[np.float32], a: NDArray[np.float32], b: NDArray[np.float32],
                   depth: int) -> NDArray[np.float32]:
    """Return c + a b as TDPBF16PS and TDPFP16PS round it.

    The even and the odd elements of K are summed separately, each from zero by fused multiply-adds; then both sums are
    added, and the result to c. Denormal float32 values are read and written as zeros.

    Parameters
    ----------
    c : float32 [16, 16]
    a : float32 [16, 32]
    b : float32 [16, 32], row k holds elements 2 k and 2 k + 1 of K for each column
    depth : rows of b that count
    """
    x = a.reshape(ROWS, -1, 2).astype(np.float64).transpose(1, 2, 0)[:depth, :, :, None]        # [k, e, m, 1]
    w = b.reshape(ROWS, -1, 2).astype(np.float64).transpose(0, 2, 1)[:depth, :, None, :]        # [k, e, 1, n]
    sums = np.zeros((2, ROWS, _LANES), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for products in x * w:      # exact in float64; rounding the sum there first does not change the result
            sums = _flushed((sums + products).astype(np.float32))
        return _flushed(_flushed(c) + _flushed(sums[0] + sums[1]))
