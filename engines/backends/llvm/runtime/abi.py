"""Interface between Python and emitted code: tables of i64 words that Python writes, with a name for each word.

loaded.py, chunks.py and workers.py fill the tables, with addresses from elf.py and expansion.py; the code that
codegen/executor.py emits reads them. A row of a table is one or more cache lines, so that two threads never write to
one line.
"""
from __future__ import annotations

import ctypes
from enum import IntEnum

# Parameters of a kernel: address of its operand table, then the rows and the columns of its grid, each as begin, end.
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 4)
WORD = 8            # bytes
LINE_WORDS = 8      # words of a cache line


class StepRow(IntEnum):
    """One step of the plan (STEP_WORDS words)."""
    FUNCTION = 0        # address of the kernel; 0 for a fallback
    OPERANDS = 1        # byte offset into the context's operand table
    ROWS_PER_ITEM = 2
    ROWS = 3            # further rows that do not depend on the batch
    COLUMNS = 4


class ChunkRow(IntEnum):
    """Part of a step's grid (CHUNK_WORDS words). One extra row after the last chunk ends the last one's pairs."""
    FUNCTION = 0
    OPERANDS = 1
    ROW_BEGIN = 2
    ROW_END = 3
    COLUMN_BEGIN = 4
    COLUMN_END = 5
    LIMIT = 6           # ticks after which it is late
    DEPENDS = 7         # first pair that it waits for in addition to its stage's; the next row has the end


class StatusRow(IntEnum):
    """State of a chunk, in a cache line of its own. Stamps are epochs, so rows of older runs need no clearing."""
    DONE = 0            # epoch of the last run that finished it
    STARTED = 1         # ticks
    CLAIM = 2           # epoch of the last run in which a worker claimed it


class RunRow(IntEnum):
    """One run of a segment over one arena: all that a worker needs (RUN_WORDS words)."""
    ARENA = 0           # number of the arena
    EPOCH = 1           # number of this run; grows from run to run of a context
    STAGE = 2           # stage of the caller; all chunks of earlier ones are claimed
    CHUNKS = 3          # address of the chunk table
    STATUS = 4          # address of the status rows of this arena and segment
    OPERANDS = 5        # address of the arena's operand table
    STAGES = 6          # address of the stage table: a row for each step, and a last one that only waits
    STAGE_COUNT = 7     # stages without the last one
    STAGE_BYTES = 8     # bytes of a row of the stage table
    DEPENDS = 9         # address of the (first chunk, one past the last) pairs of stages and chunks
    WORKERS = 10        # the caller and its helpers


class StageRow(IntEnum):
    """A step for the workers: the pairs that all of it waits for, then the bounds of each worker's part."""
    DEPENDS_BEGIN = 0
    DEPENDS_END = 1
    PARTS = 2           # WORKERS + 1 chunk numbers


class ControlRow(IntEnum):
    """Worker pool of a context (CONTROL_WORDS words, then a WorkerRow for each worker, the caller first)."""
    WORKERS = 0
    SYSCALL = 1         # address of libc's syscall()
    SPIN = 2            # ticks that an idle helper spins before it sleeps
    STOP = 3            # not 0: helpers end
    ARENAS = 4
    FREE = 5            # written by free_arena
    RUN = LINE_WORDS          # address of the published RunRow, or 0


class WorkerRow(IntEnum):
    """A worker (WORKER_WORDS words: three cache lines)."""
    WAKE_COUNT = 0            # number of wake-ups; the futex that a helper sleeps on
    ASLEEP = 1
    INSIDE = LINE_WORDS       # address of the RunRow that it may be reading or writing, or 0 (a hazard pointer)
    DONE = 2 * LINE_WORDS     # chunks that it ran
    REPEATED = 2 * LINE_WORDS + 1     # late chunks that it ran again


STEP_WORDS = CHUNK_WORDS = STATUS_WORDS = LINE_WORDS
RUN_WORDS = CONTROL_WORDS = 2 * LINE_WORDS
WORKER_WORDS = 3 * LINE_WORDS
