"""Tests of CPU detection."""
from __future__ import annotations

from infer_server.engines.machine.cpu import detect, parse_cpuinfo


def test_x86_and_arm_say_the_same_in_other_words() -> None:
    x86 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512_vnni\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    assert parse_cpuinfo(x86) == ("AMD EPYC", frozenset({"fpu", "avx2", "avx512_vnni"}))
    arm = "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
    assert parse_cpuinfo(arm) == ("0x41 0xd0c", frozenset({"fp", "asimd", "asimddp"}))
    assert parse_cpuinfo("") == ("? ?", frozenset())


def test_this_machine_has_cores_and_caches_that_grow() -> None:
    machine = detect()
    assert machine.cores >= 1
    sizes = [size for _, size in machine.caches]
    assert sizes == sorted(sizes)
    assert not machine.missing(frozenset())
    assert machine.missing(frozenset({"no_such_feature"})) == {"no_such_feature"}
