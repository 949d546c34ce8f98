"""Emulated machine: threads that diverge and converge, registers and operands."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from scripts.testing.gpu.ptx.memory import Array, Memory, Shared
from scripts.testing.gpu.ptx.text import Fault, Instruction, Kernel

WARP = 32
LANES = 1 << 16         # threads that run together, at most
TOGETHER = {"bar": 0, "barrier": 0, "ldmatrix": WARP, "mma": WARP, "shfl": WARP, "wgmma": 4 * WARP}
# ^ number of threads that must arrive; 0: all of the block
BRANCHES = ("bra", "ret", "exit")
SPECIAL = {*BRANCHES, *TOGETHER}

TYPES = {f"{kind}{bits}": np.dtype(f"{name}{bits}") for kind, name in (("b", "uint"), ("u", "uint"), ("s", "int"))
         for bits in (8, 16, 32, 64)} | {"f16": np.dtype(np.float16), "f32": np.dtype(np.float32),
                                         "f64": np.dtype(np.float64), "pred": np.dtype(bool)}

UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}

Action = Callable[["Run", Instruction], None]
ACTIONS: dict[str, tuple[Action, frozenset[str]]] = {}      # by opcode: its implementation and accepted modifiers


def action(*names: str, modifiers: str = "") -> Callable[[Action], Action]:
    """Register the action of these instructions. Modifiers that are neither types nor listed are refused."""
    def register(function: Action) -> Action:
        ACTIONS.update(dict.fromkeys(names, (function, frozenset(modifiers.split()))))
        return function
    return register


@dataclass
class Machine:
    """Machine that runs kernels over a memory. `count` is the number of threads per kind of instruction."""
    memory: Memory
    count: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name in ("scalar", "movement", "tensor"):      # importing these modules fills ACTIONS
            import_module(f"scripts.testing.gpu.ptx.{name}")

    def launch(self, kernel: Kernel, grid: tuple[int, ...], threads: int, arguments: Sequence[int],
               shared_bytes: int = 0) -> None:
        if kernel.threads and threads > kernel.threads:
            raise Fault(f"{kernel.name}: {threads} threads a block, compiled for {kernel.threads}")
        grid = (*grid, 1, 1)[:3]
        blocks, together = int(np.prod(grid)), max(LANES // threads, 1)
        self.memory.begin_launch()
        for first in range(0, blocks, together):
            ids = np.arange(first, min(first + together, blocks))
            Run(self, kernel, grid, ids, threads, arguments, shared_bytes).run()


class Run:
    """Execution of some blocks of a launch in lockstep."""

    def __init__(self, machine: Machine, kernel: Kernel, grid: tuple[int, ...], ids: Array, threads: int,
                 arguments: Sequence[int], shared_bytes: int) -> None:
        self.machine, self.kernel, self.memory, self.threads = machine, kernel, machine.memory, threads
        self.lanes = len(ids) * threads
        self.block = np.repeat(np.arange(len(ids)), threads)
        self.thread = np.tile(np.arange(threads), len(ids))
        self.number = np.repeat(ids, threads) * threads + self.thread       # number of each thread in the grid
        self.shared = Shared(len(ids), shared_bytes)
        axes = zip(("x", "y", "z"), (ids % grid[0], ids // grid[0] % grid[1], ids // grid[0] // grid[1]), strict=True)
        self.special = {"%tid.x": self.thread.astype(np.uint32)} | {
            f"%ctaid.{axis}": np.repeat(values, threads).astype(np.uint32) for axis, values in axes}
        self.arguments = dict(zip(kernel.parameters, arguments, strict=True))
        self.registers: dict[str, Array] = {}
        self.widths: dict[str, np.dtype[Any]] = {}
        self.copies: list[tuple[Array, Array, Array, Array]] = []       # threads, their group, places, bytes
        self.groups = np.zeros(self.lanes, np.int64)        # number of copy groups that a thread has committed
        self.sel: Array | None = None           # threads that run now; None: all of them

    def run(self) -> None:
        """Run all threads, those with the lowest instruction address first, so that they converge again.

        Instructions of a whole warp or block wait until all of its threads are there.
        """
        pending: dict[int, Array] = {0: np.arange(self.lanes)}
        waiting: dict[int, Array] = {}
        while pending:
            at = min(pending)
            who = pending.pop(at)
            if (further := self._straight(at, min(pending, default=len(self.kernel.code)), who)) > at:
                if further < len(self.kernel.code):
                    pending[further] = _joined(who, pending.get(further))
                continue
            together = TOGETHER.get(self.kernel.code[at].op[0])
            if together is not None:
                who = _joined(who, waiting.pop(at, None))
                if not self._complete(who, together or self.threads):
                    waiting[at] = who
                    continue
            for position, threads in self._after(at, who):
                if len(threads) and position < len(self.kernel.code):
                    pending[position] = _joined(threads, pending.get(position))
        if waiting:
            texts = ", ".join(f"'{self.kernel.code[at].text}'" for at in waiting)
            raise Fault(f"{self.kernel.name}: not all threads reach {texts}")

    def _straight(self, at: int, end: int, who: Array) -> int:
        """Run instructions up to one that branches or waits for others, or to the end. Return its position."""
        selected = None if len(who) == self.lanes else who
        while at < end and (instruction := self.kernel.code[at]).op[0] not in SPECIAL:
            self.sel = selected
            self._step(instruction, who)
            at += 1
        return at

    def _after(self, at: int, who: Array) -> list[tuple[int, Array]]:
        """Run an instruction and return the next position of each of its threads."""
        self.sel = None if len(who) == self.lanes else who
        instruction = self.kernel.code[at]
        word = instruction.op[0]
        if word not in BRANCHES:
            self._step(instruction, who)
            return [(at + 1, who)]
        chosen = self._guard(instruction) if instruction.guard else np.ones(len(who), bool)
        others = (at + 1, who[~chosen])
        return [others, (self.kernel.labels[instruction.one(0)], who[chosen])] if word == "bra" else [others]

    def _complete(self, who: Array, together: int) -> bool:
        """Return True if these are whole warps, or whole blocks."""
        if len(who) == self.lanes:
            return True
        whole = np.bincount(who // together, minlength=self.lanes // together)
        return bool(np.all((whole == 0) | (whole == together)))

    def _step(self, instruction: Instruction, who: Array) -> None:
        word = instruction.op[0]
        if word not in ACTIONS:
            raise Fault(f"'{instruction.text}' is not known here")
        function, modifiers = ACTIONS[word]
        if unknown := _unknown(instruction.op[1:], modifiers):
            raise Fault(f"'{instruction.text}': '.{unknown}' is not known here")
        if instruction.guard:
            if word in TOGETHER:
                raise Fault(f"'{instruction.text}': what takes whole warps has no guard here")
            self.sel = who[self._guard(instruction)]
            if not len(self.sel):
                return
        self.machine.count[f"{word}.{instruction.op[1]}" if word in ("ld", "st", "cp") else word] += self.size
        try:
            function(self, instruction)
        except Fault as fault:
            raise Fault(f"{self.kernel.name}: '{instruction.text}': {fault}") from None

    def _guard(self, instruction: Instruction) -> Array:
        values = self.pick(self.registers[instruction.guard.lstrip("!")])
        return ~values if instruction.guard[0] == "!" else values

    # ---- running threads
    def pick(self, values: Array) -> Array:
        return values if self.sel is None else values[self.sel]

    @property
    def size(self) -> int:
        return self.lanes if self.sel is None else len(self.sel)

    @property
    def who(self) -> tuple[Array, Array]:
        """Blocks and threads of the running lanes."""
        return self.pick(self.block), self.pick(self.thread)

    # ---- operands
    def width(self, register: str) -> np.dtype[Any]:
        """Return the type that a register was declared with."""
        dtype = self.widths.get(register)
        if dtype is None:
            dtype = self.widths[register] = TYPES[self.kernel.registers[register.rstrip("0123456789")]]
        return dtype

    def get(self, operand: str, type_: str) -> Array:
        """Return an operand of the running threads as that type."""
        dtype = TYPES[type_]
        if operand[0] != "%":
            values = np.empty(self.size, dtype)
            values.fill(_constant(operand, type_))
            return values
        values = self.registers.get(operand)
        if values is None:
            if operand not in self.special:
                raise Fault(f"{operand} is read before it is written")
            values = self.special[operand]
        if self.sel is not None:
            values = values[self.sel]
        if values.dtype is dtype:
            return values
        if values.dtype.itemsize == dtype.itemsize:
            return values.view(dtype)
        if values.dtype.itemsize < dtype.itemsize or dtype.kind == "f":
            raise Fault(f"{operand} has {8 * values.dtype.itemsize} bits, not {8 * dtype.itemsize}")
        return values.astype(UNSIGNED[dtype.itemsize]).view(dtype)

    def put(self, name: str, values: Array) -> None:
        if name == "_":
            return
        dtype = self.width(name)
        if values.dtype is not dtype:
            if values.dtype.itemsize == dtype.itemsize:
                values = values.view(dtype)
            else:       # a narrow value in a wide register: extended by its own sign
                assert values.dtype.itemsize < dtype.itemsize, name
                values = values.view(f"u{values.dtype.itemsize}") if values.dtype.kind == "f" else values
                values = values.astype(f"{'i' if values.dtype.kind == 'i' else 'u'}{dtype.itemsize}").view(dtype)
        if self.sel is None:
            self.registers[name] = np.ascontiguousarray(values)
        else:
            if name not in self.registers:
                self.registers[name] = np.zeros(self.lanes, dtype)
            self.registers[name][self.sel] = values

    def address(self, operand: str) -> Array:
        """Return the addresses of an operand [register + number]."""
        base, _, more = operand.strip("[]").partition("+")
        size = 8 if base == "shared" else self.width(base).itemsize
        return self.get(base, f"b{8 * size}").astype(np.int64) + (int(more) if more else 0)

    @staticmethod
    def warps(values: Array) -> Array:
        """Reshape values to [warps, 32]."""
        return values.reshape(-1, WARP)


@cache
def _unknown(words: tuple[str, ...], modifiers: frozenset[str]) -> str:
    """Return a word that is neither a type nor one of the modifiers, or ""."""
    return min(set(words) - TYPES.keys() - modifiers, default="")


@cache
def _constant(operand: str, type_: str) -> Any:
    """Return the number that an operand spells, as that type."""
    dtype = TYPES[type_]
    if operand == "shared":
        return dtype.type(0)
    if operand.startswith(("0f", "0d")):
        return np.array([int(operand[2:], 16)], "u4" if operand[1] == "f" else "u8").view(dtype)[0]
    if dtype.kind == "b":
        return dtype.type(int(operand) != 0)
    number = int(operand.rstrip("U"), 0) & ((1 << 8 * dtype.itemsize) - 1)
    return np.array([number], UNSIGNED[dtype.itemsize]).view(dtype)[0]


def _joined(threads: Array, more: Array | None) -> Array:
    return threads if more is None else np.sort(np.concatenate([threads, more]))
