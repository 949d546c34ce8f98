"""The plan: all that is decided about a model on one machine, and the file that holds it.

A plan is a list of steps over buffers. A step calls one kernel (or, where nothing is compiled, the reference):

    void kernel(ptr operands, i64 row_begin, i64 row_end, i64 column_begin, i64 column_end)

`operands` is an array of addresses, in the kernel's own order, made from `Operand`s when a context is created. The
work of a step is a grid: rows_per_item * batch rows by `columns`; any cut of it (rows at multiples of row_step,
columns at multiples of column_step) may run on any thread, in any order, and even twice. So a kernel keeps its scratch
on its stack, and what it writes depends on nothing but what it reads from other buffers.

Where a buffer lies is not decided here: a context of one thread lets buffers share memory (arena.py), one of
several threads must not, because there a late thread may still run a piece of an earlier step.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engines.errors import ConfigError, PlanTargetError
from engines.ir.dtypes import memory_dtype
from engines.ir.graph import BATCH, Array, Graph, QParams
from engines.ir.recipe import Recipe
from engines.plan.program import Region, Text

# As Operand.buffer: constants that are computed of others; and the constants of both kinds that another plan has.
EXPANDED, SHARED, SHARED_EXPANDED = -1, -2, -3


@dataclass(frozen=True)
class Operand:
    """An address: `offset` bytes into a buffer, or into the constants of the plan."""
    buffer: int | None          # index in MachinePart.buffers; None: the constants; EXPANDED: those computed from them;
                                # SHARED, SHARED_EXPANDED: those of the plan that this one is loaded beside
    offset: int = 0

    @property
    def constant(self) -> bool:
        """Not in a buffer, and the same for every context."""
        return self.buffer is None or self.buffer < 0


@dataclass(frozen=True)
class ExpandedConstant:
    """A constant that is computed from another one when the plan is loaded, so that the file holds only the smaller.

    A kernel expands it, called as those of steps are, with two operands, on a grid that may be cut anywhere.
    """
    symbol: str                 # of the kernel in the code section
    source: int                 # bytes into the constants
    offset: int                 # bytes into the expanded constants
    bytes: int
    rows: int
    columns: int
    name: str = ""              # of the first step that reads it


SLACK = 128         # bytes past every buffer that a kernel may read (never use): the end of its last vector


@dataclass(frozen=True)
class Buffer:
    """A piece of memory of a context, for the time between two steps; what a step reads and writes never overlap.

    Inputs of the plan have first = -1, and no step writes them; outputs have last = len(steps), but for those that
    are only shown (Graph.watched).
    """
    name: str                   # of the (first) tensor in it, for whoever reads a plan
    bytes: int                  # at max_batch, and SLACK
    first: int                  # index of the first step that writes it
    last: int                   # index of the last step that reads it


@dataclass(frozen=True)
class TensorView:
    """Where a tensor lies. Element [n, i, j, ...] is at buffer + offset + n * item_stride + i * strides[0] + ..."""
    name: str
    dtype: str                  # name of the stored dtype, numpy's or ml_dtypes'
    shape: tuple[int, ...]      # of one item: without the batch axis if `batched`
    buffer: int                 # index in MachinePart.buffers
    offset: int                 # bytes, for batch slot 0
    strides: tuple[int, ...]    # bytes, one for each axis of shape
    item_stride: int            # bytes from one item of the batch to the next
    batched: bool = True        # False: the tensor has no batch axis (shape is the whole of it)
    quant: QParams | None = None
    batch_axis: int = 0         # where the tensor's own shape has the batch; in memory it always leads

    def end(self, items: int) -> int:
        """The byte of the buffer after the last one of `items` batch slots."""
        if 0 in self.shape:
            return self.offset
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        last += memory_dtype(self.dtype).itemsize
        return self.offset + last + ((items - 1) * self.item_stride if self.batched else 0)


@dataclass(frozen=True)
class Fill:
    """Bytes that a context sets once and that no step writes: the halo of a padded tensor.

    Every item of `view` (the tensor with its halo) is filled wholly with `value`, one element of its dtype as stored.
    Buffers share memory only if their halos are alike, so that each survives the other's tensors.
    """
    view: TensorView
    value: float
    halo: tuple[tuple[int, int], ...]       # cells before and after the tensor proper, for each axis of view.shape


@dataclass(frozen=True)
class Fallback:
    """A node that no kernel runs: ops.reference does, in real numbers, on copies of what lies in the buffers."""
    node: Mapping[str, Any]                     # as engines.ir.serialize writes it
    inputs: tuple[TensorView | str, ...]        # a str names one of Plan.weights; "" is an absent optional input
    outputs: tuple[TensorView, ...]
    constant_quant: tuple[QParams | None, ...] = ()     # for each input, if there are constants stored quantised


@dataclass(frozen=True)
class Footprint:
    """The bytes of a buffer that rows of a step's grid may read or write.

    Row r is row i = r % period of item n = r // period, and stays within

        [begin, end) + n * item_stride + i // rows * stride

    Columns are not told apart. A footprint may be wider than what is touched, never narrower.
    """
    buffer: int
    begin: int
    end: int
    rows: int               # neighbours that touch the same bytes
    stride: int             # bytes from them to the next ones, not negative; nor is item_stride
    item_stride: int
    period: int             # rows of an item


@dataclass(frozen=True)
class Launch:
    """How a GPU runs a step: a block of so many threads for each row_step rows by column_step columns of its grid."""
    threads: int
    shared_bytes: int = 0       # dynamic, of a block


@dataclass(frozen=True)
class Step:
    """One kernel call. The first group is what runs; the second is what inspect-engine shows."""
    symbol: str                             # of the kernel in the code section; "" runs `fallback` in Python
    operands: tuple[Operand, ...]
    rows_per_item: int                      # 0: the step does not depend on the batch and has `rows` rows
    rows: int = 0
    row_step: int = 1
    columns: int = 1
    column_step: int = 1
    depends: tuple[int, ...] = ()           # earlier steps that write what this one reads
    reads: tuple[Footprint, ...] = ()           # of every buffer in which another step writes; (): not known
    writes: tuple[Footprint, ...] = ()          # of every buffer; (): not known
    constant_bytes: int = 0                 # of weights read by every row: they decide which axis is cut for threads
    further_item: float = 1.0               # of the first one's time, as timed: less than 1 where items share weights
    fallback: Fallback | None = None
    launch: Launch | None = None            # of plans for GPUs

    name: str = ""
    fuses: tuple[str, ...] = ()             # ONNX node names
    precision: str = "fp32"
    tactic: str = ""
    time_us: float = 0.0                    # as timed at build, for one item
    macs: int = 0                           # multiply-accumulates an item
    bytes: int = 0                          # read and written an item, constants included
    reason: str = ""                        # why it fell back, if it did


def writes_border(step: Step) -> bool:
    """Whether the step computes nothing, and only renews the halo of a buffer that shares memory with others."""
    return step.tactic.startswith("halo_fill:")


@dataclass(frozen=True)
class ItemMajorRun:
    """Steps first..last - 1, which a context of one thread runs for one item of the batch after the other.

    The tensors that these steps hand on to each other then stay in the second-level cache, where those of all items
    would not fit. Buffers that no other step uses hold one item, each item in the memory of the one before; the others
    that these steps use are alive from the first to the last of them.
    """
    first: int
    last: int

    def keeps(self, buffer: Buffer) -> bool:
        """Whether only these steps use the buffer."""
        return self.first <= buffer.first and buffer.last < self.last


DEFAULTS = "defaults"       # of Plan.metadata: the values of inputs that a run may leave out, as nested lists


@dataclass(frozen=True)
class IoTensor:
    """An input or output as the ONNX model declares it; a symbolic extent has a name: BATCH, or that of an extent for
    which there are specialisations (OpenPart)."""
    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def batched(self) -> bool:
        return BATCH in self.shape

    @property
    def batch_axis(self) -> int:
        """The axis of the batch; 0 if there is none."""
        return self.shape.index(BATCH) if self.batched else 0

    def shape_of(self, items: int, extents: Mapping[str, Any] = {}) -> tuple[int, ...]:     # noqa: B006
        """The shape of a batch of so many items, with these numbers for other open extents."""
        return tuple(extent if isinstance(extent, int) else items if extent == BATCH else extents[extent]
                     for extent in self.shape)


@dataclass(frozen=True)
class MachinePart:
    """All of a plan that a backend decided for one machine. A backend leaves empty what it does not need.

    Session.assemble makes it, the Device of the same backend reads it; the plan's file needs neither.
    """
    backend: str                            # name of the backend that made it, and whose device runs it
    target: str                             # name of the instruction set, e.g. "avx512_vnni"
    inputs: tuple[TensorView, ...]          # where the plan's inputs lie, in their order
    outputs: tuple[TensorView, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    fills: tuple[Fill, ...] = ()
    cpu: Mapping[str, Any] = field(default_factory=dict)    # "features" that the code needs, "model" it was timed on
    code: tuple[bytes, ...] = ()            # ELF objects, position-independent, self-contained: kernels and executor;
                                            # for a GPU its machine code, if it was assembled, and PTX
    constants: bytes | memoryview = b""     # weights and epilogue constants, aligned, in order of execution
    expanded: tuple[ExpandedConstant, ...] = ()             # ... and those that are computed from them
    weight_offsets: Mapping[str, int] = field(default_factory=dict)     # Plan.weights that `constants` hold as they are
    item_major: tuple[ItemMajorRun, ...] = ()               # in order, apart from each other
    shared: tuple[int, ...] = ()            # bytes of constants and of expanded ones that the plan has which this one
                                            # is loaded beside, for both have them; (): it stands alone

    @property
    def expanded_bytes(self) -> int:
        """Memory for the expanded constants."""
        return max((item.offset + item.bytes for item in self.expanded), default=0)


@dataclass(frozen=True)
class OpenOptions:
    """What a build decided that its later specialisations need, too; fields of BuildConfig."""
    precision: str
    max_batch: int | None = None
    opt_batch: int | None = None
    target: str = ""
    keep_float: tuple[str, ...] = ()
    pixels: Mapping[str, tuple[float, ...]] | None = None
    threads: int = 1


@dataclass(frozen=True)
class GeneralKernel:
    """A kernel that takes numbers of its problem at run time, among the code of the plan.

    It solves every problem that is spelled with the same words and, but for None, the same numbers, if each guard, a
    term over all of the numbers, has its value. It reads the terms of its table (engines/codegen/extents.py).
    """
    symbol: str
    words: str
    tactic: str
    numbers: tuple[int | None, ...]
    guards: tuple[tuple[Any, int], ...]
    table: tuple[Any, ...]


@dataclass(frozen=True)
class OpenPart:
    """Of a model with open extents: all that a plan for other numbers, a specialisation, is made of."""
    inputs: tuple[IoTensor, ...]            # as they are fed; open extents and the batch have names
    outputs: tuple[IoTensor, ...]
    declared: tuple[IoTensor, ...]          # inputs as the model has them: images where engines take pixels
    options: OpenOptions
    recipe: Recipe | None = None            # of an int8 build
    profiles: tuple[Mapping[str, tuple[int, int, int]], ...] = ()   # by extent: least, usual, most; (): whatever comes
    deciding: tuple[str, ...] = ()          # inputs whose values shapes and branches follow from
    timed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)      # time / cost by kernel and tactic
    model: bytes = b""                      # ONNX, without its weights ...
    weights: Mapping[str, Array] = field(default_factory=dict, compare=False)   # ... and these
    others: tuple[Plan, ...] = ()           # specialisations beside the plan itself
    general: tuple[GeneralKernel, ...] = ()         # what plans for other numbers are made of without compiling


@dataclass(frozen=True)
class SegmentPart:
    """A part of the model between the points where an extent or a value becomes known: ONNX, any shapes."""
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: tuple[str, ...]                  # of ProgramPart.weights
    model: bytes = b""
    plans: tuple[Plan, ...] = ()            # with open extents, one for each set of types that its inputs had


@dataclass(frozen=True)
class ProgramPart:
    """Of a model that is no single graph, for data decide about its extents, or about what is computed."""
    main: Region
    options: OpenOptions
    segments: tuple[SegmentPart, ...] = ()
    texts: Mapping[str, Text] = field(default_factory=dict)
    weights: Mapping[str, Array] = field(default_factory=dict, compare=False)   # of all segments


@dataclass(frozen=True)
class Plan:
    """Decided, frozen, and equal to its file.

    Of a model with open extents, the plan itself is its first specialisation, and `open` has the rest.
    """
    name: str                               # of the model
    precision: str                          # as asked for: int8, fp16, bf16, fp32, best
    max_batch: int                          # 0: the model has no batch axis
    inputs: tuple[IoTensor, ...]
    outputs: tuple[IoTensor, ...]
    machine: MachinePart
    graph: Mapping[str, Any] = field(default_factory=dict)          # serialised Graph that it was lowered from ...
    weights: Mapping[str, Array] = field(default_factory=dict, compare=False)   # ... and its constants
    stripped: bool = False                  # only those weights are left that the machine part holds as they are
    metadata: Mapping[str, Any] = field(default_factory=dict)       # preprocessing, calibration, versions, report
    extents: Mapping[str, int | tuple[float, ...]] = field(default_factory=dict)    # open ones; values (value_name)
    open: OpenPart | None = None
    program: ProgramPart | None = None                              # then the machine part has no steps
    dependence: str = ""                    # why a batch is neither cut nor merged with others; "": it may be
    fingerprint: str = field(default="", compare=False)     # of all the rest, made when it is first written
    of_template: bool = field(default=False, compare=False)     # of one whose first plans have been verified

    def strip(self) -> Plan:
        """The plan without the graph's weights: it runs as before, and on no other target."""
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

    def within(self) -> Iterator[Plan]:
        """The plan itself, its other specialisations, and those of the segments of a program."""
        yield self
        yield from self.open.others if self.open else ()
        for segment in self.program.segments if self.program else ():
            for plan in segment.plans:
                yield from plan.within()

    def bare(self) -> Plan:
        """A specialisation without its graph: where that is wanted, it is made again of the model in the plan."""
        if not self.machine.code:       # it is run from its graph
            return self
        return replace(self, graph={}, weights=self._kept_weights(), stripped=True)

    def _kept_weights(self) -> dict[str, Array]:
        return {name: self.weights[name] for name in self.machine.weight_offsets}

    def with_machine(self, **changes: Any) -> Plan:
        """The plan with other values in these fields of its machine part."""
        return replace(self, machine=replace(self.machine, **changes))

    @property
    def batch_slots(self) -> int:
        """Items that the buffers hold: a model without a batch axis is one item."""
        return max(self.max_batch, 1)


def graph_of(plan: Plan) -> Graph:
    """The graph that a plan was lowered from, its weights read from the plan's file if it has one.

    Raises PlanTargetError: the plan is stripped; PlanCorruptError.
    """
    if plan.stripped:
        raise PlanTargetError(f"{plan.name}: stripped of its weights, so it runs on '{plan.machine.target}' only; "
                              "build it again, here or without --strip")
    from engines.ir.serialize import graph_from_json
    return graph_from_json(plan.graph, plan.weights)


def runs_by_item(step: Step) -> bool:
    """Whether the rows of an item can be run apart from those of others."""
    return (step.rows_per_item > 0 and step.rows_per_item % step.row_step == 0
            and len(step.reads) + len(step.writes) == sum(not operand.constant for operand in step.operands))


def item_strides(step: Step) -> list[int]:
    """Bytes from an item to the next, of each operand of a step that runs by item; constants are the same for all."""
    touched = iter((*step.reads, *step.writes))
    return [0 if operand.constant else next(touched).item_stride for operand in step.operands]
