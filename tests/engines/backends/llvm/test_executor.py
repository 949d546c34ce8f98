"""Tests of the executor's LLVM IR."""
from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from infer_server.engines.backends.llvm.codegen.executor import scheduler_text
from infer_server.engines.backends.llvm.codegen.isa import AARCH64, AVX2
from infer_server.engines.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden" / "run_steps.ll"
X86 = replace(AVX2, triple="x86_64-unknown-linux-gnu")


def test_the_loop_over_steps_reads_as_it_did() -> None:
    found = re.search(r"define void @run_steps.*?\n}\n", scheduler_text(X86), re.DOTALL)
    assert found is not None
    assert found[0] == GOLDEN.read_text(), f"if that is intended, write the new text to {GOLDEN.name}"


def test_architectures_differ_in_clock_pause_and_system_call() -> None:
    x86, arm = scheduler_text(X86), scheduler_text(AARCH64)
    assert "@llvm.x86.sse2.pause" in x86 and "@llvm.readcyclecounter" in x86 and "i64 202" in x86
    assert "@llvm.aarch64.hint" in arm and "cntvct_el0" in arm and "i64 98" in arm
    for text in (x86, arm):
        assert text.count("atomicrmw xchg") == 3, "CLAIM, ASLEEP, INSIDE"


def test_an_architecture_without_a_scheduler_is_named() -> None:
    with pytest.raises(ConfigError, match="no executor for riscv64; supported architectures: x86_64, aarch64"):
        scheduler_text(replace(AVX2, triple="riscv64-unknown-linux-gnu"))
