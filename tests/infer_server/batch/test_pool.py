"""Worker processes: reports, errors, and workers that die."""
from __future__ import annotations

import os
import signal

import pytest

from infer_server.batch.pool import Pool, Report, WorkerDied
from infer_server.engines.errors import InputError


def work(task: str, report: Report) -> None:
    if task == "bad":
        raise InputError("bad task")
    if task == "gone":
        raise FileNotFoundError("gone task")
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    report((task, os.getpid()))


def test_tasks_are_done_once_each_by_processes_that_end() -> None:
    with Pool(work, 2) as pool:
        reports = list(pool.run(str(number) for number in range(9)))
        processes = list(pool._workers.values())
        with pytest.raises(InputError, match="bad task"):
            list(pool.run(["bad"]))
        with pytest.raises(FileNotFoundError, match="gone task"):
            list(pool.run(["gone"]))
        with pytest.raises(WorkerDied, match=r"exit code -9 \(killed; is there enough memory\?\); run"):
            list(pool.run(["die"]))
    assert sorted(task for task, _ in reports) == [str(number) for number in range(9)]
    assert os.getpid() not in {process for _, process in reports}
    assert all(process.exitcode is not None for process in processes)
