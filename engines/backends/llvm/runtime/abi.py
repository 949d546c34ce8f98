"""The interface between Python and emitted code: tables that Python writes, each of their words an i64 with a name.

execution.py, chunks.py and workers.py fill them, with the addresses that elf.py loaded and expansion.py's constants;
codegen/executor.py emits the code that reads them. It is all that the two sides must agree on. A row of a table is one
or more cache lines, so that two threads never write to one line.
"""
from __future__ import annotations

import ctypes
from enum import IntEnum

# A kernel: the address of its table of operands, then the rows and the columns of its grid, each a [begin, end).
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 4)
WORD = 8            # bytes
LINE_WORDS = 8      # words of a cache line


class StepRow(IntEnum):
    """One step of the plan (STEP_WORDS words)."""
    FUNCTION = 0        # address of the kernel; 0 for a fallback
    OPERANDS = 1        # bytes into the context's operand table
    ROWS_PER_ITEM = 2
    ROWS = 3            # plus this many, whatever the batch
    COLUMNS = 4


class ChunkRow(IntEnum):
    """A piece of a step's grid (CHUNK_WORDS words). One row more, after the last, ends the last one's pairs."""
    FUNCTION = 0
    OPERANDS = 1
    ROW_BEGIN = 2
    ROW_END = 3
    COLUMN_BEGIN = 4
    COLUMN_END = 5
    LIMIT = 6           # ticks after which it counts as late
    DEPENDS = 7         # number of the first pair that it waits for, beside its stage's; the next row's is the end


class StatusRow(IntEnum):
    """The state of a chunk, in a cache line of its own. Stamps are epochs: a row of an older run needs no clearing."""
    DONE = 0            # epoch of the last run that finished it
    STARTED = 1         # ticks
    CLAIM = 2           # epoch of the last run in which somebody took it


class RunRow(IntEnum):
    """One run of a segment of steps over one arena: all that a worker needs (RUN_WORDS words)."""
    ARENA = 0           # number of the arena
    EPOCH = 1           # number of this run; grows from run to run of a context
    STAGE = 2           # the caller's stage: earlier ones need no look
    CHUNKS = 3          # address of the chunk table
    STATUS = 4          # address of the status rows of this arena and segment
    OPERANDS = 5        # address of the arena's operand table
    STAGES = 6          # address of the stage table: a row for each step, and a last one that only waits
    STAGE_COUNT = 7     # without the last one
    STAGE_BYTES = 8     # of a row of the stage table
    DEPENDS = 9         # address of (first chunk, one past the last) pairs, of stages and chunks
    WORKERS = 10        # the caller and its helpers


class StageRow(IntEnum):
    """A step as the workers see it: the pairs all of it waits for, then the bounds of each worker's part of it."""
    DEPENDS_BEGIN = 0
    DEPENDS_END = 1
    PARTS = 2           # WORKERS + 1 chunk numbers


class ControlRow(IntEnum):
    """The worker pool of a context (CONTROL_WORDS words, then a WorkerRow for each worker, the caller first)."""
    WORKERS = 0
    SYSCALL = 1         # address of libc's syscall()
    SPIN = 2            # ticks that an idle helper spins before it sleeps
    STOP = 3            # not 0: helpers leave
    ARENAS = 4
    FREE = 5            # written by free_arena
    RUN = LINE_WORDS          # address of the RunRow that wants workers, or 0


class WorkerRow(IntEnum):
    """A worker (WORKER_WORDS words: three cache lines)."""
    WAKE_COUNT = 0            # counts the times that helpers were woken; the futex that a helper sleeps on
    ASLEEP = 1
    INSIDE = LINE_WORDS       # address of the RunRow that it may be reading or writing, or 0 (a hazard pointer)
    DONE = 2 * LINE_WORDS     # chunks run
    REPEATED = 2 * LINE_WORDS + 1     # chunks run again because they were late


STEP_WORDS = CHUNK_WORDS = STATUS_WORDS = LINE_WORDS
RUN_WORDS = CONTROL_WORDS = 2 * LINE_WORDS
WORKER_WORDS = 3 * LINE_WORDS
