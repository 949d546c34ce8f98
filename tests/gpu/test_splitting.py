"""Contractions of few tiles are cut along K: when, and that nothing but the speed changes."""
from __future__ import annotations

import numpy as np
import pytest

from engines.compiler.builder import BuildConfig, Builder
from engines.plan.plan import Plan
from engines.runtime.engine import Engine
from tests.engines.compiler.small_models import node, small_model
from tests.gpu.emulated import EmulatedGpu, install

DEPTH = 2048
RANDOM = np.random.default_rng(0)
MODEL = small_model([node("Gemm", "x w b", "h"), node("Relu", "h", "y")], {"x": ["N", DEPTH]}, ["y"],
                    {"w": RANDOM.standard_normal((DEPTH, 40), np.float32) / 40, "b": np.ones(40, np.float32)})


def plan_for(target: str, items: int) -> Plan:
    builder = Builder(BuildConfig(precision="int8", max_batch=items, target=target, timing=False))
    graph = builder.graph(MODEL)
    return builder.plan(graph, dict.fromkeys(builder.edges(graph), (-2.0, 2.0)))


def test_a_product_of_few_tiles_is_cut_along_k_and_gives_the_bytes_of_a_whole_one(
        monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EmulatedGpu("sm_75"))
    plan, x = plan_for("sm_75", 2), {"x": RANDOM.standard_normal((2, DEPTH), np.float32)}
    parts = [step for step in plan.machine.steps if step.name.endswith(".parts")]
    assert len(parts) == 1 and parts[0].tactic.startswith("partial_sums")
    wanted = Engine(plan_for("portable", 2)).run(x)["y"]
    assert wanted.std() > 0
    np.testing.assert_array_equal(Engine(plan).run(x)["y"], wanted)


def test_a_product_that_fills_the_gpu_is_left_whole() -> None:
    assert not [step for step in plan_for("sm_75", 4096).machine.steps if step.name.endswith(".parts")]
