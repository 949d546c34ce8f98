"""Cuts steps into chunks for a crew: what run_chunks (engines/backends/llvm/scheduler.py) works off.

A step's grid is cut along rows while its weights fit a core's second-level cache, so that each worker reads its rows
of the input and all of the weights; along columns otherwise, so that each reads its part of the weights once. An axis
that gives the workers unequal shares (7 rows for 2) loses to one that does not.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.execution import Program, Span, Words, words
from engines.plan import Step
from engines.tables import CHUNK_WORDS, LINE, ChunkRow, StageRow, StepRow

CHUNK_US = 25.0                 # aimed at: long beside a claim (0.1 us), short beside what a late one costs
WHOLE_US = 5.0                  # a step of less is one chunk: to share it costs more
PIECES_PER_WORKER = 16          # at most, for each step
RESIDENT_BYTES = 160 << 10      # weights that stay in the second-level cache
FAIR = 0.9                      # share of the workers' time that a cut must use, if another could use more
LATE_FACTOR, LATE_SLACK_US = 3.0, 15.0

Piece = tuple[int, int, int, int]       # row begin, row end, column begin, column end


@dataclass(frozen=True)
class Schedule:
    """The tables of one span for one batch size (see engines/tables.py)."""
    chunks: Words
    stages: Words
    depends: Words


def cut(step: Step, batch: int, us: float, workers: int) -> list[Piece]:
    """The pieces of a step's grid, in order; `us` is what all of it takes one thread. Together they cover it once."""
    rows = step.rows_per_item * batch + (0 if step.rows_per_item else step.rows)
    if not rows or not step.columns:
        return []
    row_units, column_units = -(-rows // step.row_step), -(-step.columns // step.column_step)
    each = min(max(math.ceil(us / CHUNK_US / workers), 1), PIECES_PER_WORKER)
    wanted = 1 if us < WHOLE_US else workers * each
    by_rows = _prefers_rows(step, row_units, column_units, workers)
    main, other = (row_units, column_units) if by_rows else (column_units, row_units)
    main_pieces = min(main, wanted)
    other_pieces = min(other, -(-wanted // main_pieces))
    row_pieces, column_pieces = (main_pieces, other_pieces) if by_rows else (other_pieces, main_pieces)

    row_cuts = _cuts(rows, step.row_step, row_units, row_pieces)
    column_cuts = _cuts(step.columns, step.column_step, column_units, column_pieces)
    if by_rows:
        return [(*r, *c) for r in row_cuts for c in column_cuts]
    return [(*r, *c) for c in column_cuts for r in row_cuts]


def _prefers_rows(step: Step, row_units: int, column_units: int, workers: int) -> bool:
    rows, columns = (units / (workers * -(-units // workers)) for units in (row_units, column_units))
    if step.constant_bytes <= RESIDENT_BYTES:
        return rows >= FAIR or rows >= columns
    return columns < min(FAIR, rows)


def _cuts(extent: int, step: int, units: int, pieces: int) -> list[tuple[int, int]]:
    """0..extent in `pieces` nearly equal ranges that begin at multiples of step."""
    bounds = [units * i // pieces * step for i in range(pieces)] + [extent]
    return list(zip(bounds, bounds[1:], strict=False))


def most_chunks(span: Span, workers: int) -> int:
    """No batch size cuts the span into more."""
    # Twice what is wanted: that is rounded up to whole rows (or columns) of pieces.
    return (span.last - span.first) * 2 * workers * PIECES_PER_WORKER


def make_schedule(program: Program, span: Span, batch: int, workers: int, step_us: Sequence[float],
                  ticks_per_us: float) -> Schedule | None:
    """The tables of a native span; None if all of its steps are too short to be shared.

    step_us: microseconds of each step of the plan at batch 1, on one thread.
    """
    steps = program.plan.steps[span.first:span.last]
    pieces = []
    for index, step in enumerate(steps, span.first):
        us = step_us[index] * (batch if step.rows_per_item else 1)
        pieces.append((us, cut(step, batch, us, workers)))
    if all(len(grid) <= 1 for _, grid in pieces):
        return None
    starts = np.cumsum([0, *(len(grid) for _, grid in pieces)])

    chunks = words(int(starts[-1]), CHUNK_WORDS)
    for index, (us, grid) in enumerate(pieces):
        rows = chunks[starts[index]:starts[index + 1]]
        rows[:, [ChunkRow.FUNCTION, ChunkRow.OPERANDS]] = \
            program.steps[span.first + index, [StepRow.FUNCTION, StepRow.OPERANDS]]
        bounds = np.array(grid, np.int64).reshape(-1, 4)
        rows[:, [ChunkRow.ROW_BEGIN, ChunkRow.ROW_END, ChunkRow.COLUMN_BEGIN, ChunkRow.COLUMN_END]] = bounds
        area = (bounds[:, 1] - bounds[:, 0]) * (bounds[:, 3] - bounds[:, 2])
        late_us = LATE_FACTOR * us * area / max(area.sum(), 1) + LATE_SLACK_US
        rows[:, ChunkRow.LIMIT] = (late_us * ticks_per_us).astype(np.int64)
    return Schedule(chunks, *_stages(steps, span.first, starts, workers))


def _stages(steps: Sequence[Step], first: int, starts: Words, workers: int) -> tuple[Words, Words]:
    """The stage table, a row for each step and one that waits for all that no step waits for; and its dependencies."""
    # What earlier spans wrote is there before this one begins.
    waits = [[d - first for d in step.depends if d >= first] for step in steps]
    awaited = {d for depends in waits for d in depends}
    waits.append([i for i in range(len(steps)) if i not in awaited])
    depends = [(starts[d], starts[d + 1]) for stage in waits for d in sorted(stage)]
    ends = np.cumsum([0, *map(len, waits)])

    stages = words(len(waits), -(-(StageRow.PARTS + workers + 1) // LINE) * LINE)
    stages[:, StageRow.DEPENDS_BEGIN], stages[:, StageRow.DEPENDS_END] = ends[:-1], ends[1:]
    for index in range(len(steps)):
        begin, count = starts[index], starts[index + 1] - starts[index]
        stages[index, StageRow.PARTS:StageRow.PARTS + workers + 1] = begin + count * np.arange(workers + 1) // workers
    table = words(max(len(depends), 1), 2)
    table[:len(depends)] = depends or 0
    return stages, table
