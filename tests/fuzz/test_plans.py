"""Some hundred damaged plans are refused by name, or give the original plan's results."""
from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from infer_server.engines.loading import load_engine
from infer_server.engines.plan.file import read_plan, write_plan
from tests.engines.tiny import halo_plan
from tests.fuzz.plans import FINE, KINDS, WEIGHTS, feeds_of, fuzz, outcome, seeds
from tests.fuzz.worker import Worker

COUNT = 204         # damaged plans in total; each kind's share is its weight


def test_a_damaged_plan_is_refused_by_name_or_gives_the_right_answers(tmp_path: Path) -> None:
    results = [(kind, done, result, result.split(":")[0]) for kind, done, result in
               fuzz(seeds(tmp_path), COUNT, seed=0, folder=tmp_path)]
    assert not [result[:3] for result in results if result[3] not in FINE]
    refused = Counter(kind for kind, _, _, word in results if word == "refused")
    # What was not damaged would pass all of the above.
    assert all(refused[kind] > COUNT * WEIGHTS.get(kind, 1) / 17 / 4 for kind in KINDS), refused
    assert refused["flipped"] == refused["cut short"] == COUNT // 17


def end(how: str) -> str:
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "memory":
        return str(len(bytes(3 << 30)))
    raise KeyError(how)


def test_a_worker_tells_what_ended_it_and_another_one_goes_on() -> None:
    with Worker(end) as worker:
        for how, said in (("memory", "TRACEBACK: MemoryError"), ("crash", "CRASH"), ("other", "TRACEBACK: KeyError")):
            assert worker.ask(how).startswith(said)


def test_other_answers_are_told_from_right_ones(tmp_path: Path) -> None:
    path = tmp_path / "m.plan"
    write_plan(halo_plan(), path)
    feeds = [feeds_of(read_plan(path), 2)]
    right = [load_engine(path).run(feed) for feed in feeds]
    assert outcome(str(path), feeds, right) == "right"
    assert outcome(str(path), feeds, [{name: array + 1 for name, array in right[0].items()}]).startswith("WRONG")
