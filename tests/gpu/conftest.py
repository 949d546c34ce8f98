from __future__ import annotations

from functools import cache

import pytest

from infer_server.engines.compiler.specialise import relower
from infer_server.engines.plan.plan import Plan
from tests.engines.compiler.zoo_engines import compiled
from tests.gpu.network import MODEL, Plans


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    """Return a function from a target to INT8 plans of one calibration."""
    portable = compiled(MODEL, tmp_path_factory.mktemp("small"), precision="int8", target="portable").plan

    @cache
    def plan(target: str) -> Plan:
        return portable if target == "portable" else relower(portable, target)
    return plan
