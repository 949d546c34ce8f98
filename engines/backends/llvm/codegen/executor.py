"""Executor of plans as emitted code: between the first step and the last no Python runs, and no lock is held.

    run_steps(steps, operands, first, last, batch)      one thread: each kernel over its whole grid
    run_chunks(control, run)                            the caller, with helpers: publish, wake, work, wait for the end
    help(control, worker)                               main loop of a helper: wait, work, until it is told to stop
    stop_helpers(control)                               end the helper threads
    free_arena(control)                                 find an arena that no helper uses
    ticks(out)                                          the clock of StatusRow.STARTED and of the limits

The workers of a pool run a list of chunks. In each step every worker has a contiguous part; it runs its own part
upwards, then takes chunks from the tails of the others' (Blumofe and Leiserson, "Scheduling Multithreaded Computations
by Work Stealing", 1999).

    for stage in stages:
        ensure the dependencies of the whole stage
        for part in own part, the others':
            for chunk in part that is not claimed:
                ensure the chunk's dependencies; claim it; run it

    ensure: for each chunk: until it is done: run it again if it is late

A worker leaves a stage when all its chunks are claimed, and claims a chunk when all its dependencies are done. So the
chunks that `ensure` waits for are always claimed and ready to run: a thread that the system has descheduled delays
nobody, because its late chunk is run again. That is safe because a chunk only reads data that no later chunk of the
request overwrites (each buffer has its own memory), and because a thread that resumes writes the very same bytes, or
writes into an arena that is not reused while a hazard pointer (Michael, "Hazard Pointers", 2004) marks it.

All states are stamped with the epoch of the run, so nothing is cleared between runs.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.runtime.abi import (
    CHUNK_WORDS,
    CONTROL_WORDS,
    STATUS_WORDS,
    STEP_WORDS,
    WORD,
    WORKER_WORDS,
    ChunkRow,
    ControlRow,
    RunRow,
    StageRow,
    StatusRow,
    StepRow,
    WorkerRow,
)
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import I32, I64, PTR
from infer_server.engines.errors import ConfigError

_CLOCK = "llvm.readcyclecounter"
# User programs cannot read aarch64's cycle counter, and LLVM has no intrinsic for the timer that they can read.
_ARM_CLOCK = """declare i64 @llvm.read_volatile_register.i64(metadata)
define internal i64 @emulated.readcyclecounter() {
  %ticks = call i64 @llvm.read_volatile_register.i64(metadata !0)
  ret i64 %ticks
}
!0 = !{!"cntvct_el0"}"""


@dataclass(frozen=True)
class _Machine:
    """Differences between architectures."""
    futex: int                              # number of the system call
    pause: str                              # intrinsic for spin loops
    pause_arguments: tuple[int, ...] = ()
    emulation: Mapping[str, str] = field(default_factory=dict)


_MACHINES = {
    "x86_64": _Machine(202, "llvm.x86.sse2.pause"),
    "aarch64": _Machine(98, "llvm.aarch64.hint", (1,), {_CLOCK: _ARM_CLOCK}),
}
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129


@cache
def scheduler_object(isa: Isa) -> bytes:
    """Return the executor as an ELF object for the machine of `isa`; Plan.code holds it like any kernel."""
    from infer_server.engines.backends.llvm.codegen.compile import compile_object
    return compile_object(scheduler_text(isa), isa)


def scheduler_text(isa: Isa) -> str:
    """Return the executor's LLVM IR.

    Raises
    ------
    ConfigError
        System calls and clock of the architecture are unknown here.
    """
    architecture = (isa.triple or _host_triple()).partition("-")[0]
    if architecture not in _MACHINES:
        raise ConfigError(f"no executor for {architecture}; supported architectures: {', '.join(_MACHINES)}")
    machine = _MACHINES[architecture]
    module = Module(dict(machine.emulation))
    _emit_run_steps(module)
    _PoolFunctions(module, machine).emit()
    return module.text()


def _host_triple() -> str:
    import llvmlite.binding as llvm
    return str(llvm.get_process_triple())


# ---- access to words of a table
def _word(row: Value, word: IntEnum, type_: str = I64) -> Value:
    return row.f.load(type_, row + word * WORD, align=WORD, hint=word.name.lower())


def _load(row: Value, word: IntEnum, order: str) -> Value:
    """Emit an atomic load; order: monotonic, acquire or seq_cst."""
    text = f"load atomic i64, {row + word * WORD} {order}, align {WORD}"
    return row.f.op(I64, text, word.name.lower())


def _store(row: Value, word: IntEnum, value: Value | int, order: str) -> None:
    address = row + word * WORD
    stored = value if isinstance(value, Value) else row.f.constant(value, I64)
    row.f.write(f"store atomic {stored}, {address} {order}, align {WORD}")


def _modify(row: Value, word: IntEnum, operation: str, value: Value | int, order: str) -> Value:
    """Emit an atomic exchange (xchg) or addition (add) of a word, and return its old value."""
    address = row + word * WORD
    operand = value if isinstance(value, Value) else row.f.constant(value, I64)
    return row.f.op(I64, f"atomicrmw {operation} {address}, {operand} {order}, align {WORD}", "before")


def _count(row: Value, word: IntEnum) -> None:
    """Increment a counter that only this thread writes."""
    _store(row, word, _load(row, word, "monotonic") + 1, "monotonic")


def _address(number: Value) -> Value:
    return number.f.cast("inttoptr", number, PTR, "address")


def _row(table: Value, index: Value | int, words: int) -> Value:
    return table + index * (words * WORD)


@contextmanager
def _repeat(f: Function, name: str) -> Iterator[Callable[[Value], None]]:
    """Emit an endless loop; it yields a function that leaves the loop if a test (an i1) holds."""
    label = f.fresh(name)
    f.write(f"br label %{label}")
    f.begin(label)
    f.depth += 1

    def leave(test: Value) -> None:
        stay = f.fresh(f"{name} on")
        f.write(f"br {test}, label %{label}.end, label %{stay}")
        f.begin(stay)

    yield leave
    f.write(f"br label %{label}")
    f.depth -= 1
    f.begin(f"{label}.end")


def _run_kernel(row: Value, kind: type[StepRow] | type[ChunkRow], operands: Value, *bounds: Value) -> None:
    function, offset = _word(row, kind.FUNCTION, PTR), _word(row, kind.OPERANDS)
    row.f.write(f"call void {function.name}({operands + offset}, {', '.join(map(str, bounds))})")


# ---- one thread
def _emit_run_steps(module: Module) -> None:
    f = module.function("run_steps", steps=PTR, operands=PTR, first=I64, last=I64, batch=I64)
    steps, operands, first, last, batch = f.parameters.values()
    for i in f.range("step", first, last):
        row = _row(steps, i, STEP_WORDS)
        rows = _word(row, StepRow.ROWS_PER_ITEM) * batch + _word(row, StepRow.ROWS)
        zero = f.constant(0, I64)
        _run_kernel(row, StepRow, operands, zero, rows, zero, _word(row, StepRow.COLUMNS))


# ---- a pool of workers
class _PoolFunctions:
    """Emitter of the functions of a worker pool, for one architecture."""

    def __init__(self, module: Module, machine: _Machine) -> None:
        self.module, self.machine = module, machine

    def emit(self) -> None:
        self._emit_ticks()
        self._emit_execute()
        self._emit_ensure()
        self._emit_take()
        self._emit_work()
        self._emit_ring()
        self._emit_run_chunks()
        self._emit_stop()
        self._emit_help()
        self._emit_free_arena()

    def now(self, f: Function) -> Value:
        return f.call(I64, _CLOCK, hint="now")

    def breathe(self, f: Function) -> None:
        f.run(self.machine.pause, *(f.constant(a, I32) for a in self.machine.pause_arguments))

    def system(self, f: Function, control: Value, wake_count: Value, operation: int, value: Value) -> None:
        """Call futex(wake_count, operation, value) without timeout.

        Errors are ignored: the caller checks the state again.
        """
        syscall = _word(control, ControlRow.SYSCALL, PTR)
        arguments = f"i64 {self.machine.futex}, {wake_count}, i64 {operation}, {value}, ptr null"
        f.op(I64, f"call i64 (i64, ...) {syscall.name}({arguments})", "result")

    def _emit_ticks(self) -> None:
        f = self.module.function("ticks", out=PTR)
        f.store(self.now(f), f.parameters["out"], WORD)

    def _emit_execute(self) -> None:
        """Emit `execute`, which runs chunk `index`, even if it has been run before."""
        f = self.module.function("execute", internal=True, run=PTR, index=I64)
        run, index = f.parameters.values()
        chunk = _row(_word(run, RunRow.CHUNKS, PTR), index, CHUNK_WORDS)
        status = _row(_word(run, RunRow.STATUS, PTR), index, STATUS_WORDS)
        _store(status, StatusRow.STARTED, self.now(f), "monotonic")
        bounds = (ChunkRow.ROW_BEGIN, ChunkRow.ROW_END, ChunkRow.COLUMN_BEGIN, ChunkRow.COLUMN_END)
        _run_kernel(chunk, ChunkRow, _word(run, RunRow.OPERANDS, PTR), *(_word(chunk, bound) for bound in bounds))
        _store(status, StatusRow.DONE, _word(run, RunRow.EPOCH), "release")

    def _emit_ensure(self) -> None:
        """Emit `ensure`, which returns when the chunks of pairs first..last - 1 are done."""
        f = self.module.function("ensure", internal=True, run=PTR, first=I64, last=I64, worker=PTR)
        run, first, last, worker = f.parameters.values()
        epoch, statuses, chunks, depends = (_word(run, RunRow.EPOCH), _word(run, RunRow.STATUS, PTR),
                                            _word(run, RunRow.CHUNKS, PTR), _word(run, RunRow.DEPENDS, PTR))
        for pair in f.range("pair", first, last):
            begin = f.load(I64, depends + pair * (2 * WORD), WORD, "begin")
            end = f.load(I64, depends + pair * (2 * WORD) + WORD, WORD, "end")
            for index in f.range("chunk", begin, end):
                status = _row(statuses, index, STATUS_WORDS)
                limit = _word(_row(chunks, index, CHUNK_WORDS), ChunkRow.LIMIT)
                with _repeat(f, "wait") as leave:
                    leave(_load(status, StatusRow.DONE, "acquire").compare("eq", epoch))
                    age = self.now(f) - _load(status, StatusRow.STARTED, "monotonic")
                    with f.when(age.compare("sgt", limit)):
                        # Acquire: makes the chunk's dependencies, done before it was claimed, visible to this thread.
                        _load(status, StatusRow.CLAIM, "acquire")
                        f.run("execute", run, index)
                        _count(worker, WorkerRow.REPEATED)
                    self.breathe(f)

    def _emit_take(self) -> None:
        """Emit `take`, which runs chunk `index` unless it is claimed, once its dependencies are done."""
        f = self.module.function("take", internal=True, run=PTR, index=I64, worker=PTR)
        run, index, worker = f.parameters.values()
        epoch, chunks = _word(run, RunRow.EPOCH), _word(run, RunRow.CHUNKS, PTR)
        status = _row(_word(run, RunRow.STATUS, PTR), index, STATUS_WORDS)
        with f.when(_load(status, StatusRow.CLAIM, "monotonic").compare("ne", epoch)):
            first, last = (_word(_row(chunks, i, CHUNK_WORDS), ChunkRow.DEPENDS) for i in (index, index + 1))
            f.run("ensure", run, first, last, worker)
            # Stamp before the claim, so that nobody sees a claimed chunk with an old start time and takes it for late.
            _store(status, StatusRow.STARTED, self.now(f), "monotonic")
            with f.when(_modify(status, StatusRow.CLAIM, "xchg", epoch, "acq_rel").compare("ne", epoch)):
                f.run("execute", run, index)
                _count(worker, WorkerRow.DONE)

    def _emit_work(self) -> None:
        """Emit `work`, which takes part in stages first..last - 1.

        `number` is the worker, which decides on its own part.
        """
        f = self.module.function("work", internal=True, run=PTR, first=I64, last=I64, number=I64, worker=PTR)
        run, first, last, number, worker = f.parameters.values()
        stages, stage_bytes = _word(run, RunRow.STAGES, PTR), _word(run, RunRow.STAGE_BYTES)
        workers, zero = _word(run, RunRow.WORKERS), f.constant(0, I64)
        for stage in f.range("stage", first, last):
            row = stages + stage * stage_bytes
            f.run("ensure", run, _word(row, StageRow.DEPENDS_BEGIN), _word(row, StageRow.DEPENDS_END), worker)
            with f.when(number.compare("eq", 0)):
                # All chunks of earlier stages are claimed, so a helper that wakes late may begin at this stage.
                _store(run, RunRow.STAGE, stage, "release")
            for turn in f.range("part", zero, workers):
                part = row + ((number + turn).remainder(workers) + StageRow.PARTS) * WORD
                begin, end = f.load(I64, part, WORD, "begin"), f.load(I64, part + WORD, WORD, "end")
                own = turn.compare("eq", 0)
                for offset in f.range("chunk", zero, end - begin):
                    f.run("take", run, f.select(own, begin + offset, end - 1 - offset), worker)

    def _emit_ring(self) -> None:
        """Emit `wake`, which wakes all helpers, with a system call only for those that sleep."""
        f = self.module.function("wake", internal=True, control=PTR)
        control, = f.parameters.values()
        for number in f.range("worker", f.constant(1, I64), _word(control, ControlRow.WORKERS)):
            worker = _row(control + CONTROL_WORDS * WORD, number, WORKER_WORDS)
            _modify(worker, WorkerRow.WAKE_COUNT, "add", 1, "seq_cst")
            with f.when(_load(worker, WorkerRow.ASLEEP, "seq_cst").compare("ne", 0)):
                self.system(f, control, worker + WorkerRow.WAKE_COUNT * WORD, _FUTEX_WAKE_PRIVATE, f.constant(1, I64))

    def _emit_stop(self) -> None:
        f = self.module.function("stop_helpers", control=PTR)
        control, = f.parameters.values()
        _store(control, ControlRow.STOP, 1, "seq_cst")
        f.run("wake", control)

    def _emit_run_chunks(self) -> None:
        f = self.module.function("run_chunks", control=PTR, run=PTR)
        control, run = f.parameters.values()
        _store(run, RunRow.STAGE, 0, "monotonic")
        _store(control, ControlRow.RUN, f.cast("ptrtoint", run, I64, "run"), "seq_cst")
        f.run("wake", control)
        zero = f.constant(0, I64)
        # One stage more than the helpers run: the last one waits for chunks that no other chunk depends on.
        f.run("work", run, zero, _word(run, RunRow.STAGE_COUNT) + 1, zero, control + CONTROL_WORDS * WORD)
        _store(control, ControlRow.RUN, 0, "seq_cst")

    def _emit_help(self) -> None:
        f = self.module.function("help", control=PTR, number=I64)
        control, number = f.parameters.values()
        worker = _row(control + CONTROL_WORDS * WORD, number, WORKER_WORDS)
        seen = f.op(PTR, f"alloca i64, align {WORD}", "seen")
        since = f.op(PTR, f"alloca i64, align {WORD}", "since")
        f.store(f.constant(0, I64), seen, WORD)
        with _repeat(f, "life") as leave_life:
            f.store(self.now(f), since, WORD)
            with _repeat(f, "listen") as leave:
                leave(_load(worker, WorkerRow.WAKE_COUNT, "acquire").compare("ne", f.load(I64, seen, WORD)))
                self.breathe(f)
                idle = self.now(f) - f.load(I64, since, WORD)
                with f.when(idle.compare("sgt", _word(control, ControlRow.SPIN))):
                    self._sleep(f, control, worker, f.load(I64, seen, WORD))
                    f.store(self.now(f), since, WORD)
            f.store(_load(worker, WorkerRow.WAKE_COUNT, "acquire"), seen, WORD)
            leave_life(_load(control, ControlRow.STOP, "acquire").compare("ne", 0))
            self._join_run(f, control, number, worker)

    def _sleep(self, f: Function, control: Value, worker: Value, seen: Value) -> None:
        """Sleep unless woken meanwhile.

        The waker increments WAKE_COUNT, then reads ASLEEP; this thread sets ASLEEP, then reads WAKE_COUNT. One of the
        two sees the other's write.
        """
        _modify(worker, WorkerRow.ASLEEP, "xchg", 1, "seq_cst")
        with f.when(_load(worker, WorkerRow.WAKE_COUNT, "seq_cst").compare("eq", seen)):
            self.system(f, control, worker + WorkerRow.WAKE_COUNT * WORD, _FUTEX_WAIT_PRIVATE, seen)
        _store(worker, WorkerRow.ASLEEP, 0, "seq_cst")

    def _join_run(self, f: Function, control: Value, number: Value, worker: Value) -> None:
        """Work on the published run.

        The hazard pointer is set first; if the run is still published then, it stays valid.
        """
        wanted = _load(control, ControlRow.RUN, "seq_cst")
        with f.when(wanted.compare("ne", 0)):
            _modify(worker, WorkerRow.INSIDE, "xchg", wanted, "seq_cst")
            with f.when(_load(control, ControlRow.RUN, "seq_cst").compare("eq", wanted)):
                run = _address(wanted)
                f.run("work", run, _load(run, RunRow.STAGE, "acquire"), _word(run, RunRow.STAGE_COUNT), number, worker)
            _store(worker, WorkerRow.INSIDE, 0, "release")

    def _emit_free_arena(self) -> None:
        """Emit `free_arena`, which sets ControlRow.FREE to the first arena without a helper.

        There are more arenas than helpers.
        """
        f = self.module.function("free_arena", control=PTR)
        control, = f.parameters.values()
        zero, one = f.constant(0, I64), f.constant(1, I64)
        free = {"arena": zero}
        workers = _word(control, ControlRow.WORKERS)
        # Try the arenas from the last to the first, so that the first free one remains.
        arenas = _word(control, ControlRow.ARENAS)
        for turn in f.range("arena", zero, arenas, free=free):
            arena = arenas - 1 - turn
            taken = {"count": zero}
            for number in f.range("worker", one, workers, taken=taken):
                worker = _row(control + CONTROL_WORDS * WORD, number, WORKER_WORDS)
                inside = _load(worker, WorkerRow.INSIDE, "seq_cst")
                # A helper outside any run reads word 0 of the control block instead, and is not counted.
                outside = inside.compare("eq", 0)
                run = f.select(outside, control, _address(inside))
                here = _word(run, RunRow.ARENA).compare("eq", arena)
                hit = f.select(outside, zero, f.cast("zext", here, I64, "here"))
                taken["count"] = taken["count"] + hit
            free["arena"] = f.select(taken["count"].compare("eq", 0), arena, free["arena"])
        _store(control, ControlRow.FREE, free["arena"], "monotonic")
