"""Code of recurrent layers on a matrix unit: products of a block of items, then the updates of each item.

    for t in time: for stage of the cell: for panel of units:
      for vector of units, gate:                                        one function
        for block of K: c += states[16 items, block] * weights[block, 16 units]
        c -> sums in scratch memory
      for items: the updates of the stage                               a micro-kernel, as for vectors
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.tiles import Shapes, Tiles, product_of_bytes
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT
from infer_server.engines.backends.llvm.kernels.recurrent.matrix_tiling import MatrixPanels, MatrixTiling
from infer_server.engines.backends.llvm.kernels.recurrent.microkernel import STRANDS, MicroKernels
from infer_server.engines.backends.llvm.kernels.recurrent.order import tiles_of_items
from infer_server.engines.backends.llvm.kernels.recurrent.rounding import load_shift
from infer_server.engines.backends.llvm.kernels.recurrent.steps import Pointers, RecurrenceEmitter
from infer_server.engines.backends.llvm.kernels.recurrent.tiling import BLOCK
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import I8, PTR, vector
from infer_server.engines.lowering.problems.recurrence import Stage


class MatrixMicroKernels(MicroKernels):
    """Functions for the products of panels by a matrix unit, and micro-kernels that read their sums.

    Sums are [vector][gate][order][item][lane] in int32.
    """
    kernel: MatrixTiling
    last_parameter: ClassVar[str] = "sums"

    @property
    def sum_bytes(self) -> int:
        """Return the bytes of the sums of one order, of all items of a block and one vector of units."""
        unit = self.kernel.unit(self.isa)
        return unit.rows * unit.row_bytes

    def shapes(self, items: int) -> Shapes:
        """Return the shapes of the registers for blocks of up to so many items."""
        kernel, unit = self.kernel, self.kernel.unit(self.isa)
        left, _ = kernel.planes
        sums = self._together * kernel.orders
        return {**{n: (items, unit.row_bytes) for n in range(sums)},
                **{n: (items, kernel.depth) for n in range(sums, sums + left)},
                **{n: (kernel.rows, unit.row_bytes) for n in range(sums + left, unit.registers)}}

    @property
    def _together(self) -> int:
        """Return the number of gates whose sums are in registers at the same time."""
        kernel = self.kernel
        most = max(len(stage.gates) for cell in self.problem.cells for stage in cell.stages)
        return min(most, (kernel.unit(self.isa).registers - sum(kernel.planes)) // kernel.orders)

    def products(self, stage: Stage, vectors: int) -> str:
        """Return the name of the function that multiplies a panel's weights and stores the sums, emitted once."""
        gates = len(stage.gates)
        name = f"{self.name}_products_{gates}x{vectors}"
        if name in self.module.functions:
            return name
        kernel = self.kernel
        f = self.module.function(name, internal=True, state=PTR, w=PTR, sums=PTR)
        work = _Products(self, Tiles(f, kernel.unit(self.isa)), self._together * kernel.orders, gates)
        at = {"w": f.parameters["w"], "sums": f.parameters["sums"]}
        if kernel.blocks == 1:
            work.load_states(f.parameters["state"])
        for _ in f.loop("vector", vectors, at=at):
            for first in range(0, gates, self._together):
                some = range(first, min(first + self._together, gates))
                work.multiply(some, f.parameters["state"], at["w"])
                work.store(some, at["sums"])
            at["w"] += kernel.matrix_vector(self.isa, stage)
            at["sums"] += gates * kernel.orders * self.sum_bytes
        return name

    def _products(self, f: Function, stage: Stage, size: int, vectors: int) -> dict[tuple[int, int, int], Value]:
        """Load the sums of a stage."""
        kernel, isa, gates = self.kernel, self.isa, len(stage.gates)
        source = f.parameters["old"] if stage.source == 0 else f.parameters["rest"] + (stage.source - 1) * self.area
        head, result = kernel.head(isa), {}
        shifts = [load_shift(isa, source + (item * self.pitch + self.numbers))
                  for item in range(size * self.problem.rounds)]
        for v in range(vectors):
            for g in range(gates):
                address = f.parameters["w"] + (v * kernel.stage_vector(isa, stage) + g * isa.bytes)
                start = f.load(isa.ints, address, isa.bytes, "start") if head else None
                for item in range(size):
                    first = (v * gates + g) * kernel.orders
                    total, *higher = (f.load(isa.ints, f.parameters["sums"] + ((first + order) * self.sum_bytes
                                                                               + item * isa.bytes), isa.bytes, "sum")
                                      for order in range(kernel.orders))
                    for order, some in enumerate(higher, 1):
                        total = total + some.binary("shl", 8 * order)
                    if start is not None:
                        total = total + (start * shifts[item] if shifts else start)
                    result[item, g, v] = isa.to_float(total)
        return result

    def store_integers(self, integers: Value, state: Value, unit: Value) -> None:
        """Store each byte of the integers in its plane."""
        isa, f = self.isa, state.f
        for plane in range(self.kernel.planes[0]):
            shifted = integers.binary("lshr", 8 * plane) if plane else integers
            narrow = f.cast("trunc", shifted, vector(isa.lanes, I8), "plane")
            f.store(narrow, state + (unit + plane * self.kernel.state_elements(isa)), isa.lanes)


class _Products:
    """Emitter of the products of some gates into a function.

    Registers: sums [gate][order], then the planes of states, then those of weights, which take turns.
    """

    def __init__(self, micro: MatrixMicroKernels, tiles: Tiles, states: int, gates: int) -> None:
        """Make the emitter; states: the first register of states, gates: how many the stage has."""
        self.micro, self.kernel, self.tiles, self.states = micro, micro.kernel, tiles, states
        self.left, self.right = self.kernel.planes
        self.weights = states + self.left
        self.line = tiles.unit.row_bytes
        register = self.kernel.rows * self.line
        # Bytes from row to row of a register of weights, from plane to plane, block to block, and gate to gate.
        if self.kernel.in_planes:
            self.row, self.plane, self.block = self.line, register, self.right * register
            self.gate, self.head = self.kernel.blocks * self.block, 0
        else:
            self.row, self.plane, self.block = gates * self.line, 0, gates * register
            self.gate, self.head = self.line, self.kernel.head(micro.isa) * self.row

    def load_states(self, state: Value) -> None:
        """Load a block of K of the states of all items."""
        micro = self.micro
        for plane in range(self.left):
            at = state + (micro.integers + plane * self.kernel.state_elements(micro.isa))
            self.tiles.load(self.states + plane, at, micro.pitch)

    def multiply(self, gates: Sequence[int], state: Value, w: Value) -> None:
        """Sum the products of some gates over all blocks of K."""
        kernel = self.kernel
        for number in range(len(gates) * kernel.orders):
            self.tiles.zero(number)
        at = {"state": state, "w": w + (self.head + gates[0] * self.gate)}
        for _ in self.tiles.f.loop("k", kernel.blocks, at=at):
            if kernel.blocks > 1:
                self.load_states(at["state"])
            self._multiply_block(len(gates), at["w"])
            at["state"] += kernel.depth
            at["w"] += self.block

    def _multiply_block(self, gates: int, w: Value) -> None:
        """Emit the products of one block of K."""
        orders = self.kernel.orders
        for turn in range(gates * self.right):
            gate, right = divmod(turn, self.right)
            register = self.weights + turn % (self.tiles.unit.registers - self.weights)
            self.tiles.load(register, w + (gate * self.gate + right * self.plane), self.row)
            for left in range(self.left):
                instruction = product_of_bytes(0 < left == self.left - 1, right == self.right - 1)
                self.tiles.multiply(instruction, gate * orders + left + right, self.states + left, register)

    def store(self, gates: Sequence[int], sums: Value) -> None:
        """Store the sums of some gates."""
        kernel, size = self.kernel, self.micro.sum_bytes
        for number in range(len(gates) * kernel.orders):
            self.tiles.store(number, sums + (gates[0] * kernel.orders + number) * size, self.line)


class MatrixUnitEmitter(RecurrenceEmitter):
    """Emitter of a kernel that multiplies blocks of few items by vectors, and others by a matrix unit."""
    kernel: MatrixTiling
    tactic: MatrixPanels

    def __init__(self, kernel: MatrixTiling, module: Module, name: str, isa: Isa, tactic: MatrixPanels) -> None:
        super().__init__(kernel, module, name, isa, tactic)
        self.block = kernel.block(isa)
        self.micro = MicroKernels(kernel, module, name, isa, tactic, self.block)
        self.matrix = MatrixMicroKernels(kernel, module, f"{name}_matrix", isa, tactic, self.block)

    def _allocate(self, f: Function) -> None:
        gates = max(len(stage.gates) for cell in self.problem.cells for stage in cell.stages)
        size = self.tactic.panel * gates * self.kernel.orders * self.matrix.sum_bytes
        self.sums = f.alloca(size, ALIGNMENT, "sums")

    def _direction(self, f: Function, d: int, start: Value, count: Value) -> None:
        tiles, by_vectors = Tiles(f, self.kernel.unit(self.isa)), self.micro
        with f.when(count.below(self.kernel.fewest_items)):
            super()._direction(f, d, start, count)
        self.micro = self.matrix
        with f.when(count.compare("uge", self.kernel.fewest_items)):
            tiles.configure(self.matrix.shapes(self.block))
            if self.block > BLOCK:
                with f.when(count.below(BLOCK + 1)):
                    tiles.configure(self.matrix.shapes(BLOCK))
            super()._direction(f, d, start, count)
            tiles.release()
        self.micro = by_vectors

    def _stage(self, f: Function, d: int, number: int, here: Pointers, count: Value) -> None:
        if self.micro is not self.matrix:
            super()._stage(f, d, number, here, count)
            return
        kernel, isa, cells = self.kernel, self.isa, self.problem.cells
        stage = cells[d].stages[number]
        source = here.old if stage.source == 0 else here.rest + (stage.source - 1) * self.matrix.area
        for start, width in self._tiles_of_units(f, here, self.tactic.panel * isa.lanes):
            weights, units = self._constants(d, number, start)
            vectors = -(-width // isa.lanes)
            packed = self._planes(d, number, start) if kernel.in_planes else weights
            f.run(self.matrix.products(stage, vectors), source, packed, self.sums)
            for item, size in tiles_of_items(f, max(STRANDS // vectors, 1), count):
                name = self.matrix.write(cells.index(cells[d]), number, size, width)
                f.run(name, *self._addresses(here, item, start), weights, units, start, self.sums + item * isa.bytes)

    def _planes(self, d: int, number: int, start: Value) -> Value:
        """Return the address of the planes of weights of units from `start` on."""
        kernel, isa, cells = self.kernel, self.isa, self.problem.cells
        vectors = -(-self.problem.hidden // isa.lanes)
        before = sum(vectors * kernel.stage_vector(isa, stage) for cell in cells for stage in cell.stages)
        earlier = [stage for cell in cells[:d] for stage in cell.stages] + list(cells[d].stages[:number])
        before += sum(vectors * kernel.matrix_vector(isa, stage) for stage in earlier)
        return self.weights + before + start.divided(isa.lanes) * kernel.matrix_vector(isa, cells[d].stages[number])
