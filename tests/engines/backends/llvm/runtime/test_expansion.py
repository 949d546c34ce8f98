"""Constants that kernels expand from others when a plan is loaded."""
from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.compile import compile_object
from infer_server.engines.backends.llvm.kernels.kernel import begin_kernel
from infer_server.engines.backends.llvm.runtime import expansion
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.codegen.types import I32
from infer_server.engines.errors import PlanCorruptError
from infer_server.engines.plan.file import read_plan, write_plan
from infer_server.engines.plan.plan import EXPANDED, ExpandedConstant, Operand, Plan
from infer_server.engines.plan.verification import verify
from infer_server.engines.runtime.engine import Engine
from tests.engines.tiny import ISA, halo_plan

ROWS, COLUMNS = 7, 5
KEPT = np.arange(ROWS * COLUMNS, dtype=np.int32)
X = np.zeros((1, 2, 4), np.int32)


@cache
def thrice_object() -> bytes:
    """Return code for made[column, row] += 3 * kept[column, row] + 1: a repeated chunk gives a wrong result."""
    module = Module()
    f, (kept, made), (row_begin, row_end, column_begin, column_end) = begin_kernel(module, "thrice", 2)
    for column in f.range("column", column_begin, column_end):
        for row in f.range("row", row_begin, row_end):
            here = (column * ROWS + row) * 4
            f.store(f.load(I32, made + here, 4) + f.load(I32, kept + here, 4) * 3 + 1, made + here, 4)
    return compile_object(module.text(), ISA)


def derived_plan(**changes: object) -> Plan:
    """Return a plan for y = x + element 5 of 35 derived constants, in the tensor with a halo of -7."""
    plan = halo_plan()
    made = replace(ExpandedConstant("thrice", 64, 128, KEPT.nbytes, ROWS, COLUMNS, "layer"), **changes)      # type: ignore[arg-type]
    step = replace(plan.machine.steps[0], operands=(Operand(0), Operand(EXPANDED, 128 + 4 * 4), Operand(1, 4)))
    return plan.with_machine(steps=(step,), constants=bytes(64) + KEPT.tobytes(), expanded=(made,),
                             code=(*plan.machine.code, thrice_object()))


def test_a_step_reads_what_was_made(tmp_path: Path) -> None:
    write_plan(derived_plan(), tmp_path / "m.plan")
    read = read_plan(tmp_path / "m.plan")
    assert read.machine.expanded == derived_plan().machine.expanded and read.machine.expanded_bytes == 128 + KEPT.nbytes
    for plan in (derived_plan(), read):
        assert Engine(plan).run({"x": X})["y"][0, 0].tolist() == [-7, 13, 13, 13, 13, -7]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("piece", [1 << 20, 64, 20, 4])
def test_every_place_is_made_once_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch, threads: int,
                                                        piece: int) -> None:
    monkeypatch.setattr(expansion, "PIECE", piece)
    plan = derived_plan()
    constants = np.frombuffer(plan.machine.constants, np.uint8)
    memory = expansion.expand(plan.machine, LoadedPlan(plan).kernel, constants.ctypes.data, threads)
    assert memory.bytes[128:].view(np.int32).tolist() == (3 * KEPT + 1).tolist()
    assert not memory.bytes[:128].any()


@pytest.mark.parametrize(("plan", "message"), [
    (derived_plan(symbol="four"), "a constant of 'layer' needs 'four', which the plan's code does not define"),
    (derived_plan(source=1000), "the constant of 'layer' is made of byte 1000 of 204"),
    (derived_plan(offset=-64), "the constant of 'layer'"),
    (derived_plan(bytes=0, offset=0), "operand at byte 144 of 0"),
])
def test_what_does_not_fit_is_named(plan: Plan, message: str) -> None:
    assert verify(derived_plan())
    with pytest.raises(PlanCorruptError, match=message):
        Engine(plan)
