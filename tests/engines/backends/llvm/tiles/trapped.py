"""Runs plans and kernels on a TileMachine, in a subprocess without permission to use tile registers.

    result, = run_trapped([PlanJob(path, feeds)], folder)
    result.outputs, result.counts

Importing this module requests no permission. Permission is lost by exec, so that the subprocess has none even if its
parent does.
"""
from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.engines import load_engine
from infer_server.engines.backends.llvm.runtime.abi import KERNEL
from infer_server.engines.backends.llvm.runtime.elf import LoadedCode
from infer_server.engines.backends.llvm.tuning.timing import aligned
from infer_server.engines.machine import cpu, tiles
from tests.engines.backends.llvm.tiles.machine import TileError, TileMachine, trapping

Arrays = Mapping[str, NDArray[Any]]
_GET_PERMITTED = 0x1022


@dataclass(frozen=True)
class PlanJob:
    """Run of a plan file on feeds."""
    path: Path
    feeds: Arrays

    def run(self, counts: Counter[str]) -> Arrays:
        engine = load_engine(self.path, on_target_mismatch="refuse")
        with TileMachine() as machine:
            machine.counts = counts
            return engine.run(self.feeds)


@dataclass(frozen=True)
class KernelJob:
    """Call of a kernel's object on aligned copies of operands; the outputs are these copies.

    execute: False to count the tile instructions only, which then compute nothing.
    """
    code: bytes
    symbol: str
    operands: Sequence[NDArray[Any]]
    rows: int = 1                   # of the grid
    columns: int = 1
    execute: bool = True

    def run(self, counts: Counter[str]) -> Arrays:
        memory = [aligned(array) for array in self.operands]
        table = np.array([array.ctypes.data for array in memory], np.uintp)
        code = LoadedCode([self.code])
        with TileMachine(self.execute) as machine:
            machine.counts = counts
            KERNEL(code.addresses[self.symbol])(table.ctypes.data, 0, self.rows, 0, self.columns)
        return {str(number): array for number, array in enumerate(memory)} if self.execute else {}


Job = PlanJob | KernelJob


@dataclass(frozen=True)
class Result:
    """Outputs of a job, the executed tile instructions, and what a CPU would have refused."""
    outputs: Arrays = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    error: str = ""

    def check(self) -> None:
        """Raise TileError if a CPU would have refused an instruction."""
        if self.error:
            raise TileError(self.error)


def run_trapped(jobs: Sequence[Job], folder: Path) -> list[Result]:
    """Run the jobs in a subprocess, which exchanges pickles with this one through files in `folder`."""
    given, results = folder / "jobs.pickle", folder / "results.pickle"
    given.write_bytes(pickle.dumps(jobs))
    done = subprocess.run([sys.executable, "-m", __name__, str(given), str(results)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[Result] = pickle.loads(results.read_bytes())
    return found


def _run(job: Job) -> Result:
    counts: Counter[str] = Counter()
    try:
        return Result(job.run(counts), counts)
    except TileError as error:
        return Result(counts=counts, error=str(error))


def _load_trapping_code() -> None:
    """Let the loader make every tile instruction trap."""
    load = LoadedCode.__init__
    LoadedCode.__init__ = lambda self, objects: load(self, [trapping(code) for code in objects])    # type: ignore


def _pretend_tiles() -> None:
    """Let plans for CPUs with AMX load, without the request for permission of cpu.detect."""
    error, permitted = tiles._arch_prctl(_GET_PERMITTED, 0)
    assert error or permitted & tiles._BOTH != tiles._BOTH, "this process may use tile registers"
    tiles.tile_refusal = lambda: ""             # type: ignore[assignment]
    found = cpu.detect()
    names = {"amx_tile", "amx_int8", "amx_bf16", "amx_fp16"}
    pretended = replace(found, features=found.features | names)
    cpu.detect = lambda: pretended              # type: ignore[assignment]


if __name__ == "__main__":
    _pretend_tiles()
    _load_trapping_code()
    with open(sys.argv[1], "rb") as file:
        # Under the name by which the parent imports this module, whose classes the pickles hold.
        from tests.engines.backends.llvm.tiles import trapped
        work = pickle.load(file)
    Path(sys.argv[2]).write_bytes(pickle.dumps([trapped._run(job) for job in work]))
