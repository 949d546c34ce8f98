"""Registry of the runners on which every family's tests run; a backend adds itself here.

GPUs are many and their emulation is slow: INFER_TEST_GPUS=sm_61,sm_80 names those that take part, none by default;
`cuda` is the GPU of this machine itself. tests/gpu has a few problems of every family for every run. Dynamic kernels
run a part of the suite, and all of it with INFER_TEST_DYNAMIC=1.
"""
from __future__ import annotations

import os
from collections.abc import Sequence

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
EVERY_WIDTH = _each("runner", [*map(CpuRunner, (AVX512_VNNI, AVX2, PORTABLE)), *DYNAMIC, *OTHERS])
# CPUs that differ in products of bytes by vectors: AVX512_AMX and AVX512_BF16 have those of AVX512_VNNI.
DOT_CPUS = [runner for runner in CPUS if runner.isa not in (AVX512_AMX, AVX512_BF16)]
EVERY_DOT = _each("cpu", DOT_CPUS)
# CPUs by their code for floats, which the other ones share: they differ in products of bytes only. AVX512_AMX and
# AVX512_BF16 have instructions for bfloat16.
FLOAT_CPUS: dict[str, tuple[Isa, ...]] = dict.fromkeys(("fp32", "fp16"), (AVX512_VNNI, AVX2, AARCH64, PORTABLE))
FLOAT_CPUS["bf16"] = (AVX512_AMX, AVX512_BF16, *FLOAT_CPUS["fp32"])
EVERY_FLOAT = pytest.mark.parametrize("precision, runner", [
    pytest.param(precision, runner, id=f"{precision}-{runner.name}") for precision, isas in FLOAT_CPUS.items()
    for runner in [*map(CpuRunner, isas), *OTHERS, *(DYNAMIC if "INFER_TEST_DYNAMIC" in os.environ else [])]])
# For what only kernels of CPUs have, tactics for example.
EVERY_ISA = _each("cpu", CPUS)
EVERY_ISA_WIDTH = _each("cpu", list(map(CpuRunner, (AVX512_VNNI, AVX2, PORTABLE))))
