"""A build makes symbolic plans ahead of time, which run unseen shapes without a compiler."""
from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from infer_server.engines import build_engine, load_engine
from infer_server.engines.compiler import specialise, symbolic
from infer_server.engines.compiler.guesses import foreseen, stepped
from infer_server.engines.compiler.specialise import Specialiser, relower
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.compiler.symbolic import SymbolicPlans
from infer_server.engines.errors import PlanCorruptError, PlanTargetError
from infer_server.engines.ir.graph import Array
from infer_server.engines.ir.symbolic import ShapeEnv, plain
from infer_server.engines.plan.file import read_plan, write_plan
from infer_server.engines.plan.plan import Plan
from infer_server.engines.plan.symbolic import encoding
from infer_server.engines.plan.symbolic.conditions import conditions
from infer_server.engines.plan.symbolic.encoding import NotEncodable, decode, decode_kernels, encode
from infer_server.engines.plan.symbolic.plans import SymbolicPlan
from tests.engines.compiler.open_models import attention_net, node, pairs_net, random
from tests.engines.compiler.small_models import small_model
from tests.engines.compiler.test_symbolic_plans import MODELS, differences, feeds, grouped_queries

RUN = """
import json, sys
import numpy as np
from infer_server.engines.loading import load_engine
engine = load_engine(sys.argv[1], specialise=sys.argv[2], cache=sys.argv[3])
feeds = [{name: np.asarray(value, np.float32) for name, value in feed.items()} for feed in json.load(sys.stdin)]
made = [{name: array.tolist() for name, array in engine.run(feed).items()} for feed in feeds]
print(json.dumps([made, [name for name in ("llvmlite", "onnx") if name in sys.modules]]))
"""


def built(model: onnx.ModelProto, **options: object) -> Plan:
    plan: Plan = build_engine(model, cache=False, timing=False, **options).plan
    return plan


def reference(model: onnx.ModelProto, feed: dict[str, Array]) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("specialise", ["background", "wait"])
def test_a_fresh_process_runs_unseen_shapes_without_a_compiler(tmp_path: Path, strip: bool, specialise: str) -> None:
    if specialise == "wait" and not strip:
        pytest.skip("the caller waits for a specialisation, which is compiled")
    model, plan = attention_net(), tmp_path / "model.plan"
    build_engine(model, cache=False, timing=False).save(plan, strip)
    part = read_plan(plan).open
    assert part is not None
    fed = [{io.name: random(*io.shape_of(2, {"T": tokens})) for io in part.inputs} for tokens in (77, 90, 111)]
    given = json.dumps([{name: array.tolist() for name, array in feed.items()} for feed in fed])
    ended = subprocess.run([sys.executable, "-c", RUN, str(plan), specialise, str(tmp_path / "cache")], input=given,
                           capture_output=True, text=True, check=True)
    made, imported = json.loads(ended.stdout)
    assert not imported and not ended.stderr
    for feed, outputs in zip(fed, made, strict=True):
        for name, expected in reference(model, feed).items():
            np.testing.assert_allclose(outputs[name], expected, rtol=1e-4, atol=1e-5)


def test_caches_in_place_run_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = grouped_queries(), tmp_path / "model.plan"
    build_engine(model, cache=False, timing=False).save(plan)
    engine = load_engine(plan, cache=False)
    monkeypatch.setattr(specialise, "Specialiser", None)        # nobody may make one
    with pytest.raises(TypeError, match="not callable"):
        engine.executor._specialisers()._specialiser()          # type: ignore[union-attr, attr-defined]
    part, past = engine.plan.open, 0
    assert part is not None
    caches = {document["past"] for document in engine.plan.metadata["caches"]}
    context = engine.create_cache(400)
    feed: dict[str, Array] = {}
    for new in (150, 1, 1):
        extents = {"S": new, "P": past, "T": past + new}
        fed = {io.name: random(*io.shape_of(1, extents)).astype(io.dtype) for io in part.inputs
               if io.name not in caches}
        fed["mask"] = np.ones_like(fed["mask"])
        before = {io.name: feed.get(io.name, np.zeros(io.shape_of(1, extents), io.dtype)) for io in part.inputs
                  if io.name in caches}
        expected = reference(model, {**fed, **before})
        np.testing.assert_allclose(context.run(fed)["y"], expected["y"], rtol=1e-4, atol=1e-4)
        feed = {document["past"]: expected[document["present"]] for document in engine.plan.metadata["caches"]}
        past += new


def test_a_build_may_leave_them_out_and_closed_models_have_none(tmp_path: Path) -> None:
    open_model, closed = attention_net(), small_model([node("Relu", "x", "y")], {"x": ["N", 8]}, ["y"], {})
    for model, options, expected in ((open_model, {"symbolic_plans": False}, False), (open_model, {}, True),
                                     (closed, {}, False)):
        write_plan(built(model, **options), tmp_path / "model.plan")
        assert bool(read_plan(tmp_path / "model.plan").open_part.symbolic) == expected


@pytest.mark.parametrize("case", MODELS)
def test_a_decoded_symbolic_plan_makes_the_same_plans(case: str) -> None:
    model, shapes = MODELS[case]
    plan = built(model, symbolic_plans=False)
    symbolics = Specialiser(plan)._symbolic_plans
    for extents in shapes:
        symbolics.plan(extents)
    content = encode(symbolics._known, plan)
    assert content == encode(symbolics._known, plan)
    for one, other in zip(symbolics._known, decode(content, plan), strict=True):
        assert one.of_shape == other.of_shape
        for extents in shapes:
            ours, theirs = one.plan(extents), other.plan(extents)
            assert (ours is None) == (theirs is None)
            if ours and theirs:
                assert not differences(ours, theirs)
                assert bytes(ours.machine.constants) == bytes(theirs.machine.constants)
                assert ours.machine.code == theirs.machine.code


def test_symbolic_plans_of_another_compiler_or_target_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = built(attention_net())
    assert plan.open is not None and decode(plan.open.symbolic, plan)
    assert not relower(plan, "portable").open_part.symbolic
    with monkeypatch.context() as patched:
        patched.setattr(encoding, "COMPILER_VERSION", "another")
        assert not decode(plan.open.symbolic, plan)
    with pytest.raises(PlanCorruptError, match="incomplete|decompressed"):
        decode(bytes(plan.open.symbolic[:-9]) + bytes(9), plan)
    damaged = encoding.deflate(bytes([2, *bytes(7)]) + b"[]", "a test")
    with pytest.raises(PlanCorruptError, match="symbolic plans cannot be read"):
        decode(damaged, plan)


def test_a_damaged_section_is_traced_again(caplog: pytest.LogCaptureFixture) -> None:
    plan = built(attention_net())
    assert plan.open is not None
    damaged = replace(plan, open=replace(plan.open, symbolic=b"no plans"))
    assert Specialiser(damaged).symbolic({"T": 77}).machine.backend == "llvm"
    assert "they are traced again" in caplog.text


def test_only_names_of_the_compiler_are_encoded() -> None:
    writer = encoding._Writer(built(attention_net(), symbolic_plans=False))
    assert writer.reference(np.negative) and writer.reference(partial(np.reshape, newshape=(2, 3)))
    for value in (lambda: 0, print, json.dumps, object()):
        with pytest.raises(NotEncodable, match="which has no encoding"):
            writer.reference(value)
    with pytest.raises(ValueError, match="not a part of the compiler"):
        encoding._named("os", "system")


def test_symbolic_plans_beyond_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = built(attention_net())
    assert plan.open is not None
    known = decode(plan.open.symbolic, plan)
    kernels = decode_kernels(plan.open.symbolic, plan)
    sizes = [len(encode([one], plan, kernels)) for one in known]
    monkeypatch.setattr(symbolic, "LIMIT_SHARE", 0)
    for limit, kept in ((1 << 20, known), (sizes[0], known[:1]), (min(sizes) - 1, [])):
        monkeypatch.setattr(symbolic, "SMALLEST_LIMIT", limit)
        content = symbolic.encoded(known, kernels, plan)
        assert [one.of_shape for one in decode(content, plan)] == [one.of_shape for one in kept]
    monkeypatch.setattr(symbolic, "SMALLEST_LIMIT", min(one.constant_bytes for one in known) - 1)
    monkeypatch.setattr(symbolic, "encode", lambda *_: pytest.fail("constants beyond the limit were compressed"))
    assert symbolic.encoded(known, kernels, plan) == b""


def test_a_wrong_symbolic_plan_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialise, "agree", lambda *_: False)
    assert not built(attention_net()).open_part.symbolic


def test_a_stripped_plan_says_at_which_shapes_it_cannot_run(tmp_path: Path) -> None:
    build_engine(pairs_net(), cache=False, timing=False, symbolic_plans=False).save(tmp_path / "model.plan", strip=True)
    engine = load_engine(tmp_path / "model.plan", cache=False)
    with pytest.raises(PlanTargetError, match="stripped"):
        engine.run(feeds(built(pairs_net(), symbolic_plans=False), {"rows": 20, "columns": 40}))


def test_foreseen_shapes_are_of_profiles_or_about_the_usual_ones() -> None:
    plan = built(attention_net(), symbolic_plans=False)
    assert foreseen(plan) == [[{"T": 101}, {"T": 128}, {"T": 136}, {"T": 160}, {"T": 96}, {"T": 129}, {"T": 127}],
                              [{"T": 5}, {"T": 4}], [{"T": 20}, {"T": 16}], [{"T": 288}, {"T": 256}]]
    part = replace(plan.open_part, profiles=({"T": (8, 128, 512)},))
    assert foreseen(replace(plan, open=part))[1:] == [[{"T": 38}, {"T": 8}], [{"T": 416}, {"T": 512}]]
    assert next(stepped({"rows": 64, "columns": 32, "value of n": (3.0,)}, {"columns"})) == {
        "rows": 37, "columns": 32, "value of n": (3.0,)}


@pytest.mark.parametrize("case", MODELS)
def test_traces_of_one_import_are_those_of_an_import_each(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = MODELS[case]
    plan = built(model, symbolic_plans=False)
    reusing, importing = Specialiser(plan), Specialiser(plan)
    reusing.reuse_graphs()
    imports: list[Subject] = []
    real = Subject.import_graph
    monkeypatch.setattr(Subject, "import_graph", lambda self, *rest: (imports.append(self), real(self, *rest))[1])
    for extents in shapes:
        ours, theirs = (SymbolicPlans(one._traced)._traced(extents) for one in (reusing, importing))
        assert ours and theirs and conditions(ours) == conditions(theirs)
        for other in shapes:
            made, expected = ours.plan(other), theirs.plan(other)
            assert (made is None) == (expected is None) and (made is not None or other != extents)
            if made and expected:
                assert not differences(made, expected)
                assert bytes(made.machine.constants) == bytes(expected.machine.constants)
    counts = [sum(one is specialiser._tracing for one in imports) for specialiser in (reusing, importing)]
    assert counts[0] < counts[1] == len(shapes)


def test_a_graph_of_another_import_is_compared_with_an_import_until_it_has_passed(
        monkeypatch: pytest.MonkeyPatch) -> None:
    specialiser = Specialiser(built(attention_net(), symbolic_plans=False))
    specialiser.reuse_graphs()
    imported: list[object] = []
    real = Subject.import_graph
    monkeypatch.setattr(Subject, "import_graph", lambda self, extents, *rest: (
        imported.append(extents["T"]), real(self, extents, *rest))[1])
    for tokens in (60, 61, 200, 201):
        assert specialiser.symbolic({"T": tokens})
    assert [int(plain(tokens)) for tokens in imported] == [60, 61]


def test_conditions_are_bounds_of_extents_and_relations_between_them() -> None:
    env = ShapeEnv()
    rows, columns = env.extent("rows", 20), env.extent("columns", 40)
    assert 2 * rows < 101 and rows >= 8 and rows != 60 and columns != 3
    assert 2 * rows == columns and columns // 16 == 2
    symbolic = SymbolicPlan(built(attention_net(), symbolic_plans=False), env, {"rows": 20, "columns": 40},
                            ("rows", "columns"), {"value of n": (3.0,)})
    assert conditions(symbolic) == ["value of n == (3.0,)", "8 <= rows <= 50", "columns >= 1", "columns != 3",
                                    "columns == 2*rows", "(columns)//(16) == 2"]
