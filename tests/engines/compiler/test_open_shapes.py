"""Models with dynamic shapes: one plan for all shapes, with specialisations equal to builds for their shapes."""
from __future__ import annotations

import logging
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from infer_server.calibration import Calibration
from infer_server.engines import build_engine, load_engine
from infer_server.engines.backends import backend_of
from infer_server.engines.backends.llvm.codegen import compile as llvm_compile
from infer_server.engines.backends.llvm.codegen.isa import isa_named
from infer_server.engines.backends.llvm.kernels.contraction.direct import DirectContraction
from infer_server.engines.backends.llvm.kernels.contraction.tiled import Tile
from infer_server.engines.backends.llvm.session import LlvmSession
from infer_server.engines.compiler.build import EngineBuild
from infer_server.engines.compiler.specialise import Specialiser, graph_at, relower
from infer_server.engines.errors import (
    ConfigError,
    InputError,
    ModelError,
    PlanCorruptError,
    PlanError,
    PlanTargetError,
)
from infer_server.engines.ir.graph import Array
from infer_server.engines.lowering.lower import lower
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.plan import arena
from infer_server.engines.plan.file import read_plan
from infer_server.engines.runtime import policy as policy_module
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.policy import Policy
from infer_server.engines.runtime.specialisation import Specialisation
from tests.engines.compiler.open_models import (
    attention_net,
    by_onnx_runtime,
    growing_net,
    node,
    pairs_net,
    picture_net,
    random,
    recurrent_net,
    spans_net,
)
from tests.engines.compiler.small_models import small_model

TOLERANCE = 1e-4


def pictures(items: int, height: int, width: int) -> dict[str, Array]:
    return {"x": random(items, 3, height, width)}


def tokens(items: int, length: int) -> dict[str, Array]:
    mask = np.zeros((items, length), np.float32)
    mask[-1, length // 2 + 1:] = -1e4
    return {"x": random(items, length, 16), "mask": mask}


def steps(items: int, length: int) -> dict[str, Array]:
    return {"x": random(items, length, 4)}


def cached(items: int, past: int) -> dict[str, Array]:
    return {"x": random(items, 1, 16), "keys": random(items, 4, past, 4), "values": random(items, 4, past, 4, seed=2)}


def rows(a: int, b: int) -> dict[str, Array]:
    return {"a": random(a, 6), "b": random(b, 6, seed=4)}


def spans(elements: int, *sizes: float) -> dict[str, Array]:
    return {"x": random(elements), "ends": np.cumsum(sizes).astype(np.float32), "sizes": np.array(sizes, np.float32)}


CASES = {
    "spans": (spans_net(), [spans(3, 3), spans(7, 5), spans(11, 4, 7), spans(45, 45)]),
    "pictures": (picture_net(), [pictures(1, 32, 32), pictures(2, 17, 40), pictures(3, 8, 6)]),
    "tokens": (attention_net(), [tokens(2, 7), tokens(1, 1), tokens(5, 33)]),
    "a cache that is empty at first": (growing_net(), [cached(1, 0), cached(2, 7), cached(3, 0), cached(1, 1)]),
    "steps": (recurrent_net(), [steps(1, 9), steps(3, 1), steps(2, 20)]),
    "two extents": (pairs_net(), [rows(3, 5), rows(1, 1), rows(7, 2)])}


def built(model: onnx.ModelProto, **options: Any) -> EngineBuild:
    return build_engine(model, cache=False, timing=False, **options)


def opened(model: onnx.ModelProto, **options: Any) -> Engine:
    return built(model, **options).engine()


def assert_right(engine: Any, model: onnx.ModelProto, feeds: dict[str, Array]) -> None:
    for name, expected in by_onnx_runtime(model, feeds).items():
        np.testing.assert_allclose(engine.run(feeds)[name], expected, rtol=TOLERANCE, atol=TOLERANCE, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_one_plan_serves_all_shapes(case: str, tmp_path: Path) -> None:
    model, feeds = CASES[case]
    built(model).save(tmp_path / "m.plan")
    engine = load_engine(tmp_path / "m.plan")
    for feed in (*feeds, *feeds):
        assert_right(engine, model, feed)


@pytest.mark.parametrize("case", CASES)
def test_the_general_version_computes_the_same_without_a_specialisation(case: str) -> None:
    model, feeds = CASES[case]
    plan = built(model).plan
    engine = Engine(plan, specialiser=lambda: Specialiser(plan), policy=Policy("off"))
    for feed in feeds:
        assert_right(engine, model, feed)
    assert len(engine.executor.specialised) == 1


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_shapes_never_met_are_computed_by_kernels_that_are_told_their_extents(
        precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Calibration([tokens(1, 9), tokens(1, 12)]) if precision == "int8" else None
    built(attention_net(), precision=precision, calibration=data).save(tmp_path / "m.plan")
    lengths = (13, 31, 64, 77, 200)
    exact = load_engine(tmp_path / "m.plan")
    expected = [bytes(exact.run(tokens(2, length))["y"]) for length in lengths]

    def compile_object(*_: object) -> bytes:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(llvm_compile, "compile_object", compile_object)
    general = load_engine(tmp_path / "m.plan", specialise="off")
    assert [bytes(general.run(tokens(2, length))["y"]) for length in lengths] == expected


def test_without_the_compiler_numpy_is_the_general_version(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plan = built(attention_net(), symbolic_plans=False).plan

    def session(target: str, *_: object) -> LlvmSession:
        raise ImportError("no llvmlite")

    monkeypatch.setattr(backend_of("").__class__, "session", staticmethod(session))
    engine = Engine(plan, specialiser=lambda: Specialiser(plan), policy=Policy("off"))
    assert_right(engine, attention_net(), tokens(1, 31))
    assert engine.plan_of(tokens(1, 31)).machine.backend == "numpy" and "no llvmlite" in caplog.text


def test_pictures_of_sizes_never_met_are_computed_by_kernels_that_are_told_their_extents() -> None:
    build = built(picture_net())
    exact, general = (Engine(build.plan, specialiser=lambda: Specialiser(build.plan), policy=Policy(way))
                      for way in ("wait", "off"))
    for size in ((9, 7), (30, 41), (33, 64), (5, 90)):
        ours, expected = (engine.run(pictures(2, *size))["y"] for engine in (general, exact))
        np.testing.assert_allclose(ours, expected, rtol=TOLERANCE, atol=TOLERANCE)
        assert general.plan_of(pictures(2, *size)).machine.backend == "llvm"


def test_a_specialisation_is_what_a_build_for_its_shapes_is() -> None:
    model, plan = attention_net(), built(attention_net()).plan
    fixed = built(model, shapes={"x": (None, 21, 16), "mask": (None, 21)}).plan
    one = Specialiser(plan).plan({"T": 21})
    assert one.machine.code == fixed.machine.code and one.inputs == fixed.inputs
    assert one.machine.buffers == fixed.machine.buffers and one.machine.shared == (len(plan.machine.constants), 0)
    ours, theirs = (bytes(Specialisation(p, base=Specialisation(plan)).run(tokens(2, 21))["y"]) for p in (one, fixed))
    assert ours == theirs


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_packed_weights_are_there_once_for_all_specialisations(precision: str, tmp_path: Path) -> None:
    data = Calibration([tokens(1, 9), tokens(1, 12)]) if precision == "int8" else None
    model, shapes = attention_net(), [{"x": (n, t, 16), "mask": (n, t)} for n, t in ((1, 12), (1, 31))]
    profiles = [{name: (shape[name], shape[name], shape[name]) for name in shape} for shape in shapes]
    build = built(model, precision=precision, calibration=data, profiles=tuple(profiles), max_batch=2)
    build.save(tmp_path / "m.plan")
    plan = read_plan(tmp_path / "m.plan")
    assert plan.open is not None
    (other,), later = plan.open.others, Specialiser(plan).plan({"T": 31})
    for one in (other, later):
        assert len(one.machine.constants) <= len(plan.machine.constants) / 2 and not one.machine.expanded
    feed, first = tokens(2, 31), Specialisation(plan)
    expected = Specialisation(Specialiser(plan, "numpy").plan({"T": 31})).run(feed)["y"]
    for one in (other, later):
        found = Specialisation(one, base=first).run(feed)["y"]
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    with pytest.raises(PlanTargetError, match="cannot be loaded alone; load the plan of its model"):
        Specialisation(later)
    with pytest.raises(PlanCorruptError, match="does not belong to the plan it is loaded with"):
        Specialisation(later.with_machine(shared=(1 << 20, 1 << 20)), base=first)


def test_what_the_build_timed_decides_at_other_shapes_where_the_cost_does_not_tell() -> None:
    plan = built(attention_net(), target="avx2").plan
    assert plan.open is not None and not plan.open.timed
    calls = lower(graph_at(plan), isa_named("avx2").lanes).compiled
    kernels = [DirectContraction(call.problem) for call in calls if isinstance(call.problem, Contraction)]
    for length, factor, taken in ((31, 0.7, "4x2"), (30, 1, "6x2"), (30, 0.2, "4x2")):
        timed = {repr(kernel): {repr(Tile(1, 6, 2)): 1.0, repr(Tile(1, 4, 2)): factor} for kernel in kernels}
        other = replace(plan, open=replace(plan.open, timed=timed))
        steps = Specialiser(other).plan({"T": length}).machine.steps
        assert {step.tactic for step in steps if "tile " in step.tactic} == {f"contraction: tile 1x{taken}"}


def test_int8_has_the_bytes_of_a_build_for_the_same_shapes_and_ranges(tmp_path: Path) -> None:
    model, cache = picture_net(), tmp_path / "ranges.json"
    data = [pictures(1, 24, 24 + 8 * (i % 3)) for i in range(6)]
    build = built(model, precision="int8", calibration=Calibration(data, cache=cache))
    assert build.plan.extents == {"H": 24, "W": 24} and build.plan.metadata["calibration_items"] == 6
    fixed = built(model, precision="int8", calibration=Calibration(cache=cache), shapes={"x": (None, 3, 24, 24)})
    feed = pictures(2, 24, 24)
    np.testing.assert_array_equal(build.engine().run(feed)["y"], fixed.engine().run(feed)["y"])
    general = Engine(build.plan, specialiser=lambda: Specialiser(build.plan), policy=Policy("off"))
    for shape in ((2, 24, 24), (1, 40, 56)):
        np.testing.assert_array_equal(build.engine().run(pictures(*shape))["y"], general.run(pictures(*shape))["y"])


def test_what_calibration_found_is_done_at_every_shape() -> None:
    model = small_model([node("Add", "x c", "a"), node("MatMul", "a w", "y")], {"x": ["N", "T", 8]}, ["y"],
                        {"c": random(8), "w": random(8, 4)})
    part = built(model, precision="int8", calibration=Calibration([{"x": random(1, 5, 8)}], "minmax")).plan
    assert part.open is not None and part.open.recipe is not None
    recipe = replace(part.open.recipe, smoothing={"a": (2.0,) * 8, "of other shapes": (1.0,)})
    changed = replace(part, open=replace(part.open, recipe=recipe))
    plain, found = (set(Specialiser(plan).graph({"T": 9}).constants) for plan in (part, changed))
    assert "a.smoothed" in found - plain


def test_equal_symbols_are_one_extent_and_the_error_names_both_inputs() -> None:
    engine = opened(attention_net())
    with pytest.raises(InputError, match="'T' is one extent, but input 'x' has 5 there and 'mask' has 6"):
        engine.run({"x": random(1, 5, 16), "mask": random(1, 6)})
    with pytest.raises(InputError, match=r"input 'x' has shape \[1, 5, 17\], the model takes \[batch, T, 16\]"):
        engine.run({"x": random(1, 5, 17), "mask": random(1, 5)})
    with pytest.raises(InputError, match="input 'mask' is missing"):
        engine.run({"x": random(1, 5, 16)})
    with pytest.raises(InputError, match="nothing is computed of no items"):
        engine.run({"x": random(0, 5, 16), "mask": random(0, 5)})


def test_an_open_extent_may_be_0() -> None:
    engine = opened(attention_net())
    for items, length in ((1, 0), (3, 4), (3, 0)):
        assert_right(engine, attention_net(), tokens(items, length) if length else {
            "x": random(items, 0, 16), "mask": random(items, 0)})


def test_profiles_are_compiled_at_once_and_bound_what_is_accepted() -> None:
    def profile(least: int, usual: int, most: int) -> dict[str, Any]:
        return {"x": tuple((items, length, 16) for items, length in ((1, least), (1, usual), (4, most)))}

    engine = opened(attention_net(), profiles=(profile(2, 8, 16), profile(20, 24, 32)))
    assert engine.executor.specialised == [{"T": 8}, {"T": 24}] and engine.max_batch == 4
    assert_right(engine, attention_net(), tokens(2, 30))
    with pytest.raises(InputError, match="'T' is 17, and the plan was built for 2 to 16"):
        engine.run(tokens(1, 17))
    with pytest.raises(ConfigError, match="'T' 9 at least, 8 usually"):
        built(attention_net(), profiles=(profile(9, 8, 16),))
    with pytest.raises(ConfigError, match="does not say what 'columns' of input 'b'"):
        built(pairs_net(), profiles=({"a": ((1, 6), (2, 6), (3, 6))},))


def test_profiles_of_a_model_whose_batch_cannot_be_open_bound_the_number_of_items_too() -> None:
    """Each item depends on all others."""
    crossed = small_model([node("Transpose", "x", "t", perm=[1, 0]), node("MatMul", "x t", "y")],
                          {"x": ["n", "T"]}, ["y"], {})
    engine = opened(crossed, profiles=({"x": ((1, 2), (2, 5), (4, 9))},))
    x = random(4, 7)
    np.testing.assert_allclose(engine.run({"x": x})["y"], x @ x.T, rtol=1e-5)
    with pytest.raises(InputError, match="'items' is 5, and the plan was built for 1 to 4"):
        engine.run({"x": random(5, 7)})


def test_one_given_shape_leaves_other_extents_open() -> None:
    engine = opened(picture_net(), shapes={"x": (None, 3, 16, -1)})
    assert engine.inputs[0].shape == ("batch", 3, 16, "W")
    assert_right(engine, picture_net(), pictures(2, 16, 22))


def test_a_model_that_fails_at_likely_shapes_is_compiled_for_others_or_says_for_which_it_failed() -> None:
    tied = small_model([node("Reshape", "x shape", "y")], {"x": ["n", "T"]}, ["y"], {"shape": np.array([0, 5, 3])})
    with pytest.raises(ModelError, match=r"for T=128; .* --opt-shapes x:BATCHxT"):
        built(tied)
    engine = opened(tied, profiles=({"x": ((1, 15), (1, 15), (4, 15))},))
    assert engine.run({"x": random(2, 15)})["y"].shape == (2, 5, 3)


def test_a_batch_that_only_seems_open_where_other_extents_are_one_is_not_left_open() -> None:
    flat = small_model([node("Reshape", "x shape", "y")], {"x": ["n", "T"]}, ["y"], {"shape": np.array([-1])})
    engine = opened(flat)
    assert [engine.run({"x": random(*shape)})["y"].shape for shape in ((2, 3), (4, 1), (1, 7))] == [(6,), (4,), (7,)]


def test_those_used_last_are_kept() -> None:
    plan = built(pairs_net()).plan
    engine = Engine(plan, specialiser=lambda: Specialiser(plan), policy=Policy("wait", most=2))
    context = engine.create_context()
    for extents in ((2, 3), (4, 5), (2, 3), (6, 7)):
        context.at({"a": (extents[0], 6), "b": (extents[1], 6)})
    assert engine.executor.specialised == [{"rows": 2, "columns": 3}, {"rows": 6, "columns": 7}]
    small = Engine(plan, specialiser=lambda: Specialiser(plan), policy=Policy("wait", memory=1))
    assert_right(small, pairs_net(), rows(3, 4))
    assert small.executor.specialised == [{"rows": 3, "columns": 4}]


def test_the_general_version_serves_until_the_background_is_done() -> None:
    plan, begin, done = built(pairs_net()).plan, threading.Event(), threading.Event()

    class Slow(Specialiser):
        def plan(self, extents: Any, max_batch: int | None = None) -> Any:
            begin.wait()
            try:
                return super().plan(extents)
            finally:
                done.set()

    engine = Engine(plan, specialiser=lambda: Slow(plan), policy=Policy("background", uses=1))
    assert_right(engine, pairs_net(), rows(3, 4))
    assert {"rows": 3, "columns": 4} not in engine.executor.specialised
    begin.set()
    done.wait()
    engine.close()
    assert {"rows": 3, "columns": 4} in engine.executor.specialised
    assert_right(engine, pairs_net(), rows(3, 4))


def test_a_shape_that_comes_often_is_specialised_in_the_background() -> None:
    plan, done = built(pairs_net()).plan, threading.Event()

    class Watched(Specialiser):
        def plan(self, extents: Any, max_batch: int | None = None) -> Any:
            try:
                return super().plan(extents)
            finally:
                done.set()

    engine = Engine(plan, specialiser=lambda: Watched(plan), policy=Policy("background", uses=3))
    for _ in range(2):
        assert_right(engine, pairs_net(), rows(3, 4))
    assert not engine.executor._waiting and not done.is_set()
    assert_right(engine, pairs_net(), rows(3, 4))
    done.wait()
    engine.close()
    assert {"rows": 3, "columns": 4} in engine.executor.specialised


def test_without_symbolic_plans_a_shape_is_specialised_at_once() -> None:
    plan = built(pairs_net()).plan

    class WithoutKernels(Specialiser):
        def symbolic(self, extents: Any) -> Any:
            return None

    for way in ("background", "off"):
        engine = Engine(plan, specialiser=lambda: WithoutKernels(plan), policy=Policy(way))
        assert_right(engine, pairs_net(), rows(3, 4))
        assert engine.executor.specialised[-1] == {"rows": 3, "columns": 4}
        assert engine.executor.keeps(engine.at({"a": (3, 6), "b": (4, 6)}))


ENDING = """
import time
from concurrent.futures import thread
from infer_server.engines.compiler.specialise import Specialiser
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.policy import Policy
from tests.engines.compiler.test_open_shapes import built, pairs_net, rows

plan = built(pairs_net()).plan

class Slow(Specialiser):
    def plan(self, extents, max_batch=None):
        print("makes", flush=True)
        while not thread._shutdown:         # the process ends, and waits for what its executors have
            time.sleep(0.01)
        return super().plan(extents, max_batch)

engine = Engine(plan, specialiser=lambda: Slow(plan), policy=Policy("background", uses=1))
for at in (3, 5, 7):
    engine.run(rows(at, at + 1))
"""


def test_a_process_that_ends_does_not_stay_for_what_waits_to_be_specialised() -> None:
    said = subprocess.run([sys.executable, "-c", ENDING], check=True, capture_output=True, text=True).stdout
    assert said.count("makes") <= 1


def test_where_specialising_fails_the_general_version_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    plan = built(pairs_net()).plan

    class Broken(Specialiser):
        def plan(self, extents: Any, max_batch: int | None = None) -> Any:
            raise ModelError("no kernel")

    engine = Engine(plan, specialiser=lambda: Broken(plan), policy=Policy("background", uses=1))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_right(engine, pairs_net(), rows(3, 4))
            engine.close()
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "no specialisation for rows=3, columns=4, the symbolic plan serves: no kernel"]


def test_a_stripped_plan_runs_what_was_specialised_and_says_so(tmp_path: Path) -> None:
    build = built(pairs_net(), profiles=({"a": ((1, 6), (2, 6), (9, 6)), "b": ((1, 6), (3, 6), (9, 6))},))
    build.save(tmp_path / "m.plan", strip=True)
    engine = load_engine(tmp_path / "m.plan")
    assert_right(engine, pairs_net(), rows(2, 3))
    with pytest.raises(PlanTargetError, match="stripped"):
        engine.run(rows(3, 3))


def test_specialisations_are_kept_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(attention_net()).save(tmp_path / "m.plan")
    def engine() -> Any:
        return load_engine(tmp_path / "m.plan", cache=tmp_path / "kept", specialise="wait")

    assert_right(engine(), attention_net(), tokens(2, 6))
    assert len(list((tmp_path / "kept").glob("*.plan"))) == 1
    monkeypatch.setattr(Specialiser, "_compiled", lambda self, target, extents: pytest.fail("it is made again"))
    assert_right(engine(), attention_net(), tokens(2, 6))


def test_contexts_of_many_shapes_take_the_memory_of_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values left by another shape change no result, and later runs do not overwrite kept results."""
    monkeypatch.setattr(policy_module, "IDLE_BYTES", 0)
    engine = Engine(plan := built(attention_net()).plan, specialiser=lambda: Specialiser(plan), policy=Policy("off"))
    context = engine.create_context()
    made = 0
    memory = arena.Memory

    class Counted(memory):              # type: ignore[valid-type, misc]
        def __init__(self, size: int, huge_pages: bool = True) -> None:
            nonlocal made
            made += size >= 1 << 16         # size of a pool; constants are smaller
            super().__init__(size, huge_pages)

    monkeypatch.setattr(arena, "Memory", Counted)
    kept: list[tuple[Array, Array]] = []
    for length in (*range(5, 25), *range(24, 4, -3)):
        feeds = tokens(2, length)
        here = context.at({name: array.shape for name, array in feeds.items()})
        for name, array in feeds.items():
            here.input(name, 2)[...] = array
        here.execute(2)
        (name,) = (io.name for io in engine.outputs)
        kept.append((here.output(name, 2), here.output(name, 2).copy()))
        kept = kept[-1:]
        np.testing.assert_allclose(kept[0][1], engine.run(feeds)[name], rtol=TOLERANCE, atol=TOLERANCE)
        np.testing.assert_array_equal(*kept[0])
    assert 0 < made < 10


def test_a_context_is_used_for_one_set_of_shapes_after_the_other() -> None:
    engine = opened(pairs_net())
    context = engine.create_context()
    for a, b in ((3, 4), (5, 2), (3, 4)):
        feeds, here = rows(a, b), context.at({"a": (a, 6), "b": (b, 6)})
        for name, array in feeds.items():
            here.input(name)[...] = array
        here.execute()
        np.testing.assert_allclose(here.output("y"), feeds["a"] @ feeds["b"].T, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_plan_with_open_extents_is_compiled_again_for_another_target() -> None:
    plan = built(attention_net()).plan
    portable = relower(plan, "portable")
    assert portable.machine.target == "portable" and portable.extents == plan.extents
    engine = Engine(portable, specialiser=lambda: Specialiser(portable))
    assert_right(engine, attention_net(), tokens(2, 5))


def test_the_file_holds_weights_once_and_reads_back_equal(tmp_path: Path) -> None:
    build = built(recurrent_net(), profiles=tuple({"x": ((1, 1, 4), (1, t, 4), (2, 9, 4))} for t in (4, 7)))
    build.save(tmp_path / "m.plan")
    plan = read_plan(tmp_path / "m.plan")
    assert plan == build.plan and plan.open == build.plan.open and plan.open is not None
    assert [other.extents for other in plan.open.others] == [{"T": 7}]
    for name, array in recurrent_weights().items():
        np.testing.assert_array_equal(plan.open.weights[name], array)


def recurrent_weights() -> dict[str, Array]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in recurrent_net().graph.initializer}


def test_the_outputs_say_which_of_their_extents_are_open() -> None:
    model = attention_net()
    assert opened(model).outputs[0].shape[0] == "batch" and opened(model).outputs[0].shape[1:] == ("y.1", "y.2")


def test_of_a_cache_that_grows_no_specialisation_is_made_before_a_length_comes_again() -> None:
    build = built(growing_net())
    engine = Engine(build.plan, specialiser=lambda: Specialiser(build.plan))
    exact = Engine(build.plan, specialiser=lambda: Specialiser(build.plan), policy=Policy("off"))

    def step(length: int) -> dict[str, Array]:
        return {"x": random(1, 1, 16), "keys": random(1, 4, length, 4), "values": random(1, 4, length, 4)}

    for length in range(20, 32):
        np.testing.assert_allclose(engine.run(step(length))["y"], exact.run(step(length))["y"], atol=TOLERANCE)
    quick = Engine(build.plan, specialiser=lambda: Specialiser(build.plan), policy=Policy("background"))
    for length in range(20, 26):
        quick.run(step(length))
    assert not [extents["P"] for extents in quick.executor.specialised if extents["P"] < 100]
    quick.close()
    lengths = [extents["P"] for extents in engine.executor.specialised if extents["P"] < 100]
    assert lengths == [20, 21, 22, 23]
    engine.run(step(31))
    assert engine.executor.specialised[-1] == {"P": 31}


def test_a_context_for_which_there_is_no_memory_does_not_fail_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "IDLE_BYTES", 0)
    plan = built(pairs_net()).plan
    context = Engine(plan, specialiser=lambda: Specialiser(plan), policy=Policy("off")).create_context()

    def shapes(count: int) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in rows(count, count).items()}

    def refuses(self: Specialisation, cpus: object = None) -> Any:
        raise PlanError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(Specialisation, "create_context", refuses)
        with pytest.raises(PlanError):
            context.at(shapes(3))
    for count in range(4, 12):
        context.at(shapes(count))
