"""CPUID: this CPU answers as /proc/cpuinfo lists it, and features that are not listed are found."""
from __future__ import annotations

import platform
import sys

import pytest

from infer_server.engines.machine import cpu, cpuid
from infer_server.engines.machine.cpuid import Registers, unlisted_features

HERE = pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="Linux on x86-64 only")
# Feature in /proc/cpuinfo -> leaf, subleaf, register, bit
LISTED = {"fma": (1, 0, "ecx", 12), "avx": (1, 0, "ecx", 28), "avx2": (7, 0, "ebx", 5), "bmi2": (7, 0, "ebx", 8),
          "avx512f": (7, 0, "ebx", 16), "avx512_vnni": (7, 0, "ecx", 11), "amx_bf16": (7, 0, "edx", 22),
          "amx_tile": (7, 0, "edx", 24), "amx_int8": (7, 0, "edx", 25), "avx_vnni": (7, 1, "eax", 4),
          "avx512_bf16": (7, 1, "eax", 5)}


def answering(highest: int, subleaves: int, features: int) -> cpuid.Query:
    def query(leaf: int, subleaf: int) -> Registers:
        return Registers(eax={(0, 0): highest, (7, 0): subleaves, (7, 1): features}[leaf, subleaf])
    return query


@HERE
def test_this_cpu_answers_as_linux_lists_it() -> None:
    _, listed = cpu.parse_cpuinfo(cpu._CPUINFO.read_text())
    found = {name for name, (leaf, subleaf, register, bit) in LISTED.items()
             if cpuid.cpuid(0, 0).eax >= leaf and cpuid.cpuid(leaf, 0).eax >= subleaf * (leaf == 7)
             and getattr(cpuid.cpuid(leaf, subleaf), register) >> bit & 1}
    assert listed & LISTED.keys() <= found
    vendor = b"".join(word.to_bytes(4, "little") for word in
                      (cpuid.cpuid(0, 0).ebx, cpuid.cpuid(0, 0).edx, cpuid.cpuid(0, 0).ecx))
    assert vendor.decode() in cpu._CPUINFO.read_text()


@pytest.mark.parametrize("query, features", [
    (answering(32, 1, 1 << 21 | 1 << 4), {"amx_fp16"}), (answering(32, 2, 1 << 4), set()),
    (answering(32, 0, 1 << 21), set()), (answering(6, 1, 1 << 21), set()), (answering(0, 0, 0), set())])
def test_products_of_halves_are_found_where_the_leaf_exists(query: cpuid.Query, features: set[str]) -> None:
    assert unlisted_features(query) == features


@pytest.mark.parametrize("listed, features", [("amx_tile amx_int8", {"amx_tile", "amx_int8", "amx_fp16"}),
                                              ("avx512f", {"avx512f"})])
def test_they_count_only_where_linux_saves_tiles(listed: str, features: set[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "unlisted_features", lambda: frozenset({"amx_fp16"}))
    monkeypatch.setattr(cpu, "parse_cpuinfo", lambda text: ("Xeon", frozenset(listed.split())))
    monkeypatch.setattr("infer_server.engines.machine.tiles.tile_refusal", lambda: "")
    assert cpu.detect.__wrapped__().features == features


def test_another_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpuid.cpuid(0, 0) == Registers() and not unlisted_features()
