"""Contractions of few tiles and attentions of few queries are split, with unchanged results."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.engine import Engine
from scripts.testing.gpu.emulated import EmulatedGpu, install
from tests.engines.compiler.small_models import node, small_model

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


# ---- an attention of one query
KEYS = 1000         # the last part has fewer
WIDTH = 32
DECODER = small_model([node("MatMul", "a wq", "q"), node("MatMul", "b wk", "kt"), node("MatMul", "b wv", "v"),
                       node("Transpose", "kt", "k", perm=[0, 1, 3, 2]), node("MatMul", "q k", "scores"),
                       node("Softmax", "scores", "p", axis=-1), node("MatMul", "p v", "y")],
                      {"a": ["N", 2, 1, WIDTH], "b": ["N", 2, KEYS, WIDTH]}, ["y"],
                      {name: RANDOM.standard_normal((WIDTH, WIDTH), np.float32) / 6 for name in ("wq", "wk", "wv")})


def decoder(target: str, precision: str) -> Plan:
    builder = Builder(BuildConfig(precision=precision, max_batch=2, target=target, timing=False))
    graph = builder.graph(DECODER)
    return builder.plan(graph, dict.fromkeys(builder.edges(graph), (-4.0, 4.0)) if precision == "int8" else None)


@pytest.mark.parametrize(("target", "precision"), [("sm_80", "int8"), ("sm_61", "fp32"), ("sm_80", "fp16")])
def test_an_attention_of_one_query_is_cut_along_its_keys_and_gives_what_a_whole_one_does(
        target: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """INT8 results are equal to the byte."""
    install(monkeypatch, EmulatedGpu(target))
    plan = decoder(target, precision)
    x = {name: RANDOM.standard_normal((2, 2, rows, WIDTH), np.float32) for name, rows in (("a", 1), ("b", KEYS))}
    families = [step.tactic.partition(":")[0] for step in plan.machine.steps if "attention" in step.tactic]
    assert families == ["attention_peaks"] * (precision == "int8") + ["attention_sums", "joined_attention"]
    wanted, got = (Engine(one).run(x)["y"] for one in (decoder("portable", precision), plan))
    assert wanted.std() > 0.05
    np.testing.assert_allclose(got, wanted, atol={"int8": 0, "fp32": 1e-5, "fp16": 2e-3}[precision])
