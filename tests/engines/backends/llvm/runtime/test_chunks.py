"""Tests of the partitioning of steps into chunks, and of the dependences between chunks."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from infer_server.engines.backends.llvm.runtime import chunks
from infer_server.engines.backends.llvm.runtime.abi import ChunkRow, StageRow
from infer_server.engines.backends.llvm.runtime.chunks import GridSplit, make_schedule, rows_awaited, split_grid
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.plan.plan import Footprint, Step
from tests.engines.tiny import mix_plan


@pytest.mark.parametrize("workers", [2, 3, 7])
@pytest.mark.parametrize("us", [1.0, 40.0, 1e5])
def test_pieces_cover_a_grid_exactly_once(workers: int, us: float) -> None:
    rng = np.random.default_rng(workers)
    for _ in range(60):
        row_step, column_step = int(rng.integers(1, 6)), int(rng.choice([1, 16, 64]))
        step = Step("k", (), rows_per_item=int(rng.integers(0, 30)), rows=int(rng.integers(0, 20)), row_step=row_step,
                    columns=int(rng.integers(1, 200)), column_step=column_step,
                    constant_bytes=int(rng.choice([0, 1 << 20])))
        batch = int(rng.integers(1, 5))
        rows = step.rows_per_item * batch or step.rows
        covered = np.zeros((rows, step.columns), int)
        pieces = split_grid(step, batch, us, workers)
        assert len(pieces) < 2 * workers * chunks.PIECES_PER_WORKER
        for (r0, r1), (c0, c1) in pieces.pieces():
            assert r0 % row_step == 0 and c0 % column_step == 0 and r0 < r1 and c0 < c1
            covered[r0:r1, c0:c1] += 1
        assert (covered == 1).all(), step


def test_large_weights_are_cut_by_columns_and_short_steps_not_at_all() -> None:
    step = Step("k", (), rows_per_item=56, columns=256, column_step=64)
    assert split_grid(step, 1, 1.0, 2) == GridSplit(((0, 56),), ((0, 256),), True)
    assert split_grid(step, 1, 50.0, 2) == GridSplit(((0, 28), (28, 56)), ((0, 256),), True)
    large = Step("k", (), rows_per_item=56, columns=256, column_step=64, constant_bytes=1 << 20)
    assert split_grid(large, 1, 50.0, 2) == GridSplit(((0, 56),), ((0, 128), (128, 256)), False)


def test_many_workers_do_not_cut_a_step_into_crumbs() -> None:
    step = Step("k", (), rows_per_item=56)
    assert len(split_grid(step, 1, 10.0, 16)) == 4
    assert len(split_grid(step, 1, 400.0, 16)) == 16


def test_every_worker_gets_an_equal_share_if_either_axis_allows_it() -> None:
    seven_rows = Step("k", (), rows_per_item=7, columns=256, column_step=64)
    assert split_grid(seven_rows, 1, 50.0, 2) == GridSplit(((0, 7),), ((0, 128), (128, 256)), False)
    one_column = Step("k", (), rows_per_item=7, columns=256, column_step=256, constant_bytes=1 << 20)
    assert split_grid(one_column, 1, 50.0, 2) == GridSplit(((0, 3), (3, 7)), ((0, 256),), True)
    assert len(split_grid(Step("k", (), rows_per_item=56), 1, 110.0, 2)) == 6, "a multiple of the workers"


def random_reach(rng: np.random.Generator, period: int) -> Footprint:
    begin = int(rng.integers(-20, 20))
    stride, rows = int(rng.integers(0, 12)), int(rng.integers(1, 4))
    return Footprint(0, begin, begin + int(rng.integers(1, 40)), rows, stride, int(rng.choice([0, 7, 200])), period)


def bytes_of(footprint: Footprint, rows: range) -> set[int]:
    """Return the byte offsets of a footprint as engines/plan/plan.py defines them."""
    touched: set[int] = set()
    for row in rows:
        item, inside = divmod(row, footprint.period)
        at = item * footprint.item_stride + inside // footprint.rows * footprint.stride
        touched |= set(range(at + footprint.begin, at + footprint.end))
    return touched


def test_a_range_of_rows_waits_for_every_range_that_writes_what_it_reads() -> None:
    rng = np.random.default_rng(0)
    exact = 0
    for _ in range(200):
        periods, batch = rng.integers(1, 12, 2).tolist(), int(rng.integers(1, 4))
        steps = [Step("k", (), rows_per_item=period) for period in periods]
        writer, reader = (split_grid(step, batch, 1e3, 2) for step in steps)
        written, read = (random_reach(rng, period) for period in periods)
        awaited = rows_awaited([(read, written)], reader.rows, writer.rows)
        for mine, ranges in zip(reader.rows, awaited, strict=True):
            waits = {i for begin, end in ranges for i in range(begin, end)}
            needed = bytes_of(read, range(*mine))
            needs = {i for i, its in enumerate(writer.rows) if needed & bytes_of(written, range(*its))}
            assert needs <= waits
            exact += needs == waits
    assert exact > 500, "and mostly for no other"


def test_items_that_share_weights_do_not_make_a_step_long_enough_to_be_shared() -> None:
    """A step of 5 us is too short for two workers; four times 5 us are not."""
    plan = mix_plan([(0, 0)], [1])
    step = plan.machine.steps[0]
    alone, together = (make_schedule(program, program.segments[0], 4, 2, [5.0], 1.0) for program in (
        LoadedPlan(plan.with_machine(steps=(replace(step, further_item=share),))) for share in (1.0, 0.1)))
    assert alone is not None and together is None


def test_a_window_of_three_rows_waits_for_its_neighbours_only() -> None:
    """Two steps of 8 rows of 10 bytes, the second reading a row before and a row behind; 2 workers."""
    plan = mix_plan([(0, 0), (1, 1)], [2], rows=8, columns=1)
    written = Footprint(1, 0, 10, 1, 10, 80, 8)
    read = Footprint(1, -10, 20, 1, 10, 80, 8)
    steps = plan.machine.steps
    first, second = (Step("mix", steps[i].operands, rows_per_item=8, depends=depends, reads=reads, writes=writes)
                     for i, depends, reads, writes in ((0, (), (), (written,)), (1, (0,), (read,), ())))
    program = LoadedPlan(plan.with_machine(steps=(first, second)))
    found = make_schedule(program, program.segments[0], 1, 2, [100.0, 100.0], 1.0)
    assert found is not None
    assert found.stages[:2, StageRow.PARTS:StageRow.PARTS + 3].tolist() == [[0, 2, 4], [4, 6, 8]]
    bounds = found.chunks[4:, ChunkRow.DEPENDS]
    waits = [found.depends[begin:end].tolist() for begin, end in zip(bounds, bounds[1:], strict=False)]
    assert waits == [[[0, 2]], [[0, 3]], [[1, 4]], [[2, 4]]]
    assert (found.stages[:2, StageRow.DEPENDS_BEGIN] == found.stages[:2, StageRow.DEPENDS_END]).all(), "no barrier"
