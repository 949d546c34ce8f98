"""The engine plan: a model compiled for one machine.

A plan is a list of steps over buffers. A step calls one kernel (or, where nothing is compiled, the reference):

    void kernel(ptr operands, i64 row_begin, i64 row_end, i64 column_begin, i64 column_end)

`operands` is an array of addresses, in the kernel's own order, made from `Operand`s when a context is created. The
work of a step is a grid of rows_per_item * batch rows by `columns`. Any tile of it (rows at multiples of row_step,
columns at multiples of column_step) may run on any thread, in any order, and even twice. Therefore a kernel keeps its
scratch memory on the stack, and its results depend only on buffers that it does not write.

A plan assigns no addresses to buffers: a context of one thread lets buffers share memory (arena.py); a context of
several threads must not, because a late thread may still run a tile of an earlier step.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from infer_server.engines.errors import ConfigError, PlanTargetError
from infer_server.engines.ir.dtypes import memory_dtype
from infer_server.engines.ir.graph import BATCH, Array, Graph, QParams
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.plan.program import Region, Text

# Values of Operand.buffer: the expanded constants, and the two kinds of constants of the plan that this one shares.
EXPANDED, SHARED, SHARED_EXPANDED = -1, -2, -3


@dataclass(frozen=True)
class Operand:
    """Address of a kernel's argument: `offset` bytes into a buffer or into the constants of the plan."""
    buffer: int | None          # index in MachinePart.buffers; None: the constants; EXPANDED, SHARED, SHARED_EXPANDED
    offset: int = 0

    @property
    def constant(self) -> bool:
        """True if the operand is a constant, at one address for all contexts."""
        return self.buffer is None or self.buffer < 0


@dataclass(frozen=True)
class ExpandedConstant:
    """Constant that a kernel computes from a smaller one when the plan is loaded, so that the file stays small.

    The kernel has the signature of a step's kernel, two operands (source, result) and a grid of step 1 by 1.
    """
    symbol: str                 # kernel in the code section
    source: int                 # offset in bytes in the constants
    offset: int                 # offset in bytes in the expanded constants
    bytes: int
    rows: int
    columns: int
    name: str = ""              # name of the first step that reads it


SLACK = 128         # bytes after every buffer that the last vector load of a kernel may touch; their values are unused


@dataclass(frozen=True)
class Buffer:
    """Memory of a context with a live range in steps. The buffers that a step reads and writes never overlap.

    Inputs of the plan have first = -1, and no step writes them. Outputs have last = len(steps), except tensors that are
    only observed (Graph.watched).
    """
    name: str                   # name of the first tensor in it, for display
    bytes: int                  # at max_batch, SLACK included
    first: int                  # index of the first step that writes it
    last: int                   # index of the last step that reads it


@dataclass(frozen=True)
class TensorView:
    """Location of a tensor. Element [n, i, j, ...] is at buffer + offset + n * item_stride + i * strides[0] + ..."""
    name: str
    dtype: str                  # stored dtype, by NumPy's or ml_dtypes' name
    shape: tuple[int, ...]      # shape of one item: without the batch axis if `batched`
    buffer: int                 # index in MachinePart.buffers
    offset: int                 # bytes, for batch slot 0
    strides: tuple[int, ...]    # bytes, one for each axis of shape
    item_stride: int            # bytes from one item of the batch to the next
    batched: bool = True        # False: the tensor has no batch axis (shape is the whole of it)
    quant: QParams | None = None
    batch_axis: int = 0         # batch axis in the tensor's own shape; in memory the batch is the outermost axis

    def end(self, items: int) -> int:
        """Return the offset in the buffer just after the last byte of the first `items` batch slots."""
        if 0 in self.shape:
            return self.offset
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        last += memory_dtype(self.dtype).itemsize
        return self.offset + last + ((items - 1) * self.item_stride if self.batched else 0)


@dataclass(frozen=True)
class Fill:
    """Halo of a padded tensor, which a context fills once and no step writes.

    Every item of `view` (the tensor with its halo) is filled with `value`, an element of the stored dtype. Buffers
    share memory only if their halos are equal.
    """
    view: TensorView
    value: float
    halo: tuple[tuple[int, int], ...]       # elements before and after the tensor, for each axis of view.shape


@dataclass(frozen=True)
class Fallback:
    """Node without a kernel: ops.reference evaluates it in floats on dequantised copies of its inputs."""
    node: Mapping[str, Any]                     # as infer_server.engines.ir.serialize writes it
    inputs: tuple[TensorView | str, ...]        # a str names one of Plan.weights; "" is an absent optional input
    outputs: tuple[TensorView, ...]
    constant_quant: tuple[QParams | None, ...] = ()     # one for each input, if constants are stored quantised; else ()


@dataclass(frozen=True)
class Footprint:
    """Bytes of a buffer that rows of a step's grid may access.

    Row r is row i = r % period of item n = r // period, and stays within

        [begin, end) + n * item_stride + i // rows * stride

    All columns of a row have one footprint. It may be larger than the bytes that are accessed, never smaller.
    """
    buffer: int
    begin: int
    end: int
    rows: int               # consecutive rows that access the same bytes
    stride: int             # bytes from one such group of rows to the next, >= 0
    item_stride: int        # bytes from one item to the next, >= 0
    period: int             # rows of an item


@dataclass(frozen=True)
class Launch:
    """GPU launch of a step: one thread block for each row_step rows by column_step columns of its grid."""
    threads: int                # threads of a block
    shared_bytes: int = 0       # dynamic shared memory of a block


@dataclass(frozen=True)
class Step:
    """One kernel call. The first group of fields is what runs; inspect-engine shows the second."""
    symbol: str                             # kernel in the code section; "" runs `fallback` in Python
    operands: tuple[Operand, ...]
    rows_per_item: int                      # 0: the step does not depend on the batch and has `rows` rows
    rows: int = 0
    row_step: int = 1
    columns: int = 1
    column_step: int = 1
    depends: tuple[int, ...] = ()           # earlier steps whose results this one reads
    reads: tuple[Footprint, ...] = ()           # one for each buffer that another step writes; (): unknown
    writes: tuple[Footprint, ...] = ()          # one for each buffer; (): unknown
    constant_bytes: int = 0                 # weights that every row reads: decides which axis threads divide
    further_item: float = 1.0               # time of another item / time of the first: < 1 where items share weights
    fallback: Fallback | None = None
    launch: Launch | None = None            # only in plans for GPUs

    name: str = ""
    fuses: tuple[str, ...] = ()             # ONNX node names
    precision: str = "fp32"
    tactic: str = ""
    time_us: float = 0.0                    # time of one item, measured at build; 0: not timed
    macs: int = 0                           # multiply-accumulates for one item
    bytes: int = 0                          # bytes read and written for one item, constants included
    reason: str = ""                        # why there is no kernel, if `fallback` is set


@dataclass(frozen=True)
class ItemMajorRun:
    """Steps first..last - 1, which a thread runs item by item rather than step by step.

    Intermediate tensors of one item then stay in the L2 cache, where those of the whole batch would not fit. Buffers
    that no other step uses hold one item, and every item reuses that memory. Other buffers that these steps use are
    alive from the first step to the last.
    """
    first: int
    last: int

    def keeps(self, buffer: Buffer) -> bool:
        """Return True if only these steps use the buffer."""
        return self.first <= buffer.first and buffer.last < self.last


DEFAULTS = "defaults"       # key of Plan.metadata: default values of optional inputs, as nested lists


@dataclass(frozen=True)
class IoTensor:
    """Input or output as the ONNX model declares it; symbolic extents are BATCH and names of open ones (OpenPart)."""
    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def batched(self) -> bool:
        return BATCH in self.shape

    @property
    def batch_axis(self) -> int:
        """Index of the batch axis; 0 if there is none."""
        return self.shape.index(BATCH) if self.batched else 0

    def shape_of(self, items: int, extents: Mapping[str, Any] = {}) -> tuple[int, ...]:     # noqa: B006
        """Return the shape for a batch of `items`, with the numbers of `extents` for the other open extents."""
        return tuple(extent if isinstance(extent, int) else items if extent == BATCH else extents[extent]
                     for extent in self.shape)


@dataclass(frozen=True)
class MachinePart:
    """Target-dependent part of a plan, made by a backend; fields that it does not need are empty.

    Session.assemble makes it and the Device of the same backend reads it.
    """
    backend: str                            # name of the backend that made it and whose device runs it
    target: str                             # name of the instruction set, e.g. "avx512_vnni"
    inputs: tuple[TensorView, ...]          # locations of the plan's inputs, in their order
    outputs: tuple[TensorView, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    fills: tuple[Fill, ...] = ()
    cpu: Mapping[str, Any] = field(default_factory=dict)    # "features" that the code needs, "model" it was timed on
    code: tuple[bytes, ...] = ()            # kernels and executor as position-independent, self-contained ELF objects;
                                            # for a GPU its machine code, if it was assembled, and PTX
    constants: bytes | memoryview = b""     # weights and epilogue constants, aligned, in order of execution
    expanded: tuple[ExpandedConstant, ...] = ()             # constants computed from them at load time
    weight_offsets: Mapping[str, int] = field(default_factory=dict)     # offset of Plan.weights that are not repacked
    item_major: tuple[ItemMajorRun, ...] = ()               # in order, disjoint
    shared: tuple[int, ...] = ()            # bytes of the constants and expanded constants that the plan has which
                                            # this one is loaded with; (): the plan shares none

    @property
    def expanded_bytes(self) -> int:
        """Bytes of memory that the expanded constants need."""
        return max((item.offset + item.bytes for item in self.expanded), default=0)


@dataclass(frozen=True)
class OpenOptions:
    """Build options that later specialisations reuse; a subset of the fields of BuildConfig."""
    precision: str
    max_batch: int | None = None
    opt_batch: int | None = None
    target: str = ""
    keep_float: tuple[str, ...] = ()
    pixels: Mapping[str, tuple[float, ...]] | None = None
    threads: int = 1
    float_type: str = "fp32"
    keep_fp32: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpenPart:
    """Part of a plan with open extents from which specialisations, plans for other numbers, are made."""
    inputs: tuple[IoTensor, ...]            # as they are fed; open extents and the batch have names
    outputs: tuple[IoTensor, ...]
    declared: tuple[IoTensor, ...]          # inputs of the model: float images where the engine takes pixels
    options: OpenOptions
    recipe: Recipe | None = None            # only of an int8 build
    profiles: tuple[Mapping[str, tuple[int, int, int]], ...] = ()   # extent -> (min, opt, max); (): any shape
    deciding: tuple[str, ...] = ()          # inputs whose values decide about shapes and branches
    timed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)      # time / cost by kernel and tactic
    model: bytes = b""                      # the ONNX model without its weights
    weights: Mapping[str, Array] = field(default_factory=dict, compare=False)   # the model's weights
    others: tuple[Plan, ...] = ()           # specialisations except the plan itself
    symbolic: bytes | memoryview = b""      # symbolic plans, as plan/symbolic/encoding.py writes them; b"": none


@dataclass(frozen=True)
class SegmentPart:
    """Segment of a program: an ONNX model of any shapes between points where an extent or a value becomes known."""
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: tuple[str, ...]                  # names in ProgramPart.weights
    model: bytes = b""
    plans: tuple[Plan, ...] = ()            # one with open extents for each combination of input types


@dataclass(frozen=True)
class ProgramPart:
    """Program part of a plan whose model has data-dependent shapes or control flow."""
    main: Region
    options: OpenOptions
    segments: tuple[SegmentPart, ...] = ()
    texts: Mapping[str, Text] = field(default_factory=dict)
    weights: Mapping[str, Array] = field(default_factory=dict, compare=False)   # weights of all segments


@dataclass(frozen=True)
class Plan:
    """Immutable engine plan; write_plan and read_plan convert it to and from a file.

    If the model has open extents, the plan itself is the first specialisation, and `open` holds the rest.
    """
    name: str                               # name of the model
    precision: str                          # requested precision: int8, fp16, bf16, fp32, best
    max_batch: int                          # 0: the model has no batch axis
    inputs: tuple[IoTensor, ...]
    outputs: tuple[IoTensor, ...]
    machine: MachinePart = field(repr=False)
    graph: Mapping[str, Any] = field(default_factory=dict, repr=False)      # serialised Graph that it was lowered from
    weights: Mapping[str, Array] = field(default_factory=dict, compare=False, repr=False)   # constants of that graph
    stripped: bool = False                  # True: only weights that the machine part holds without repacking are left
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)   # preprocessing, calibration, versions
    extents: Mapping[str, int | tuple[float, ...]] = field(default_factory=dict)    # open extents; values (value_name)
    open: OpenPart | None = field(default=None, repr=False)
    program: ProgramPart | None = field(default=None, repr=False)   # if set, the machine part has no steps
    dependence: str = ""                    # why a batch can be neither split nor merged; "": it can
    fingerprint: str = field(default="", compare=False)     # digest of all other fields, set by the first write
    of_symbolic: bool = field(default=False, compare=False)     # by a symbolic plan whose first plans were verified

    def strip(self) -> Plan:
        """Return the plan without the graph's weights, bound to its target. Raises ConfigError if it runs from them."""
        if self.program is not None:
            segments = tuple(replace(segment, model=b"", plans=tuple(plan.strip() for plan in segment.plans))
                             for segment in self.program.segments)
            read = set(self.program.main.read_by_host())
            weights = {name: array for name, array in self.program.weights.items() if name in read}
            return replace(self, program=replace(self.program, segments=segments, weights=weights), stripped=True,
                           fingerprint="")
        if not self.machine.code:
            raise ConfigError(f"{self.name}: a plan for '{self.machine.target}' has no code, and needs its weights "
                              "when it is loaded; build it without --strip")
        part = replace(self.open, model=b"", weights={}) if self.open else None
        return replace(self, weights=self._kept_weights(), stripped=True, open=part, fingerprint="")

    @property
    def open_part(self) -> OpenPart:
        """Part of the plan for other shapes; for fixed shapes, one without open extents and specialisations."""
        return self.open or OpenPart(self.inputs, self.outputs, (), OpenOptions(self.precision))

    def within(self) -> Iterator[Plan]:
        """Yield the plan itself, its other specialisations, and the plans of the segments of a program."""
        yield self
        yield from self.open_part.others
        for segment in self.program.segments if self.program else ():
            for plan in segment.plans:
                yield from plan.within()

    def bare(self) -> Plan:
        """Return a specialisation without its graph, which can be made again from the model in the plan."""
        if not self.machine.code:       # it runs from its graph
            return self
        return replace(self, graph={}, weights=self._kept_weights(), stripped=True)

    def _kept_weights(self) -> dict[str, Array]:
        return {name: self.weights[name] for name in self.machine.weight_offsets}

    def with_machine(self, **changes: Any) -> Plan:
        """Return the plan with these fields of its machine part replaced."""
        return replace(self, machine=replace(self.machine, **changes))

    @property
    def batch_slots(self) -> int:
        """Number of items that the buffers hold; 1 for a model without a batch axis."""
        return max(self.max_batch, 1)


def graph_of(plan: Plan) -> Graph:
    """Return the graph that a plan was lowered from; its weights are read from the plan's file if it has one.

    Raises PlanTargetError if the plan is stripped, PlanCorruptError if the file is damaged.
    """
    if plan.stripped:
        raise PlanTargetError(f"{plan.name}: stripped of its weights, so it runs on '{plan.machine.target}' only; "
                              "build it again, here or without --strip")
    from infer_server.engines.ir.serialize import graph_from_json
    return graph_from_json(plan.graph, plan.weights)


def runs_by_item(step: Step) -> bool:
    """Return True if the rows of one item can run separately from those of other items."""
    return (step.rows_per_item > 0 and step.rows_per_item % step.row_step == 0
            and len(step.reads) + len(step.writes) == sum(not operand.constant for operand in step.operands))


def item_strides(step: Step) -> list[int]:
    """Return the bytes from one item to the next for each operand of a step that runs by item; 0 for constants."""
    touched = iter((*step.reads, *step.writes))
    return [0 if operand.constant else next(touched).item_stride for operand in step.operands]
