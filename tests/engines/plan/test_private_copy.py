"""An engine copies its weights from the plan file, and frees them when it is dropped."""
from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infer_server.engines import load_engine
from infer_server.engines.errors import PlanCorruptError
from infer_server.engines.plan import checksums
from infer_server.engines.plan.checksums import BLOCK
from infer_server.engines.plan.file import read_plan, write_plan
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime import engine
from tests.engines.tiny import halo_plan

LARGE = 64 << 20


def plan_of(constant: int, size: int = 4 * BLOCK) -> Plan:
    """Return a plan for y = x + constant with `size` bytes of constants, no two pages alike."""
    constants = np.random.default_rng(constant).integers(0, 1 << 30, size // 4, np.int32)
    constants[16] = constant
    return halo_plan().with_machine(constants=constants.tobytes())


def run_python(program: str, *arguments: object) -> str:
    """Run a program in a new process and return its output."""
    result = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True,
                            check=False, timeout=120, cwd=Path(engine.__file__).parents[3])
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stderr}"
    return result.stdout


UNDER_LOAD = """
import shutil, sys, threading
import numpy as np
from infer_server.engines import load_engine
path, other = sys.argv[1:]
engine = load_engine(path)
answers, done = set(), threading.Event()

def load():
    while not done.is_set():
        answers.add(int(engine.run({"x": np.zeros((1, 2, 4), np.int32)})["y"][0, 0, 1]))

threads = [threading.Thread(target=load) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(5):
    shutil.copyfile(other, path)                # cp: the file is truncated, then written
    with open(path, "r+b") as file:             # dd conv=notrunc, rsync --inplace
        file.write(bytes(1 << 20))
    open(path, "w").close()                     # : > file
done.set()
for thread in threads:
    thread.join()
load_again = engine.create_context()
load_again.execute(1)
answers.add(int(load_again.output("y")[0, 0, 1]) + 5)
print(answers)
"""


def test_a_plan_that_is_copied_over_written_in_place_or_emptied_runs_on_unchanged(tmp_path: Path) -> None:
    write_plan(plan_of(5), tmp_path / "m.plan")
    write_plan(plan_of(6), tmp_path / "other.plan")
    # The context that was made afterwards has an input of zeros too.
    assert run_python(UNDER_LOAD, tmp_path / "m.plan", tmp_path / "other.plan").strip() in ("{5, 10}", "{10, 5}")


@pytest.fixture
def while_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Callable[[], object]], None]]:
    """Call a function between two of the reads that copy the file."""
    def arrange(at: int, change: Callable[[], object]) -> None:
        reads = iter(range(at + 1))

        def preadv(*arguments: object) -> int:
            if next(reads, None) == at:
                change()
            return read(*arguments)     # type: ignore[arg-type]

        read = os.preadv
        monkeypatch.setattr(checksums.os, "preadv", preadv)

    yield arrange


@pytest.mark.parametrize("at", [0, 1, 3, 4])
def test_a_plan_that_changes_while_it_is_read_is_the_old_one_or_refused(
        tmp_path: Path, while_read: Callable[[int, Callable[[], object]], None], at: int) -> None:
    path = tmp_path / "m.plan"
    write_plan(plan_of(6), path)
    new = path.read_bytes()
    write_plan(plan_of(5), path)

    def write_in_place() -> None:
        with open(path, "r+b") as file:
            file.write(new)

    while_read(at, write_in_place)
    if at == 4:         # the constants are copied, and the rest is alike
        assert bytes(read_plan(path).machine.constants) == plan_of(5).machine.constants
    else:
        with pytest.raises(PlanCorruptError, match="section 'constants'.* has a wrong checksum"):
            read_plan(path)


def test_a_plan_that_is_cut_short_while_it_is_read_is_refused(
        tmp_path: Path, while_read: Callable[[int, Callable[[], object]], None]) -> None:
    write_plan(plan_of(5), tmp_path / "m.plan")
    while_read(2, lambda: os.truncate(tmp_path / "m.plan", 5000))
    with pytest.raises(PlanCorruptError, match="cut short while it was read, the file ends at byte"):
        read_plan(tmp_path / "m.plan")


@pytest.mark.parametrize("threads", [1, 3])
def test_a_dropped_engine_is_gone_at_once_without_the_collector(tmp_path: Path, threads: int) -> None:
    write_plan(plan_of(5), tmp_path / "m.plan")
    gc.collect()
    gc.disable()
    try:
        engine = load_engine(tmp_path / "m.plan", threads)
        context = engine.create_context()
        context.execute(1)
        context.profile()
        engine.run({"x": np.zeros((2, 2, 4), np.int32)})
        program = engine.executor._first._loaded.program
        gone = [weakref.ref(part) for part in (engine, engine.plan, program, program.program._code, program._constants,
                                               context, context.execution)]
        del engine, context, program
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()


ROUNDS = """
import gc, sys
import numpy as np
from infer_server.engines import load_engine
gc.disable()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def load():
    engine = load_engine(sys.argv[1])
    engine.run({"x": np.zeros((1, 2, 4), np.int32)})
    return resident()

first = load()
rounds = [load() for _ in range(20)]
print(first, max(rounds), resident())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not tell what is resident")
def test_loading_again_and_again_takes_the_memory_of_one_plan(tmp_path: Path) -> None:
    write_plan(plan_of(5, LARGE), tmp_path / "m.plan")
    first, most, last = map(int, run_python(ROUNDS, tmp_path / "m.plan").split())
    assert first > LARGE, "the weights are not where they are looked for"
    assert most < 1.1 * first
    assert last < first - 0.9 * LARGE


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="this system does not tell what may be written")
def test_nobody_may_write_to_the_weights_not_even_a_kernel(tmp_path: Path) -> None:
    write_plan(plan_of(5), tmp_path / "m.plan")
    engine = load_engine(tmp_path / "m.plan")
    address = engine.executor._first._loaded.program._constants.ctypes.data
    with open("/proc/self/maps") as maps:
        ranges = [(line.split()[1], *(int(end, 16) for end in line.split()[0].split("-"))) for line in maps]
    for at in (address, address + 4 * BLOCK - 1):
        assert [rights for rights, begin, end in ranges if begin <= at < end] == ["r--p"]


def test_what_was_read_is_written_again_as_the_same_file(tmp_path: Path) -> None:
    write_plan(plan_of(5), tmp_path / "m.plan")
    write_plan(read_plan(tmp_path / "m.plan"), tmp_path / "again.plan")
    assert (tmp_path / "again.plan").read_bytes() == (tmp_path / "m.plan").read_bytes()


def with_weights(constant: int) -> Plan:
    return replace(plan_of(constant), weights={"w": np.full(LARGE // 4, constant, np.int32)})


def test_weights_are_read_when_they_are_asked_for_and_are_not_in_memory_before(tmp_path: Path) -> None:
    write_plan(with_weights(5), tmp_path / "m.plan")
    assert os.path.getsize(tmp_path / "m.plan") > LARGE
    first, most, last = map(int, run_python(ROUNDS, tmp_path / "m.plan").split())
    assert most - last < 0.5 * LARGE, "they were read with the rest"
    with open(tmp_path / "m.plan", "r+b") as file:      # damaged, and nobody minds who does not ask
        file.seek(-LARGE // 2, os.SEEK_END)
        file.write(b"damage")
    plan = read_plan(tmp_path / "m.plan")
    with pytest.raises(PlanCorruptError, match="section 'weights'.* has a wrong checksum"):
        plan.weights["w"]


def test_weights_are_those_of_the_file_that_was_loaded_though_it_was_replaced_or_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "m.plan"
    write_plan(with_weights(5), path)
    plans = [read_plan(path) for _ in range(3)]
    write_plan(with_weights(6), path)
    assert plans[0].weights["w"][0] == 5 and read_plan(path).weights["w"][0] == 6
    path.unlink()
    assert plans[1].weights["w"][0] == 5
    if os.path.exists("/proc/self/fd"):
        with_it = open_files(path)
        del plans[2]
        gc.collect()
        assert open_files(path) == with_it - 1


def open_files(path: Path) -> int:
    """Return the number of file descriptors that were opened by this path, even if it was deleted."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):         # it is closed meanwhile
            found += os.readlink(descriptor).startswith(str(path))
    return found
