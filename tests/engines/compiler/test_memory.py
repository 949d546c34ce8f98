"""Tests of the memory that a context of a compiled plan takes."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from infer_server.engines import build_engine
from infer_server.engines.backends.llvm.codegen.isa import isa_named
from infer_server.engines.compiler import max_batch
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.compiler.specialise import Specialiser
from infer_server.engines.errors import InputError
from infer_server.engines.ir.graph import Array
from infer_server.engines.lowering import buffers as lowering_buffers
from infer_server.engines.lowering.buffers import buffers_of, fills_of, write_borders
from infer_server.engines.lowering.lower import lower
from infer_server.engines.ops import reference
from infer_server.engines.passes.quantization.weights import with_rounded_rows
from infer_server.engines.plan.arena import MemoryPool, plan_memory
from infer_server.engines.plan.coverage import writes_border
from infer_server.engines.plan.plan import Buffer, Fill
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.policy import Policy
from infer_server.engines.runtime.specialisation import Specialisation
from tests.engines.compiler.open_models import node, random
from tests.engines.compiler.small_models import small_model
from tests.engines.compiler.zoo_engines import MAX_BATCH, compiled
from tests.zoo import TINY, images_for

MODELS = ("mobilenet_v2", "nanodet", "resnet18", "unet")


def memory_of(model: onnx.ModelProto, precision: str) -> tuple[tuple[Buffer, ...], tuple[Fill, ...], int]:
    """Return the buffers, fills and number of steps of a model's plan, without compiling kernels.

    Ranges are those of one picture.
    """
    builder = Builder(BuildConfig(precision=precision, timing=False, max_batch=MAX_BATCH))
    graph = builder.graph(model)
    edges = builder.edges(graph)
    seen = reference.run(graph, {"input": images_for(model, 1, seed=100)}, edges) if precision == "int8" else {}
    stored = builder.stored(graph, {name: (float(seen[name].min()), float(seen[name].max())) for name in seen})
    lowered = write_borders(lower(with_rounded_rows(stored), isa_named(builder.target).narrow.lanes), MAX_BATCH)
    return buffers_of(lowered, MAX_BATCH), fills_of(lowered), len(lowered.calls)


def alive(buffers: tuple[Buffer, ...], steps: int) -> int:
    """Return the largest number of bytes of simultaneously live buffers."""
    return max(sum(b.bytes for b in buffers if b.first <= step <= b.last) for step in range(steps))


@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_a_context_takes_less_than_twice_what_is_alive_at_once(name: str, precision: str) -> None:
    buffers, fills, steps = memory_of(TINY[name](size=96), precision)
    assert plan_memory(buffers, fills).total < 2 * alive(buffers, steps)


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_the_memory_of_a_plan_is_that_of_its_lowered_graph(precision: str, tmp_path: Path) -> None:
    """The other tests' memory_of gives the buffers and fills of a real build."""
    model = TINY["mobilenet_v2"](size=96)
    machine = compiled(model, tmp_path, precision=precision).plan.machine
    assert memory_of(model, precision) == (machine.buffers, machine.fills, len(machine.steps))


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_halos_written_in_every_run_change_no_result(precision: str, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY["mobilenet_v2"](size=96)
    feeds = [{"input": images_for(model, 3, seed=seed)} for seed in (1, 2)]
    results = {}
    for spare in (0.0, 100.0):
        monkeypatch.setattr(lowering_buffers, "SPARE", spare)
        plan = compiled(model, tmp_path, precision=precision).plan
        assert bool(plan.machine.fills) == (spare == 100)
        assert any(writes_border(step) for step in plan.machine.steps) == (spare == 0)
        engine = Engine(plan)
        results[spare] = [value for feed in feeds for value in engine.run(feed).values()]
    for got, expected in zip(results[0.0], results[100.0], strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("target", ["", "numpy"])
def test_a_watched_tensor_is_shown_whole_and_its_memory_serves_others_then(target: str) -> None:
    model = TINY["mobilenet_v2"](size=32)
    builder = Builder(BuildConfig(max_batch=2, timing=False, target=target))
    graph = builder.graph(model)
    tensors = [name for node in graph.nodes for name in node.outputs]
    feeds, shown = {"input": images_for(model, 2, seed=1)}, dict[str, Array]()
    engine = Specialisation(builder.observable(graph, tensors))
    engine.show(feeds, lambda name, values: shown.update({name: values.copy()}))
    expected = reference.run(graph, feeds, tensors)
    assert shown.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(shown[name], values, rtol=1e-3, atol=1e-3, err_msg=name)
    assert 2 * engine.arena_bytes < sum(values.nbytes for values in shown.values())
    with pytest.raises(InputError, match="batch 3, but the plan was built for 1 to 2"):
        engine.show({"input": images_for(model, 3, seed=1)}, lambda *_: None)


def test_a_build_says_that_fewer_large_items_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_batch, "memory_limit", lambda: 16_000)
    model = small_model([node("Relu", "x", "y")], {"x": ["N", 100]}, ["y"])
    notice = ("items are large for this machine's memory: a plan takes 4 at once, not 32, and runs more in slices; "
              "--max-batch sets how many")
    for most, said in (None, [notice]), (8, []):
        builder = Builder(BuildConfig(max_batch=most, timing=False))
        assert (builder.plan(builder.graph(model)).max_batch, builder.notices) == (most or 4, said)


@pytest.mark.parametrize(("columns", "most"), [(4, 1024), (100, 1024), (1000, 128), (4096, 32), (40_000, 32)])
def test_small_items_share_a_batch_while_all_are_in_a_cache(columns: int, most: int) -> None:
    model = small_model([node("Relu", "x", "y")], {"x": ["N", columns]}, ["y"])
    builder = Builder(BuildConfig(timing=False))
    plan = builder.plan(builder.graph(model))
    assert plan.max_batch == most and not builder.notices
    x = {"x": random(most + 3, columns)}
    np.testing.assert_array_equal(Engine(plan).run(x)["y"], x["x"].clip(0))


def test_small_items_of_an_open_model_are_as_many_as_large_ones() -> None:
    model = small_model([node("Relu", "x", "y")], {"x": ["N", "columns"]}, ["y"])
    engine = build_engine(model, timing=False, cache=False).engine()
    assert {engine.at({"x": (5, columns)}).plan.max_batch for columns in (4, 4096)} == {engine.max_batch} == {32}


@pytest.mark.parametrize("specialise", ["wait", "off"])
@pytest.mark.parametrize("asked", [None, 32])
def test_fewer_items_that_are_large_share_a_batch_and_more_are_run_in_slices(
        monkeypatch: pytest.MonkeyPatch, asked: int | None, specialise: str) -> None:
    """Engines and contexts do so, with specialisations and with dynamic plans, for a given and for a default batch."""
    monkeypatch.setattr(max_batch, "memory_limit", lambda: 160_000_000)
    model = small_model([node("Conv", "x w", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "y")],
                        {"x": ["N", 1, "H", "W"]}, ["y"], {"w": random(2, 1, 3, 3)})
    plan = build_engine(model, timing=False, cache=False, max_batch=asked, opt_batch=16).plan
    engine = Engine(plan, specialiser=lambda: Specialiser(plan), policy=Policy(specialise))
    pictures = random(9, 1, 448, 448)
    here = {"x": pictures.shape}
    assert (engine.max_batch, engine.at(here).plan.max_batch) == (32, 8)
    context = engine.create_context().at(here)
    context.input("x", 9)[...] = pictures
    context.execute(9)
    expected = np.concatenate([engine.run({"x": picture[None]})["y"] for picture in pictures])
    for made in engine.run({"x": pictures})["y"], context.output("y", 9):
        np.testing.assert_array_equal(made, expected)


def test_huge_pages_are_for_tensors_whose_items_fill_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of one item would touch a page for each of many small tensors of 32 items."""
    taken: list[bool] = []
    take = MemoryPool.take

    def taking(pool: MemoryPool, size: int, huge_pages: bool = True) -> Any:
        taken.append(huge_pages)
        return take(pool, size, huge_pages)

    monkeypatch.setattr(MemoryPool, "take", taking)
    names = [f"x{i}" for i in range(12)]
    model = small_model([node("Add", f"{name} one", f"y{name}") for name in names],
                        dict.fromkeys(names, ["N", "T", 512]), [f"y{name}" for name in names],
                        {"one": np.ones(1, np.float32)})
    plan = build_engine(model, timing=False, cache=False, max_batch=4).plan
    engine = Engine(plan, specialiser=lambda: Specialiser(plan), policy=Policy("off"))
    for length, expected in ((20, False), (250, False), (1100, True)):     # 40 KB, 512 KB and 2.2 MB a tensor
        taken.clear()
        engine.run(dict.fromkeys(names, random(1, length, 512)))
        assert {*taken} == {expected}
