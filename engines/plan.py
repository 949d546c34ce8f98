"""The plan: all that is decided about a model on one machine, and the file that holds it.

A plan is a list of steps over one arena. A step calls one kernel (or, where nothing is compiled, the reference):

    void kernel(ptr operands, i64 row_begin, i64 row_end, i64 column_begin, i64 column_end)

`operands` is an array of addresses, in the kernel's own order, made from `Operand`s when a context is created. The
work of a step is a grid: rows_per_item * batch rows by `columns`; any cut of it (rows at multiples of row_step,
columns at multiples of column_step) may run on any thread, in any order.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.ir import QParams


@dataclass(frozen=True)
class Operand:
    """An address: `offset` bytes into the arena of a context, or into the constants of the plan."""
    section: str                # "arena" or "constants"
    offset: int


@dataclass(frozen=True)
class TensorView:
    """Where a tensor lies in the arena. Element [n, i, j, ...] is at offset + n * item_stride + i * strides[0] + ..."""
    name: str
    dtype: str                  # numpy's name of the stored dtype
    shape: tuple[int, ...]      # of one item: without the batch axis if `batched`
    offset: int                 # bytes, for batch slot 0
    strides: tuple[int, ...]    # bytes, one for each axis of shape
    item_stride: int            # bytes from one item of the batch to the next
    batched: bool = True        # False: the tensor has no batch axis (shape is the whole of it)
    quant: QParams | None = None


@dataclass(frozen=True)
class Fill:
    """Bytes that a context sets once, when it is made, and that no step writes: the halo of a padded tensor.

    Every item of `view`'s batch slots is filled wholly with `value` (one element of its dtype).
    """
    view: TensorView
    value: float


@dataclass(frozen=True)
class Step:
    """One kernel call. The first group is what runs; the second is what inspect-engine shows."""
    symbol: str                             # of the kernel in the code section; "" runs `reference` in Python
    operands: tuple[Operand, ...]
    rows_per_item: int                      # 0: the step does not depend on the batch and has `rows` rows
    rows: int = 0
    row_step: int = 1
    columns: int = 1
    column_step: int = 1
    depends: tuple[int, ...] = ()           # earlier steps whose results it reads (or whose memory it takes over)
    reference: Mapping[str, Any] | None = None      # a node for engines.reference: {"node": ..., "inputs": [...], "outputs": [...]}

    name: str = ""
    fuses: tuple[str, ...] = ()             # ONNX node names
    precision: str = "fp32"
    tactic: str = ""
    time_us: float = 0.0                    # as timed at build, batch 1
    macs: int = 0                           # multiply-accumulates an item
    bytes: int = 0                          # read and written an item, constants included
    reason: str = ""                        # why it fell back, if it did


@dataclass(frozen=True)
class IoTensor:
    """An input or output as the ONNX model declares it; shape has names for symbolic extents."""
    name: str
    dtype: str
    shape: tuple[int | str, ...]
    view: TensorView


@dataclass(frozen=True)
class Plan:
    """Decided, frozen, and equal to its file."""
    name: str                               # of the model
    target: str                             # name of the instruction set, e.g. "avx512_vnni"
    cpu: Mapping[str, Any]                  # features that the code needs, and the machine it was timed on
    precision: str                          # as asked for: int8, fp16, bf16, fp32, best
    max_batch: int                          # 0: the model has no batch axis
    inputs: tuple[IoTensor, ...]
    outputs: tuple[IoTensor, ...]
    steps: tuple[Step, ...]
    fills: tuple[Fill, ...]
    arena_bytes: int                        # at max_batch
    code: tuple[bytes, ...]                 # ELF objects, position-independent, self-contained
    constants: bytes | memoryview           # weights and epilogue constants, aligned, in order of execution
    graph: Mapping[str, Any] = field(default_factory=dict)       # serialised Graph that it was lowered from
    metadata: Mapping[str, Any] = field(default_factory=dict)    # preprocessing, calibration, compiler version, report
