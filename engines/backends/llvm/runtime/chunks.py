"""Division of steps into chunks for several workers: one of the modules that run a plan on the CPU.

    elf.py          loads the plan's machine code
    expansion.py    computes the constants that the file holds in a smaller form
    loaded.py       the tables
    execution.py    memory, and the executor of one thread
    chunks.py       the units of work that several threads share (here)
    item_groups.py  groups of items of a batch as such units
    workers.py      the threads that run them
    abi.py          the tables that Python writes and emitted code (codegen/executor.py) reads

A step's grid is split along rows if its weights fit a core's L2, so that each worker reads its rows of the input and
all of the weights; otherwise along columns, so that each worker reads its part of the weights once. An axis that gives
the workers unequal shares (7 rows for 2) loses to one that does not.

A chunk waits for the chunks that write the rows it reads, so that there is no barrier between two steps that are split
by rows: a Footprint (engines/plan/plan.py) tells which bytes a row reads and writes. If a chunk reads all of a step, or
its footprints are not known, the whole stage waits for the whole step.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infer_server.engines.backends.llvm.runtime.abi import CHUNK_WORDS, LINE_WORDS, ChunkRow, StageRow, StepRow
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan, Words, words
from infer_server.engines.backends.llvm.runtime.segments import Segment
from infer_server.engines.plan.plan import Footprint, Plan, Step

CHUNK_US = 25.0                 # target duration: long compared with a claim (0.1 us), short compared with a late chunk
SHORTEST_US = 2.5               # least duration of a chunk; sharing shorter ones costs more than it gains
LEAST_SAVED_US = 8.0            # a segment that saves less runs on the caller alone, as waking helpers costs as much
PIECES_PER_WORKER = 16          # most chunks of a step for each worker
RESIDENT_BYTES = 160 << 10      # bytes of weights that stay in L2
FAIR_SHARE = 0.9                # utilisation of the workers that suffices for the preferred axis
LATE_FACTOR, LATE_SLACK_US = 3.0, 15.0

Range = tuple[int, int]         # [begin, end)


@dataclass(frozen=True)
class GridSplit:
    """Division of a step's grid into every range of rows with every range of columns.

    The order of the pieces keeps weights in cache.
    """
    rows: tuple[Range, ...]
    columns: tuple[Range, ...]
    by_rows: bool               # True: the pieces of a range of rows are consecutive; else those of a range of columns

    def __len__(self) -> int:
        return len(self.rows) * len(self.columns)

    def pieces(self) -> list[tuple[Range, Range]]:
        """Return (rows, columns) of each chunk."""
        if self.by_rows:
            return [(r, c) for r in self.rows for c in self.columns]
        return [(r, c) for c in self.columns for r in self.rows]


@dataclass(frozen=True)
class Schedule:
    """Tables of one segment for one batch size (see engines/backends/llvm/runtime/abi.py)."""
    chunks: Words
    stages: Words
    depends: Words


def split_grid(step: Step, batch: int, us: float, workers: int) -> GridSplit:
    """Divide a step's grid for so many workers; us: microseconds of the whole step on one thread."""
    rows = step.rows_per_item * batch + (0 if step.rows_per_item else step.rows)
    if not rows or not step.columns:
        return GridSplit((), (), True)
    row_units, column_units = -(-rows // step.row_step), -(-step.columns // step.column_step)
    each = min(max(math.ceil(us / CHUNK_US / workers), 1), PIECES_PER_WORKER)
    wanted = min(workers * each, max(int(us / SHORTEST_US), 1))
    by_rows = _prefers_rows(step, row_units, column_units, workers)
    main, other = (row_units, column_units) if by_rows else (column_units, row_units)
    main_pieces = min(main, wanted)
    other_pieces = min(other, -(-wanted // main_pieces))
    row_pieces, column_pieces = (main_pieces, other_pieces) if by_rows else (other_pieces, main_pieces)
    return GridSplit(_ranges(rows, step.row_step, row_units, row_pieces),
                     _ranges(step.columns, step.column_step, column_units, column_pieces), by_rows)


def _prefers_rows(step: Step, row_units: int, column_units: int, workers: int) -> bool:
    rows, columns = (units / (workers * -(-units // workers)) for units in (row_units, column_units))
    if step.constant_bytes <= RESIDENT_BYTES:
        return rows >= FAIR_SHARE or rows >= columns
    return columns < min(FAIR_SHARE, rows)


def _ranges(extent: int, step: int, units: int, pieces: int) -> tuple[Range, ...]:
    """Divide 0..extent into `pieces` nearly equal ranges that begin at multiples of step."""
    bounds = [units * i // pieces * step for i in range(pieces)] + [extent]
    return tuple(zip(bounds, bounds[1:], strict=False))


def most_chunks(segment: Segment, workers: int) -> int:
    """Return an upper bound of the number of chunks for any batch size."""
    # Twice the number aimed at, which `split_grid` rounds up to whole rows (or columns) of pieces.
    return (segment.last - segment.first) * 2 * workers * PIECES_PER_WORKER


def make_schedule(program: LoadedPlan, segment: Segment, batch: int, workers: int, step_us: Sequence[float],
                  ticks_per_us: float) -> Schedule | None:
    """Return the tables of a native segment; None if its steps are too short to be shared.

    Parameters
    ----------
    step_us : microseconds of each step of the plan at batch 1, on one thread.
    ticks_per_us : rate of the emitted code's clock.
    """
    steps = program.machine.steps[segment.first:segment.last]
    times = [us * (1 + (batch - 1) * step.further_item if step.rows_per_item else 1)
             for us, step in zip(step_us[segment.first:segment.last], steps, strict=True)]
    cuts = [split_grid(step, batch, us, workers) for step, us in zip(steps, times, strict=True)]
    if sum(us * (1 - 1 / min(len(c), workers)) for us, c in zip(times, cuts, strict=True) if c) < LEAST_SAVED_US:
        return None
    starts = np.cumsum([0, *map(len, cuts)])

    chunks = words(int(starts[-1]) + 1, CHUNK_WORDS)
    for index, (us, c) in enumerate(zip(times, cuts, strict=True)):
        rows = chunks[starts[index]:starts[index + 1]]
        rows[:, [ChunkRow.FUNCTION, ChunkRow.OPERANDS]] = \
            program.steps[segment.first + index, [StepRow.FUNCTION, StepRow.OPERANDS]]
        bounds = np.array(c.pieces(), np.int64).reshape(-1, 4)
        rows[:, [ChunkRow.ROW_BEGIN, ChunkRow.ROW_END, ChunkRow.COLUMN_BEGIN, ChunkRow.COLUMN_END]] = bounds
        area = (bounds[:, 1] - bounds[:, 0]) * (bounds[:, 3] - bounds[:, 2])
        late_us = LATE_FACTOR * us * area / max(area.sum(), 1) + LATE_SLACK_US
        rows[:, ChunkRow.LIMIT] = (late_us * ticks_per_us).astype(np.int64)
    waits = [_waits(steps, index, segment.first, cuts, starts) for index in range(len(steps))]
    stages, depends = _stages(waits, _steps_awaited_at_the_end(program.plan, segment), starts, workers, chunks)
    return Schedule(chunks, stages, depends)


def single_stage(chunks: Words, workers: int) -> Schedule:
    """Return a schedule of independent chunks. chunks: their table, with the extra row at the end."""
    stages, depends = _stages([_Waits([], [[] for _ in chunks[1:]])], {0}, np.array([0, len(chunks) - 1]), workers,
                              chunks)
    return Schedule(chunks, stages, depends)


# ---- dependencies
@dataclass(frozen=True)
class _Waits:
    """Chunks that a step waits for, as ranges of their numbers: for the whole step, and for each of its chunks."""
    stage: list[Range]
    chunks: list[list[Range]]


def _waits(steps: Sequence[Step], index: int, first: int, cuts: Sequence[GridSplit], starts: Words) -> _Waits:
    step, own = steps[index], cuts[index]
    found = _Waits([], [[] for _ in range(len(own))])
    for producer in (d - first for d in step.depends if d >= first):    # earlier segments are done already
        base = int(starts[producer])
        if not len(cuts[producer]):
            continue
        by_row = _rows_of_producer(step, own, steps[producer], cuts[producer])
        if by_row is None:
            found.stage.append((base, base + len(cuts[producer])))
            continue
        each = len(cuts[producer].columns)      # chunks in one range of the producer's rows
        for pairs, row in zip(found.chunks, _rows_of_chunks(own), strict=True):
            pairs += [(base + begin * each, base + end * each) for begin, end in by_row[row]]
    return found


def _rows_of_chunks(c: GridSplit) -> list[int]:
    """Return the number of the row range of each chunk."""
    rows = range(len(c.rows))
    return [r for r in rows for _ in c.columns] if c.by_rows else [r for _ in c.columns for r in rows]


def _rows_of_producer(step: Step, own: GridSplit, producer: Step, its: GridSplit) -> list[list[Range]] | None:
    """Return for each row range of `own` the producer's row ranges that it reads.

    It is None if each reads all of them, or if footprints are unknown.
    """
    if len(its.rows) == 1 or not (its.by_rows or len(its.columns) == 1):
        return None         # chunks of a row range are not consecutive
    pairs = [(read, write) for read in step.reads for write in producer.writes if read.buffer == write.buffer]
    if not pairs:
        return None
    found = rows_awaited(pairs, own.rows, its.rows)
    return None if all((0, len(its.rows)) in ranges for ranges in found) else found


def rows_awaited(pairs: Sequence[tuple[Footprint, Footprint]], own: Sequence[Range],
                 its: Sequence[Range]) -> list[list[Range]]:
    """Return for each row range of `own` the ranges of `its` that access the same bytes.

    pairs: (footprint of rows of `own`, footprint of rows of `its`).
    """
    found: list[list[Range]] = [[] for _ in own]
    for read, write in pairs:
        begins, ends = _bytes(write, its)
        read_begins, read_ends = _bytes(read, own)
        # Sorted because strides are not negative; a running maximum because a row may extend past the next one's end.
        firsts = np.searchsorted(np.maximum.accumulate(ends), read_begins, "right")
        lasts = np.searchsorted(np.minimum.accumulate(begins[::-1])[::-1], read_ends, "left")
        for ranges, begin, end in zip(found, firsts.tolist(), lasts.tolist(), strict=True):
            if begin < end:
                ranges.append((begin, end))
    return found


def _bytes(footprint: Footprint, rows: Sequence[Range]) -> tuple[Words, Words]:
    """Return the first byte, and the one after the last, that each row range may access."""
    bounds = np.array(rows, np.int64)
    (first_item, first), (last_item, last) = (divmod(r, footprint.period) for r in (bounds[:, 0], bounds[:, 1] - 1))
    # A range over several items begins at its first row or at the next item, which may have a lower address.
    several = last_item > first_item
    steps_begin = np.minimum(first_item * footprint.item_stride + first // footprint.rows * footprint.stride,
                             np.where(several, (first_item + 1) * footprint.item_stride, np.iinfo(np.int64).max))
    whole = (footprint.period - 1) // footprint.rows * footprint.stride
    steps_end = np.maximum(last_item * footprint.item_stride + last // footprint.rows * footprint.stride,
                           np.where(several, (last_item - 1) * footprint.item_stride + whole, 0))
    return footprint.begin + steps_begin, footprint.end + steps_end


def _steps_awaited_at_the_end(plan: Plan, segment: Segment) -> set[int]:
    """Return the steps that must be done when a segment ends.

    Their results are read by later segments or by the caller, or by no step at all.
    """
    awaited = {d for step in plan.machine.steps[segment.first:segment.last] for d in step.depends}
    later = {d for step in plan.machine.steps[segment.last:] for d in step.depends}
    outputs = {view.buffer for view in plan.machine.outputs}
    found = set()
    for index in range(segment.first, segment.last):
        shown = any(operand.buffer in outputs for operand in plan.machine.steps[index].operands)
        if index in later or index not in awaited or shown:
            found.add(index - segment.first)
    return found


def _stages(waits: Sequence[_Waits], ends: set[int], starts: Words, workers: int,
            chunks: Words) -> tuple[Words, Words]:
    """Return the stage table, a row for each step and one that waits for `ends`, and the pairs of stages and chunks."""
    last = [(int(starts[i]), int(starts[i + 1])) for i in sorted(ends)]
    depends: list[Range] = []
    stages = words(len(waits) + 1, -(-(StageRow.PARTS + workers + 1) // LINE_WORDS) * LINE_WORDS)
    for index, pairs in enumerate([*(w.stage for w in waits), last]):
        stages[index, StageRow.DEPENDS_BEGIN] = len(depends)
        depends += pairs
        stages[index, StageRow.DEPENDS_END] = len(depends)
    for index in range(len(waits)):
        begin, count = starts[index], starts[index + 1] - starts[index]
        stages[index, StageRow.PARTS:StageRow.PARTS + workers + 1] = begin + count * np.arange(workers + 1) // workers
    for chunk, pairs in enumerate(pairs for w in waits for pairs in w.chunks):
        chunks[chunk, ChunkRow.DEPENDS] = len(depends)
        depends += pairs
    chunks[-1, ChunkRow.DEPENDS] = len(depends)
    table = words(max(len(depends), 1), 2)
    table[:len(depends)] = depends or 0
    return stages, table
