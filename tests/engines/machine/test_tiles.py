"""Permission to use tile registers: what a kernel answers, and what remains of the features."""
from __future__ import annotations

import errno

import pytest

from infer_server.engines.machine.cpu import CpuInfo, detect
from infer_server.engines.machine.tiles import permitted, refusal_by

LISTED = frozenset({"avx512f", "amx_tile", "amx_int8", "amx_bf16"})
BOTH = 3 << 17


@pytest.mark.parametrize("answers, reason", [
    ([(0, BOTH), (0, 0), (0, BOTH)], ""),
    ([(errno.EINVAL, 0)], "the kernel does not know of tile registers"),        # before Linux 5.16, gVisor
    ([(errno.ENOSYS, 0)], "has no arch_prctl"),
    ([(0, 3)], "does not save tile registers"),
    ([(0, BOTH), (errno.ENOSPC, 0)], "signal stack of a thread is too small"),
    ([(0, BOTH), (errno.EPERM, 0)], "forbids"),
    ([(0, BOTH), (0, 0), (0, 3)], "granted no tile registers"),
    ([(errno.EIO, 0)], "error"),
])
def test_each_answer_of_the_kernel_has_its_reason(answers: list[tuple[int, int]], reason: str) -> None:
    asked = iter(answers)
    result = refusal_by(lambda option, argument: next(asked))
    assert reason in result and bool(result) == bool(reason)
    assert not list(asked)


def test_features_of_tiles_go_where_they_are_refused() -> None:
    assert permitted(LISTED, lambda: "") == (LISTED, "")
    assert permitted(LISTED, lambda: "no") == (frozenset({"avx512f"}), "no")


def test_nothing_is_asked_where_there_are_no_tiles() -> None:
    def asked() -> str:
        raise AssertionError("asked")
    assert permitted(frozenset({"avx2"}), asked) == (frozenset({"avx2"}), "")


def test_a_missing_feature_of_tiles_comes_with_the_reason() -> None:
    machine = CpuInfo("x86_64", "Xeon", frozenset({"avx2"}), (), 1, "the sandbox forbids arch_prctl")
    assert machine.lacking(frozenset({"amx_tile", "avx2"})) == "amx_tile (the sandbox forbids arch_prctl)"
    assert machine.lacking(frozenset({"avx512f"})) == "avx512f" and not machine.lacking(frozenset({"avx2"}))


def test_this_process_has_tiles_or_knows_why_not() -> None:
    machine = detect()
    assert not machine.tile_refusal or not any(name.startswith("amx_") for name in machine.features)
