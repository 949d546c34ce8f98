"""Registry of the runners on which every family's tests run; a backend adds itself here.

GPUs are many and their emulation is slow: INFER_TEST_GPUS=sm_61,sm_80 names those that take part, none by default;
`cuda` is the GPU of this machine itself. tests/gpu has a few problems of every family for every run. Dynamic kernels
run a part of the suite, and all of it with INFER_TEST_DYNAMIC=1.

Where three parameters meet, tests run combinations in which every pair of values occurs; INFER_TEST_COMBINATIONS=1 runs
all of them.
"""
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from infer_server.engines.backends.cuda.codegen.gpu import GPUS
from infer_server.engines.backends.llvm.codegen.isa import (
    AARCH64,
    ALL,
    AVX2,
    AVX512_AMX,
    AVX512_AMX_FP16,
    AVX512_BF16,
    AVX512_VNNI,
    PORTABLE,
    Isa,
)
from scripts.testing.gpu.runner import GpuRunner, at_hand
from scripts.testing.suite import Runner
from tests.engines.backends.llvm.runner import CpuRunner, DynamicRunner
from tests.engines.backends.numpy.runner import NumpyRunner

_GPUS = filter(None, os.environ.get("INFER_TEST_GPUS", "").split(","))
OTHERS: list[Runner] = [NumpyRunner(), *(at_hand() if name == "cuda" else GpuRunner(GPUS[name]) for name in _GPUS)]
DYNAMIC: list[Runner] = [DynamicRunner(PORTABLE)]
# AVX512_AMX_FP16 has the kernels of AVX512_AMX and one product more, which llvm/test_matrix_unit.py tests.
CPUS = [CpuRunner(isa) for isa in ALL if isa is not AVX512_AMX_FP16]
RUNNERS: list[Runner] = [*CPUS, *OTHERS]
CPU = CpuRunner(PORTABLE)       # for tests that need only one runner


def _each(name: str, runners: Sequence[Runner]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, runners, ids=lambda runner: runner.name)


EVERY_BACKEND = _each("runner", [*RUNNERS, *(DYNAMIC if "INFER_TEST_DYNAMIC" in os.environ else [])])
# For kernels without dot products: there the CPUs differ in their lanes and packs only.
WIDTHS: list[Runner] = [*map(CpuRunner, (AVX512_VNNI, AVX2, PORTABLE)), *DYNAMIC, *OTHERS]
EVERY_WIDTH = _each("runner", WIDTHS)
# CPUs that differ in products of bytes by vectors: AVX512_AMX and AVX512_BF16 have those of AVX512_VNNI.
DOT_CPUS = [runner for runner in CPUS if runner.isa not in (AVX512_AMX, AVX512_BF16)]
EVERY_DOT = _each("cpu", DOT_CPUS)
# CPUs by their code for floats, which the other ones share: they differ in products of bytes only. AVX512_AMX and
# AVX512_BF16 have instructions for bfloat16.
FLOAT_CPUS: dict[str, tuple[Isa, ...]] = dict.fromkeys(("fp32", "fp16"), (AVX512_VNNI, AVX2, AARCH64, PORTABLE))
FLOAT_CPUS["bf16"] = (AVX512_AMX, AVX512_BF16, *FLOAT_CPUS["fp32"])
_FLOATS = [(precision, runner) for precision, isas in FLOAT_CPUS.items()
           for runner in [*map(CpuRunner, isas), *OTHERS, *(DYNAMIC if "INFER_TEST_DYNAMIC" in os.environ else [])]]
ALL_COMBINATIONS = "INFER_TEST_COMBINATIONS" in os.environ
# For what only kernels of CPUs have, tactics for example.
EVERY_ISA = _each("cpu", CPUS)
ISA_WIDTHS = list(map(CpuRunner, (AVX512_VNNI, AVX2, PORTABLE)))
EVERY_ISA_WIDTH = _each("cpu", ISA_WIDTHS)


def every_float(shapes: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrise by `shape`, `precision` and `runner`: half of the runners for each shape in each precision."""
    order = {runner.name: n for n, (_, runner) in enumerate(reversed(_FLOATS))}
    return pytest.mark.parametrize("shape, precision, runner", [
        pytest.param(shape, precision, runner, id=f"{name}-{precision}-{runner.name}")
        for n, (name, shape) in enumerate(shapes.items()) for precision, runner in _FLOATS
        if ALL_COMBINATIONS or (n + [*FLOAT_CPUS].index(precision) + order[runner.name]) % 2 == 0])


def rotated(names: str, first: Mapping[str, Any], second: Mapping[str, Any],
            third: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrise by all pairs of `first` and `second`, with values of `third` in turn; values by their ids."""
    assert len(third) <= min(len(first), len(second)), "a pair would not occur"
    return pytest.mark.parametrize(names, [
        pytest.param(first[a], second[b], third[c], id=f"{a}-{b}-{c}") for i, a in enumerate(first)
        for j, b in enumerate(second) for k, c in enumerate(third) if ALL_COMBINATIONS or (i + j) % len(third) == k])


def by_name(runners: Iterable[Runner]) -> dict[str, Runner]:
    return {runner.name: runner for runner in runners}
