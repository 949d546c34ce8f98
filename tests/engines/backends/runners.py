"""Who runs the suite of this folder: a backend registers itself here, and every family's tests run on it."""
from __future__ import annotations

from collections.abc import Sequence

import pytest

from engines.backends.llvm.codegen.isa import ALL, AVX2, AVX512_VNNI, PORTABLE
from tests.engines.backends.llvm.runner import CpuRunner
from tests.engines.backends.numpy.runner import NumpyRunner
from tests.engines.backends.suite import Runner

OTHERS: list[Runner] = [NumpyRunner()]
RUNNERS: list[Runner] = [*map(CpuRunner, ALL), *OTHERS]
CPU = CpuRunner(PORTABLE)       # for tests that are of one runner


def _each(name: str, runners: Sequence[Runner]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, runners, ids=lambda runner: runner.name)


EVERY_BACKEND = _each("runner", RUNNERS)
# For kernels without dot products: there the CPUs differ in their lanes and packs only.
EVERY_WIDTH = _each("runner", [*map(CpuRunner, (AVX512_VNNI, AVX2, PORTABLE)), *OTHERS])
# For what only kernels of CPUs have, tactics for example.
EVERY_ISA = _each("cpu", list(map(CpuRunner, ALL)))
EVERY_ISA_WIDTH = _each("cpu", list(map(CpuRunner, (AVX512_VNNI, AVX2, PORTABLE))))
