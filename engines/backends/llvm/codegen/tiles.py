"""Matrix units as data, and the tile instructions of AMX: how to emit them, and their meaning in plain LLVM IR.

    tdpbusd    c[m, n] += sum over k, e in 0..3 of u8 a[m, 4 k + e] * s8 b[k, 4 n + e]      int32, exact, wraps
               tdpbssd, tdpbsud, tdpbuud: other signs of a and b
    tdpbf16ps  c[m, n] += (sum over k of a[m, 2 k] * b[k, 2 n]) + (sum over k of a[m, 2 k + 1] * b[k, 2 n + 1])
                          bfloat16 operands, float32 sums rounded to even at each step, denormals read as zero
    tdpfp16ps  c[m, n] += the same sums of float16 operands, whose denormals count; float32 denormals are zero

A product of two halves is exact in float32. Kernels for vectors also sum halves in float32, but in one sum in the order
of K. So tdpfp16ps differs from them in the last bits of float32 sums, which are then rounded to 11 bits.

Kernels name tile registers by number. LLVM neither allocates, moves nor spills them, and it keeps tile instructions in
program order. LDTILECFG sets the shapes of all registers and clears them.

Reference: Intel SDM (LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TILERELEASE, TDPBUSD, TDPBF16PS, TDPFP16PS).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from infer_server.engines.codegen.ir_builder import Function, Module, Number, Value
from infer_server.engines.codegen.types import FLOAT, I8, I16, I32, I64, PTR, vector

Shapes = Mapping[int, tuple[int, int]]      # register -> (rows, bytes of a row)


@dataclass(frozen=True)
class MatrixUnit:
    """Matrix unit: registers that hold matrices, and instructions that add the product of two of them to a third.

    A row of the right operand holds `group` neighbouring bytes of K for each column. Cycles are those of a Xeon of
    model 207 (benchmarks/measure/tiles.py measures them; docs/benchmarks/amx.md).
    """
    registers: int
    rows: int
    row_bytes: int
    group: int
    products: tuple[tuple[str, str], ...]       # (precision, instruction)
    product_cycles: float                       # product of all rows
    least_product_cycles: float                 # product of few rows
    load_cycles: float                          # load of a register from L1
    store_cycles: float
    configure_cycles: float

    def product(self, precision: str) -> str:
        """Return the instruction for a precision, or "" if there is none."""
        return dict(self.products).get(precision, "")

    def macs(self, size: int) -> int:
        """Return the multiply-accumulates of a product of full registers whose elements have `size` bytes."""
        return self.rows * (self.row_bytes // 4) * (self.row_bytes // size)

    def cycles(self, rows: int) -> float:
        """Return the cycles of a product whose left operand has so many rows."""
        return max(self.product_cycles * rows / self.rows, self.least_product_cycles)


AMX = MatrixUnit(registers=8, rows=16, row_bytes=64, group=4, products=(("int8", "tdpbusd"), ("bf16", "tdpbf16ps")),
                 product_cycles=13.9, least_product_cycles=8.7, load_cycles=10, store_cycles=16.5, configure_cycles=170)
AMX_FP16 = replace(AMX, products=(*AMX.products, ("fp16", "tdpfp16ps")))      # cycles not measured


def product_of_bytes(left_signed: bool, right_signed: bool) -> str:
    """Return the instruction that multiplies bytes of these signs."""
    return f"tdpb{'us'[left_signed]}{'us'[right_signed]}d"


def configuration(unit: MatrixUnit, shapes: Shapes) -> bytes:
    """Return the 64 bytes that LDTILECFG reads.

    Byte 0 is the palette, 1. From byte 16 on are the row bytes of the registers as 16-bit words, from 48 on their rows.
    """
    memory = bytearray(64)
    memory[0] = 1
    for register, (rows, row_bytes) in shapes.items():
        assert 0 <= register < unit.registers and 1 <= rows <= unit.rows and 1 <= row_bytes <= unit.row_bytes, shapes
        memory[16 + 2 * register], memory[48 + register] = row_bytes, rows
    return bytes(memory)


@dataclass(frozen=True)
class Tiles:
    """Emitter of tile instructions into a function."""
    f: Function
    unit: MatrixUnit = AMX

    def configuration(self, shapes: Shapes) -> Value:
        """Return the address of a module constant: the configuration that gives the registers these shapes."""
        data = configuration(self.unit, shapes)
        name = f"@tiles.{data[16:32:2].hex()}.{data[48:56].hex()}"
        text = "".join(f"\\{byte:02X}" for byte in data)
        self.f.module.declarations.add(f'{name} = internal constant [64 x i8] c"{text}", align 64')
        return Value(self.f, PTR, name)

    def configure(self, shapes: Shapes) -> None:
        """Set the shapes of the registers."""
        self.f.run("llvm.x86.ldtilecfg", self.configuration(shapes))

    def release(self) -> None:
        """Release the registers, so that a context switch does not save them."""
        self.f.run("llvm.x86.tilerelease")

    def zero(self, register: int) -> None:
        self.f.run("llvm.x86.tilezero", self._number(register))

    def load(self, register: int, address: Value, pitch: Number | Value) -> None:
        """Load row r from address + r * pitch."""
        step = pitch if isinstance(pitch, Value) else self.f.constant(pitch, I64)
        self.f.run("llvm.x86.tileloadd64", self._number(register), address, step)

    def store(self, register: int, address: Value, pitch: Number) -> None:
        """Store row r to address + r * pitch."""
        self.f.run("llvm.x86.tilestored64", self._number(register), address, self.f.constant(pitch, I64))

    def multiply(self, instruction: str, c: int, a: int, b: int) -> None:
        """Add the product of registers a and b to register c."""
        self.f.run(f"llvm.x86.{instruction}", *map(self._number, (c, a, b)))

    def _number(self, register: int) -> Value:
        return self.f.constant(register, I8)


# ---- emulation of the instructions on machines without tile registers
_LANES = AMX.row_bytes // 4
_TILE_BYTES = AMX.rows * AMX.row_bytes
STATE_BYTES = AMX.row_bytes + AMX.registers * _TILE_BYTES       # a configuration, then the registers


@dataclass(frozen=True)
class _State:
    """Tile registers as memory at a fixed address."""
    f: Function
    address: int

    def at(self, offset: int) -> Value:
        return Value(self.f, PTR, f"inttoptr (i64 {self.address + offset} to ptr)")

    def tile(self, number: Value) -> Value:
        return self.at(AMX.row_bytes) + self.f.cast("zext", number, I64, "tile") * _TILE_BYTES

    def rows(self, number: Value) -> Value:
        at = self.at(48) + self.f.cast("zext", number, I64, "tile")
        return self.f.cast("zext", self.f.load(I8, at, hint="rows"), I64, "rows")

    def row_bytes(self, number: Value) -> Value:
        at = self.at(16) + self.f.cast("zext", number, I64, "tile") * 2
        return self.f.cast("zext", self.f.load(I16, at, hint="bytes"), I64, "bytes")

    def clear(self, address: Value, size: int) -> None:
        for first in range(0, size, AMX.row_bytes):
            self.f.store(self.f.constant(0, vector(_LANES, I32)), address + first)

    def copy(self, number: Value, source: tuple[Value, Value | int], target: tuple[Value, Value | int]) -> None:
        """Copy the configured bytes of a tile from (address, pitch) to (address, pitch)."""
        zero = self.f.constant(0, I64)
        for row in self.f.range("row", zero, self.rows(number)):
            read, written = (address + row * pitch for address, pitch in (source, target))
            for column in self.f.range("byte", zero, self.row_bytes(number)):
                self.f.store(self.f.load(I8, read + column), written + column)

    def products(self, c: Value, a: Value, b: Value) -> Iterable[tuple[Value, Value, Value]]:
        """Yield (row of sums, four bytes of a, row of b) for each step of a product."""
        zero, depth = self.f.constant(0, I64), self.rows(b)
        for m in self.f.range("row", zero, self.rows(c)):
            sums, x = self.tile(c) + m * AMX.row_bytes, self.tile(a) + m * AMX.row_bytes
            for k in self.f.range("k", zero, depth):
                yield sums, x + k * 4, self.tile(b) + k * AMX.row_bytes


def _ldtilecfg(s: _State, memory: Value) -> None:
    s.f.store(s.f.load(vector(_LANES, I32), memory), s.at(0))
    s.clear(s.at(AMX.row_bytes), STATE_BYTES - AMX.row_bytes)


def _tilerelease(s: _State) -> None:
    s.clear(s.at(0), STATE_BYTES)


def _tilezero(s: _State, tile: Value) -> None:
    s.clear(s.tile(tile), _TILE_BYTES)


def _tileload(s: _State, tile: Value, memory: Value, pitch: Value) -> None:
    _tilezero(s, tile)
    s.copy(tile, (memory, pitch), (s.tile(tile), AMX.row_bytes))


def _tilestore(s: _State, tile: Value, memory: Value, pitch: Value) -> None:
    s.copy(tile, (s.tile(tile), AMX.row_bytes), (memory, pitch))


def _product_of_bytes(s: _State, c: Value, a: Value, b: Value, left_cast: str, right_cast: str) -> None:
    f, ints = s.f, vector(_LANES, I32)
    for sums, x, w in s.products(c, a, b):
        total, weights = f.load(ints, sums), f.load(vector(4 * _LANES, I8), w)
        for e in range(4):
            left = f.splat(f.cast(left_cast, f.load(I8, x + e), I32, "x"), _LANES)
            right = f.cast(right_cast, f.shuffle(weights, None, range(e, 4 * _LANES, 4), "w"), ints, "w")
            total = total + left * right
        f.store(total, sums)


def _product_of_floats(s: _State, c: Value, a: Value, b: Value, widened: Callable[[Value], Value]) -> None:
    """Add the sums of the even and of the odd elements of K to c; `widened` converts 16-bit elements to float32."""
    f, floats, zero = s.f, vector(_LANES, FLOAT), s.f.constant(0, I64)
    for m in f.range("row", zero, s.rows(c)):
        acc = {e: f.constant(0, floats) for e in (0, 1)}
        for k in f.range("k", zero, s.rows(b), acc=acc):
            pairs = f.load(vector(2 * _LANES, I16), s.tile(b) + k * AMX.row_bytes)
            for e in (0, 1):
                left = f.splat(f.load(I16, s.tile(a) + m * AMX.row_bytes + k * 4 + 2 * e), _LANES)
                x, w = widened(left), widened(f.shuffle(pairs, None, range(e, 2 * _LANES, 2), "w"))
                acc[e] = _flushed(f, acc[e] + x * w)        # the product is exact, so the sum rounds once
        sums = s.tile(c) + m * AMX.row_bytes
        f.store(_flushed(f, _flushed(f, f.load(floats, sums)) + _flushed(f, acc[0] + acc[1])), sums)


def _tdpbf16ps(s: _State, c: Value, a: Value, b: Value) -> None:
    def widened(bits: Value) -> Value:
        wide = s.f.cast("zext", bits, vector(_LANES, I32), "wide").binary("shl", 16)
        return _flushed(s.f, s.f.cast("bitcast", wide, vector(_LANES, FLOAT), "x"))
    _product_of_floats(s, c, a, b, widened)


def _tdpfp16ps(s: _State, c: Value, a: Value, b: Value) -> None:
    def widened(bits: Value) -> Value:
        halves = s.f.cast("bitcast", bits, vector(_LANES, "half"), "halves")
        return s.f.cast("fpext", halves, vector(_LANES, FLOAT), "x")
    _product_of_floats(s, c, a, b, widened)


def _flushed(f: Function, x: Value) -> Value:
    """Replace denormals of x by zeros of their sign."""
    bits = f.cast("bitcast", x, vector(_LANES, I32), "bits")
    normal = (bits & 0x7F800000).compare("ne", 0)
    return f.cast("bitcast", f.select(normal, bits, bits & -(1 << 31)), vector(_LANES, FLOAT), "float")


_CASTS = ("zext", "sext")       # by whether a byte is signed
_MOVE, _PRODUCT = {"tile": I8, "memory": PTR, "pitch": I64}, {"c": I8, "a": I8, "b": I8}
_MEANINGS: Mapping[str, tuple[Mapping[str, str], Callable[..., None]]] = {
    "ldtilecfg": ({"memory": PTR}, _ldtilecfg), "tilerelease": ({}, _tilerelease),
    "tilezero": ({"tile": I8}, _tilezero), "tileloadd64": (_MOVE, _tileload), "tilestored64": (_MOVE, _tilestore),
    **{product_of_bytes(left, right): (_PRODUCT, partial(_product_of_bytes, left_cast=_CASTS[left],
                                                         right_cast=_CASTS[right]))
       for left in (False, True) for right in (False, True)},
    "tdpbf16ps": (_PRODUCT, _tdpbf16ps),
    "tdpfp16ps": (_PRODUCT, _tdpfp16ps)}


def meanings(state: int) -> dict[str, str]:
    """Define every tile instruction in plain LLVM IR, on STATE_BYTES of this process's memory at address `state`.

    Returns
    -------
    dict of str to str
        Intrinsic -> its definition, in the form of `Module(emulation=...)`. The code runs in this process only, on one
        thread at a time.
    """
    definitions = []
    for name, (types, meaning) in _MEANINGS.items():
        f = Module().function(f"emulated.x86.{name}", False, **types)
        meaning(_State(f, state), *f.parameters.values())
        arguments = ", ".join(map(str, f.parameters.values()))
        body = "\n".join([f"define internal void @{f.name}({arguments}) nounwind noinline {{", "entry:", *f.lines,
                          "  ret void", "}"])
        definitions.append((f"llvm.x86.{name}", body))
    return dict(definitions)
