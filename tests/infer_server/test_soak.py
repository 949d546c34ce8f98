"""Accidents to one client do not affect the responses to others. scripts/soak runs the same for longer."""
from __future__ import annotations

import asyncio
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from scripts.soak.__main__ import OPTIONS, SERVER
from scripts.soak.clients import check
from scripts.soak.models import write_repository
from scripts.soak.run import Soak, arrivals
from scripts.stress import serving
from tests.infer_server.serving import FRONTS


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_repository(folder)
    return folder


@pytest.mark.parametrize("front", FRONTS)
def test_killed_clients_half_open_connections_and_reloads_cost_no_other_client_an_answer(
        repository: Path, front: str) -> None:
    with serving(repository, "--grpc-front", front, "--drain-grace-secs", "0", *OPTIONS, command=SERVER) as server:
        requested = Soak(1.0)
        asyncio.run(requested.run(server, repository))
        paced = Soak(1.0, rates=requested.share(0.5))
        asyncio.run(paced.run(server, repository))
    for soak in (requested, paced):
        assert not soak.failures()
        assert {"steady over gRPC", "reloaded over HTTP", "steady in shared memory", "chain over gRPC",
                "sum over gRPC, in sequences", "counted in streams", "digits over gRPC", "digits over HTTP",
                "digits in shared memory", "mortal over gRPC", "reloads", "killed clients", "half-open connections",
                "killed processes of models", "models that came and went"} <= set(soak.seen)


def test_a_share_of_what_was_answered_is_a_rate_of_each_client() -> None:
    soak = Soak(10.0)
    soak.clients.update({"a": 4, "b": 1})
    soak.seen.update({"a": 800, "b": 100, "reloads": 7})
    assert soak.share(0.5) == {"a": 10.0, "b": 5.0} and soak.answers == 900


def test_arrivals_are_at_random_times_whatever_answers_take_and_none_is_made_up_for_that_is_long_past() -> None:
    clock = [0.0]
    times = list(islice(arrivals(20.0, random.Random(0), lambda: clock[0]), 2000))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1) and gaps.std() == pytest.approx(1 / 20, rel=0.1)
    late = arrivals(1.0, random.Random(0), lambda: clock[0])
    assert next(late) < 10.0
    clock[0] = 1000.0
    assert next(late) == 990.0


def test_a_wrong_answer_is_seen() -> None:
    check(np.ones((1, 4), np.float32), np.ones((1, 4), np.float32))
    for wrong in (np.zeros((1, 4), np.float32), np.ones((4, 1), np.float32), np.full((1, 4), 1.01, np.float32)):
        with pytest.raises(ValueError, match="was expected"):
            check(wrong, np.ones((1, 4), np.float32))
