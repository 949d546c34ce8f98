"""NumPy plans are built without a compiler, and give the kernels' results."""
from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from infer_server.backend import load_plan, warm_up
from infer_server.cli import inspect_engine, run_engine
from infer_server.engines.compiler.build import build_engine
from infer_server.engines.compiler.specialise import relower
from infer_server.engines.errors import ConfigError, PlanVersionError
from infer_server.engines.loading import load_engine
from infer_server.engines.runtime.engine import Engine
from tests.engines.compiler.small_models import feeds_of, node, small_model
from tests.engines.compiler.zoo_engines import compiled, relative_error
from tests.zoo import TINY, images_for, run_onnx

# Halos, concatenation in place, transposed and grouped convolutions, channels in another order, strided slices.
MODELS = ("mobilenet_v2", "densenet", "decoder", "resnext50", "shufflenet_v2_by_slices", "views", "layout_traps",
          "odd_channels", "explicit_pads")


@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_graph_gives_the_same_bytes_as_by_kernels(name: str, tmp_path: Path) -> None:
    model = TINY[name]()
    plan = compiled(model, tmp_path, precision="int8").plan
    x = {"input": images_for(model, 6, seed=1)}      # in slices of max_batch, so the last one is smaller
    ours, theirs = Engine(relower(plan, "numpy")).run(x), Engine(plan).run(x)
    for output, value in theirs.items():
        assert value.std() > 0
        np.testing.assert_array_equal(ours[output], value)


@pytest.mark.parametrize("name", MODELS)
def test_a_float_graph_agrees_with_onnx_runtime(name: str, tmp_path: Path) -> None:
    model = TINY[name]()
    plan = compiled(model, tmp_path, target="numpy").plan
    part = plan.machine
    assert (part.backend, part.target, part.code, len(part.constants)) == ("numpy", "numpy", (), 0)
    x = {"input": images_for(model, 3, seed=1)}
    for output, expected in run_onnx(model, x).items():
        assert relative_error(Engine(plan).run(x)[output], expected) < 1e-4


def test_items_of_batches_of_any_size_do_not_meet(tmp_path: Path) -> None:
    """Halos, here of zero points, are written for as many items as the context has run."""
    model = TINY["explicit_pads"]()
    context = Engine(compiled(model, tmp_path, precision="int8", target="numpy").plan).create_context()
    x = images_for(model, 4, seed=1)

    def run(items: Any) -> Any:
        context.input("input", len(items))[...] = items
        context.execute(len(items))
        return context.output("output", len(items)).copy()

    alone = np.concatenate([run(x[i:i + 1]) for i in range(4)])
    for batch in (4, 2, 3):
        np.testing.assert_array_equal(run(x[:batch]), alone[:batch])


def test_a_node_without_a_problem_runs_on_the_reference() -> None:
    model = small_model([node("Relu", "x", "r"), node("Det", "r", "y")], {"x": ["n", 3, 3]}, ["y"])
    build = build_engine(model, target="numpy", max_batch=4, cache=False)
    assert [step.reason for step in build.plan.machine.steps] == ["", "no kernel for Det"]
    x = feeds_of(model)["x"]
    np.testing.assert_allclose(build.engine().run({"x": x})["y"], np.linalg.det(np.maximum(x, 0)), 1e-5, 1e-6)


@pytest.mark.filterwarnings("error")
def test_no_warning_is_given_of_infinite_inputs() -> None:
    model = small_model([node("Softmax", "x", "y")], {"x": [1, 3]}, ["y"])
    engine = build_engine(model, target="numpy", cache=False).engine()
    assert np.isnan(engine.run({"x": np.float32([[np.inf, 1, 2]])})["y"]).all()


def test_neither_building_nor_running_loads_llvm(tmp_path: Path) -> None:
    onnx.save(TINY["explicit_pads"](), tmp_path / "m.onnx")
    script = """if True:
        import sys
        sys.modules["llvmlite"] = None              # an import of it raises
        from infer_server.engines import load_engine
        from infer_server.cli import build_engine, run_engine
        assert build_engine.main(["m.onnx", "-o", "m.plan", "--target", "numpy", "-q", "--no-cache"]) == 0
        assert run_engine.main(["m.plan", "--seconds", "0.01", "--profile"]) == 0"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0, done.stderr


def test_the_commands_and_the_server_take_such_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = compiled(TINY["explicit_pads"](), tmp_path, target="numpy")
    path = str(tmp_path / "m.plan")
    build.save(path)
    assert inspect_engine.main([path]) == 0
    said = capsys.readouterr().out
    assert "fp32 for numpy" in said and "contraction: numpy" in said
    assert run_engine.main([path, "--seconds", "0.01", "--batch", "2"]) == 0
    assert inspect_engine.main([path, "--profile"]) == 0
    assert "contraction: numpy" in capsys.readouterr().out
    engine = load_plan(Path(path), threads=1)
    assert engine.arena_bytes > 0 and warm_up(engine.create_context(), engine).keys() == {1, 4}


def test_a_plan_of_numpy_keeps_its_weights(tmp_path: Path) -> None:
    build = compiled(TINY["explicit_pads"](), tmp_path, target="numpy")
    with pytest.raises(ConfigError, match="has no code, and needs its weights.*without --strip"):
        build.save(tmp_path / "m.plan", strip=True)
    build.save(tmp_path / "m.plan")
    x = {"input": images_for(TINY["explicit_pads"](), 2, seed=1)}
    np.testing.assert_array_equal(load_engine(tmp_path / "m.plan").run(x)["output"], build.engine().run(x)["output"])


def test_a_plan_that_is_laid_out_otherwise_than_its_graph_is_lowered_now_is_refused(tmp_path: Path) -> None:
    plan = compiled(TINY["explicit_pads"](), tmp_path, target="numpy").plan
    first, *others = plan.machine.buffers
    with pytest.raises(PlanVersionError, match="another version of the compiler; build the plan again"):
        Engine(plan.with_machine(buffers=(replace(first, bytes=first.bytes // 2), *others)))
