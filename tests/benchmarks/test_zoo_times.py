"""Tests of the results that benchmarks.zoo keeps, of the measurements left to do, and of its table."""
from __future__ import annotations

from pathlib import Path

import onnx

import benchmarks.zoo.__main__ as zoo
from benchmarks.runtimes.runtimes import OPENVINO, ORT
from benchmarks.zoo.trial import FLOAT, QDQ, Facts, Folder, PeerTimes, timed
from benchmarks.zoo.workloads import WORKLOADS
from infer_server.engines import build_engine

FACTS = Facts("rnnt_decoder", "int8", steps=8)
COLUMN = {name: place for place, name in enumerate(zoo.HEADER)}


def cell(facts: Facts, column: str) -> str:
    return str(zoo.row(facts)[COLUMN[column]])


def test_facts_and_times_come_back_from_the_file(tmp_path: Path) -> None:
    facts = FACTS.timed(ORT, FLOAT, PeerTimes([1.0], [2.0]), "ms").timed(ORT, QDQ, PeerTimes(failure="no Q/DQ model"))
    folder = Folder(tmp_path, facts.name, facts.precision)
    assert folder.read() is None
    folder.write(facts)
    assert folder.read() == facts


def test_a_row_has_the_peers_faster_build_and_says_which_was_not_timed() -> None:
    facts = FACTS.timed(ORT, QDQ, PeerTimes([1.0, 1.0], [4.0, 4.0]))
    facts = facts.timed(ORT, FLOAT, PeerTimes([1.0, 2.0], [3.0, 6.0]))
    assert cell(facts, ORT) == "3.00 (3.00 to 3.00, fp32)"
    assert cell(facts, OPENVINO) == "not asked for"
    assert cell(facts, "ms") == "1.5 (1)" and cell(facts, "turns") == "2, -"
    late = facts.timed(OPENVINO, QDQ, PeerTimes(failure="not timed within 60 s"))
    assert cell(late, OPENVINO) == "our Q/DQ: not timed within 60 s"
    assert cell(late.timed(OPENVINO, FLOAT, PeerTimes([2.0], [5.0])), OPENVINO) == (
        "2.50 (fp32); our Q/DQ: not timed within 60 s")


def test_a_row_without_times_has_none_of_any_peer() -> None:
    assert [cell(FACTS, column) for column in ("ms", ORT, OPENVINO, "turns")] == ["-"] * 4


def test_a_run_times_what_is_missing_or_failed_within_the_limit_and_nothing_twice(tmp_path: Path) -> None:
    folder, late = Folder(tmp_path, FACTS.name, FACTS.precision), PeerTimes(failure="not timed within 0 s")
    done = FACTS.timed(ORT, QDQ, PeerTimes([1.0], [2.0])).timed(ORT, FLOAT, PeerTimes(failure="ended with 1"))
    facts = zoo.time(folder, done, zoo.parse(["rnnt_decoder", "--limit", "0.001"]))
    assert facts.beside == {ORT: {QDQ: done.beside[ORT][QDQ], FLOAT: late}, OPENVINO: {QDQ: late, FLOAT: late}}
    assert zoo.time(folder, done, zoo.parse(["rnnt_decoder", "--limit", "0.001", "--beside", ORT])).beside == {
        ORT: facts.beside[ORT]}


def test_our_plan_and_a_peers_build_take_as_many_turns_each(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "rnnt_decoder", "fp32")
    onnx.save(WORKLOADS["rnnt_decoder"].tiny(), folder.model)
    build_engine(folder.model, cache=False, timing=False, max_batch=1).save(folder.plan)
    facts = timed(Facts("rnnt_decoder", "fp32"), folder, ORT, FLOAT, 0.0, 2)
    neighbour = facts.beside[ORT][FLOAT]
    assert facts.unit and len(neighbour.ours) == len(neighbour.theirs) == len(neighbour.ratios) == 2
    assert timed(facts, folder, ORT, QDQ, 0.0, 1).beside[ORT][QDQ].failure == "no Q/DQ model"
    folder.plan.write_bytes(b"")
    assert timed(facts, folder, ORT, FLOAT, 0.0, 1).beside[ORT][FLOAT].failure
