"""Plans made by hand: a few kernels over int32 tensors [rows, columns] per item, and what they must compute.

    mix(a, b)[r, c] = 3 * a[rows - 1 - r, columns - 1 - c] + b[r, c] + 1        modulo 2**32

It reads one input back to front, so that a piece that runs before all of its input is there gives a wrong result.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from infer_server.engines.backends.llvm.codegen.compile import compile_object
from infer_server.engines.backends.llvm.codegen.executor import scheduler_object
from infer_server.engines.backends.llvm.codegen.isa import best_isa
from infer_server.engines.backends.llvm.kernels.kernel import begin_kernel
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.codegen.types import I32
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import (
    Buffer,
    Fill,
    Footprint,
    IoTensor,
    MachinePart,
    Operand,
    Plan,
    Step,
    TensorView,
)
from tests.engines.backends.llvm.jit import host_features

ISA = best_isa(host_features())


@cache
def mix_object(name: str, rows: int, columns: int, repeats: int = 1) -> bytes:
    """Compile mix. repeats: number of times that each element is computed, to take longer."""
    module = Module()
    f, (a, b, y), (row_begin, row_end, column_begin, column_end) = begin_kernel(module, name, 3)
    for row in f.range("row", row_begin, row_end):
        item, inside = row.divided(rows), row.remainder(rows)
        mirrored_row = item * rows + (f.constant(rows - 1, inside.type) - inside)
        for column in f.range("column", column_begin, column_end):
            mirrored = mirrored_row * columns + (f.constant(columns - 1, column.type) - column)
            here = (row * columns + column) * 4
            for _ in f.loop("repeat", repeats):
                value = f.load(I32, a + mirrored * 4, 4) * 3 + f.load(I32, b + here, 4) + 1
                f.store(value, y + here, 4)
    return compile_object(module.text(), ISA)


@cache
def add_one_object(name: str) -> bytes:
    """Compile y[r, c] = x[r, c] + constant for rows of 4 int32 with a halo of one column on each side."""
    module = Module()
    f, (x, constant, y), (row_begin, row_end, column_begin, column_end) = begin_kernel(module, name, 3)
    for row in f.range("row", row_begin, row_end):
        for column in f.range("column", column_begin, column_end):
            value = f.load(I32, x + (row * 4 + column) * 4, 4) + f.load(I32, constant, 4)
            f.store(value, y + (row * 6 + column) * 4, 4)
    return compile_object(module.text(), ISA)


def with_weights(plan: Plan, weights: Mapping[str, Array]) -> Plan:
    """Return the plan with these weights after its constants, for its fallbacks to read."""
    data, offsets = bytes(plan.machine.constants), {}
    for name, array in weights.items():
        data += bytes(-len(data) % 64)
        offsets[name] = len(data)
        data += array.tobytes()
    return replace(plan.with_machine(constants=data, weight_offsets=offsets), weights=weights)


@cache
def executor() -> bytes:
    return scheduler_object(ISA)


def mixed(a: Array, b: Array) -> Array:
    """Compute the result of mix on [batch, rows, columns]."""
    return (a[:, ::-1, ::-1].astype(np.uint32) * 3 + b.astype(np.uint32) + 1).astype(np.int32)


def mix_plan(reads: Sequence[tuple[int, int]], outputs: Sequence[int], rows: int = 6, columns: int = 10,
             max_batch: int = 4, steps: Sequence[tuple[int, int]] = (), constant_bytes: Sequence[int] = ()) -> Plan:
    """Tensor 0 is the input; tensor i + 1 = mix of the two tensors reads[i]. steps: (row_step, column_step) of each.

    The outputs are named t<tensor>.
    """
    item = rows * columns * 4
    last = {tensor: i for i, pair in enumerate(reads) for tensor in pair} | dict.fromkeys(outputs, len(reads))
    buffers = [Buffer(f"t{i}", item * max_batch, i - 1, last.get(i, max(i - 1, 0))) for i in range(len(reads) + 1)]

    def view(tensor: int) -> TensorView:
        return TensorView(f"t{tensor}", "int32", (rows, columns), tensor, 0, (columns * 4, 4), item)

    def step(i: int) -> Step:
        row_step, column_step = steps[i] if steps else (1, 1)
        (a, b), line = reads[i], columns * 4
        touched = (Footprint(a, 0, item, 1, 0, item, rows),
                   *(Footprint(t, 0, line, 1, line, item, rows) for t in (b, i + 1)))
        return Step(symbol="mix", operands=tuple(Operand(t) for t in (*reads[i], i + 1)), rows_per_item=rows,
                    row_step=row_step, columns=columns, column_step=column_step, name=f"mix_{i}",
                    depends=tuple({t - 1 for t in reads[i] if t}), reads=touched[:2], writes=touched[2:],
                    constant_bytes=constant_bytes[i] if steps else 0)

    shape = ("batch", rows, columns)
    machine = MachinePart(
        "llvm", ISA.name, (view(0),), tuple(map(view, outputs)), tuple(buffers),
        tuple(step(i) for i in range(len(reads))), cpu={"features": sorted(ISA.requires), "model": "any"},
        code=(mix_object("mix", rows, columns), executor()))
    return Plan("mixer", "fp32", max_batch, (IoTensor("x", "int32", shape),),
                tuple(IoTensor(f"t{t}", "int32", shape) for t in outputs), machine,
                graph={"nodes": ["mix"]}, weights={"w": np.arange(6, dtype=np.float32).reshape(2, 3)},
                metadata={"compiler": "by hand"})


def mix_reference(reads: Sequence[tuple[int, int]], outputs: Sequence[int], x: Array) -> dict[str, Array]:
    tensors = [x]
    for a, b in reads:
        tensors.append(mixed(tensors[a], tensors[b]))
    return {f"t{i}": tensors[i] for i in outputs}


def halo_plan(max_batch: int = 3) -> Plan:
    """Return x [2, 4] -> y = x + 5 in a tensor with a halo of -7 on both sides of each row.

    The output includes the halo.
    """
    x = TensorView("x", "int32", (2, 4), 0, 0, (16, 4), 32)
    y = TensorView("y", "int32", (2, 6), 1, 0, (24, 4), 48)
    step = Step(symbol="add", operands=(Operand(0), Operand(None, 64), Operand(1, 4)), rows_per_item=2, columns=4,
                name="add")
    machine = MachinePart(
        "llvm", ISA.name, (x,), (y,), (Buffer("x", 32 * max_batch, -1, 0), Buffer("y", 48 * max_batch, 0, 1)), (step,),
        (Fill(y, -7, ((0, 0), (1, 1))),), {"features": sorted(ISA.requires)}, (add_one_object("add"), executor()),
        bytes(64) + np.int32(5).tobytes())
    return Plan("halo", "fp32", max_batch, (IoTensor("x", "int32", ("batch", 2, 4)),),
                (IoTensor("y", "int32", ("batch", 2, 6)),), machine)
