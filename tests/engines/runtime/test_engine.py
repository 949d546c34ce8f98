"""Tests of engines and contexts of one and several threads, on handwritten plans."""
from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from infer_server.engines import load_engine
from infer_server.engines.errors import ConfigError, InputError, PlanCorruptError, PlanError, PlanTargetError
from infer_server.engines.ir.graph import Array, Graph, Node, TensorType
from infer_server.engines.ir.serialize import graph_to_json
from infer_server.engines.plan.file import write_plan
from infer_server.engines.plan.plan import Operand
from infer_server.engines.runtime import engine
from infer_server.engines.runtime.engine import Engine
from tests.engines.tiny import halo_plan, mix_plan, mix_reference

READS = [(0, 0), (0, 1), (2, 1), (1, 3), (4, 0)]
OUTPUTS = [3, 5]
pytestmark = pytest.mark.usefixtures("eager")      # or threads would not share steps as short as these
THREADS = pytest.mark.parametrize("threads", [1, 3])


def some_input(items: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-1000, 1000, (items, 6, 10), np.int32)


def assert_equal(got: dict[str, Array], want: dict[str, Array]) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@THREADS
@pytest.mark.parametrize("items", [0, 1, 3, 4, 9])
def test_any_number_of_items_runs_in_slices_of_max_batch(threads: int, items: int) -> None:
    engine = Engine(mix_plan(READS, OUTPUTS), threads)
    x = some_input(items)
    assert_equal(engine.run({"x": x}), mix_reference(READS, OUTPUTS, x))
    engine.close()


def test_an_input_of_which_only_the_shape_is_wanted_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = mix_plan(READS, OUTPUTS)
    view, = plan.machine.inputs
    plan = replace(plan, inputs=(*plan.inputs, replace(plan.inputs[0], name="more"))).with_machine(
        inputs=(view, replace(view, name="more", buffer=len(plan.machine.buffers))),
        buffers=(*plan.machine.buffers, plan.machine.buffers[view.buffer]))
    copied: list[Array] = []

    def copyto(to: Array, array: Array) -> None:
        copied.append(array)
        to[...] = array
    monkeypatch.setattr(np, "copyto", copyto)
    x, more = some_input(9), some_input(9, seed=1)
    assert_equal(Engine(plan).run({"more": more, "x": x}), mix_reference(READS, OUTPUTS, x))
    assert [np.shares_memory(array, x) for array in copied] == [True] * 3
    with pytest.raises(InputError, match="'more' is missing"):
        Engine(plan).run({"x": x})


@THREADS
def test_a_feed_like_the_one_before_is_taken_and_refused_as_the_first_was(threads: int) -> None:
    engine = Engine(mix_plan(READS, OUTPUTS), threads)
    feeds = [some_input(items, seed) for seed, items in enumerate((3, 3, 3, 2, 2, 3, 9, 3))]
    made = [engine.run({"x": x}) for x in feeds]
    for x, got in zip(feeds, made, strict=True):        # of all runs: none has changed what another one gave
        assert_equal(got, mix_reference(READS, OUTPUTS, x))
    x = feeds[-1]
    strided = np.repeat(x, 2, axis=2)[..., ::2]
    for same in (x.tolist(), strided, x.astype(x.dtype, order="F")):
        assert_equal(engine.run({"x": np.asarray(same, np.int32)}), made[-1])
    for wrong in ({}, {"y": x}, {"x": x, "y": x}, {"x": x.astype(np.int64)}, {"x": x.astype(">i4")}, {"x": x[..., :9]}):
        with pytest.raises(InputError):
            engine.run(wrong)
    assert_equal(engine.run({"x": x}), made[-1])
    engine.close()


@THREADS
def test_a_context_runs_again_on_what_its_inputs_hold(threads: int) -> None:
    context = Engine(mix_plan(READS, OUTPUTS), threads).create_context()
    x = some_input(4)
    view = context.input("x", 4)
    view[...] = x
    for batch in (4, 2, 4):
        context.execute(batch)
        for name, want in mix_reference(READS, OUTPUTS, x[:batch]).items():
            np.testing.assert_array_equal(context.output(name, batch), want)
    x[1] = view[1] = 7
    context.execute(2)
    np.testing.assert_array_equal(context.output("t5", 2), mix_reference(READS, OUTPUTS, x[:2])["t5"])
    context.close()


@THREADS
def test_a_halo_is_there_for_every_item_and_stays(threads: int) -> None:
    engine = Engine(halo_plan(), threads)
    for items in (1, 3, 2):
        x = np.arange(items * 8, dtype=np.int32).reshape(items, 2, 4)
        want = np.full((items, 2, 6), -7, np.int32)
        want[:, :, 1:5] = x + 5
        np.testing.assert_array_equal(engine.run({"x": x})["y"], want)
    engine.close()


@THREADS
def test_a_model_without_a_batch_axis_takes_its_tensors_whole(threads: int) -> None:
    plan = mix_plan(READS, OUTPUTS, max_batch=1)
    plan = plan.with_machine(**{kind: tuple(replace(view, batched=False) for view in getattr(plan.machine, kind))
                                for kind in ("inputs", "outputs")})
    fixed = [replace(io, shape=(6, 10)) for io in (*plan.inputs, *plan.outputs)]
    engine = Engine(replace(plan, max_batch=0, inputs=tuple(fixed[:1]), outputs=tuple(fixed[1:])), threads)
    x = some_input(1)
    want = mix_reference(READS, OUTPUTS, x)
    assert_equal(engine.run({"x": x[0]}), {name: array[0] for name, array in want.items()})
    with pytest.raises(InputError, match="no batch axis"):
        engine.create_context().execute(2)
    engine.close()


@THREADS
def test_threads_that_share_an_engine_get_the_answers_to_their_own_requests(threads: int) -> None:
    engine = Engine(mix_plan(READS, OUTPUTS), threads)
    failures: list[str] = []

    def client(seed: int) -> None:
        for turn in range(40):
            x = some_input(1 + turn % 5, seed * 100 + turn)
            for name, want in mix_reference(READS, OUTPUTS, x).items():
                if not np.array_equal(engine.run({"x": x})[name], want):
                    failures.append(f"client {seed}, turn {turn}, {name}")

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    engine.close()
    assert not failures


@pytest.mark.parametrize(("feeds", "message"), [
    ({}, "input 'x' is missing"),
    ({"y": np.zeros((1, 6, 10), np.int32)}, "no input 'y'; it has 'x'"),
    ({"x": np.zeros((1, 6, 10), np.int64)}, "is int64, the model takes int32"),
    ({"x": np.zeros((1, 6, 9), np.int32)}, r"\[1, 6, 9\], the model takes \[batch, 6, 10\]"),
    ({"x": np.zeros((6, 10), np.int32)}, r"\[6, 10\], the model takes \[batch, 6, 10\]"),
])
def test_a_feed_that_does_not_fit_says_what_was_expected(feeds: dict[str, Array], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Engine(mix_plan(READS, OUTPUTS)).run(feeds)


def test_names_and_batches_that_do_not_exist_are_refused() -> None:
    context = Engine(mix_plan(READS, OUTPUTS)).create_context()
    for batch in (0, 5):
        with pytest.raises(InputError, match="1 to 4"):
            context.execute(batch)
    with pytest.raises(InputError, match="no output 'x'; it has 't3', 't5'"):
        context.output("x")


def test_a_step_without_its_kernel_is_refused_when_the_plan_is_loaded() -> None:
    plan = mix_plan(READS, OUTPUTS)
    with pytest.raises(PlanCorruptError, match="step 'mix_0' needs 'mix'"):
        Engine(plan.with_machine(code=plan.machine.code[1:]))
    with pytest.raises(PlanCorruptError, match="the executor needs 'run_steps'"):
        Engine(plan.with_machine(code=plan.machine.code[:1]))


def test_a_context_is_freed_with_the_last_reference_and_its_helpers_go_home() -> None:
    engine = Engine(mix_plan(READS, OUTPUTS), 3)
    before = set(threading.enumerate())     # another test's may yet end
    context = engine.create_context()
    context.execute(1)
    output = context.output("t5")
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    gone = weakref.ref(context)
    del context
    gc.collect()
    assert gone() is None
    assert helpers.isdisjoint(threading.enumerate())
    output.sum()        # a view outlives its context


def test_a_plan_for_another_cpu_is_refused_or_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    plan = mix_plan(READS, OUTPUTS)
    write_plan(plan.with_machine(target="amx9", cpu={"features": ["amx_int4096"]}), tmp_path / "m.plan")
    with pytest.raises(PlanTargetError, match="made for 'amx9'.* lacks amx_int4096"):
        load_engine(tmp_path / "m.plan", on_target_mismatch="refuse")

    builder = SimpleNamespace(relowered=lambda plan, cache: mix_plan(READS, OUTPUTS))
    monkeypatch.setitem(sys.modules, "infer_server.engines.compiler.specialise", builder)
    x = some_input(2)
    assert_equal(load_engine(tmp_path / "m.plan").run({"x": x}), mix_reference(READS, OUTPUTS, x))
    assert "lacks amx_int4096; compiling its graph again" in caplog.text


def test_a_plan_whose_graph_cannot_be_compiled_again_is_refused(tmp_path: Path) -> None:
    plan = mix_plan(READS, OUTPUTS).with_machine(cpu={"features": ["amx_int4096"]})     # the graph is invalid
    write_plan(plan, tmp_path / "m.plan")
    with pytest.raises(PlanError, match="a graph that cannot be read"):
        load_engine(tmp_path / "m.plan")
    document, _ = graph_to_json(Graph("g", ("x",), ("y",), (Node("Relu", ("nowhere",), ("y",)),), {}, {
        name: TensorType(np.dtype(np.float32), (1, 2)) for name in ("x", "y")}))
    write_plan(replace(plan, graph=document, weights={}), tmp_path / "m.plan")
    with pytest.raises(PlanTargetError, match="its graph cannot be compiled again here: .*reads 'nowhere'"):
        load_engine(tmp_path / "m.plan")


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'relower' or 'refuse'"):
        load_engine(tmp_path / "m.plan", on_target_mismatch="ignore")
    with pytest.raises(ConfigError, match="threads=0"):
        Engine(mix_plan(READS, OUTPUTS), 0)
    with pytest.raises(ConfigError, match=r"cpus=\[0\]: 2 threads take as many CPUs"):
        Engine(mix_plan(READS, OUTPUTS), 2, cpus=[0])
    with pytest.raises(ConfigError, match="may not use"):
        Engine(mix_plan(READS, OUTPUTS)).create_context(cpus=[1 << 20])


@THREADS
def test_a_profile_times_every_step(threads: int) -> None:
    context = Engine(mix_plan(READS, OUTPUTS), threads).create_context()
    profile = context.profile(batch=2, repeats=2)
    assert [step.name for step, _ in profile] == [f"mix_{i}" for i in range(5)]
    assert all(0 <= seconds < math.inf for _, seconds in profile)
    context.close()


def test_serving_a_ready_plan_loads_neither_onnx_nor_llvm(tmp_path: Path) -> None:
    write_plan(mix_plan(READS, OUTPUTS), tmp_path / "m.plan")
    program = """
import sys
import numpy as np
from infer_server.engines import load_engine
for threads in (1, 2):
    print(load_engine(sys.argv[1], threads=threads).run({"x": np.ones((2, 6, 10), np.int32)})["t5"].sum())
compiling = ("onnx", "llvmlite", *(f"infer_server.engines.{room}" for room in (
    "ops", "frontend", "passes", "lowering", "compiler", "backends.base", "backends.llvm.backend",
    "backends.llvm.codegen", "backends.llvm.kernels", "backends.numpy")))
heavy = [name for name in sys.modules if name.startswith(compiling)]
print("loaded:", heavy)
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", program, str(tmp_path / "m.plan")],
                            capture_output=True, text=True, check=False, timeout=120,
                            cwd=Path(engine.__file__).parents[3])
    want = mix_reference(READS, OUTPUTS, np.ones((2, 6, 10), np.int32))["t5"].sum()
    assert result.stdout.splitlines() == [str(want), str(want), "loaded: []"], result.stderr


def test_constants_are_found_wherever_their_bytes_begin() -> None:
    plan = halo_plan()
    step = replace(plan.machine.steps[0], operands=(Operand(0), Operand(None, 0), Operand(1, 4)))
    for shift in range(4):      # memoryviews that begin at any address
        constants = memoryview(bytes(shift) + np.int32(9).tobytes())[shift:]
        result = Engine(plan.with_machine(constants=constants, steps=(step,))).run({"x": np.zeros((1, 2, 4), np.int32)})
        assert result["y"].tolist() == [[[-7, 9, 9, 9, 9, -7]] * 2]
