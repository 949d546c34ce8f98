"""Engines of recurrent networks give ONNX Runtime's results, without a step on the reference."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from infer_server.calibration.accuracy.measures import sqnr_db
from infer_server.calibration.workflow import Calibration
from infer_server.engines.compiler.build import build_engine
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ops.reference import run
from infer_server.engines.passes.pipeline import optimise, simplify
from infer_server.engines.runtime.engine import Engine
from tests.conformance.cases import cases, data_of, model_of
from tests.engines.compiler.recurrent_models import MODELS, Writer, sequences_for
from tests.engines.compiler.zoo_engines import fallbacks, relative_error
from tests.zoo import run_onnx

EVERY = pytest.mark.parametrize("name", MODELS)
TOLERANCE = 2e-5        # relative to the largest value: float32 sums in another order, fed back


def oracle(name: str, model: onnx.ModelProto, x: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """Return ONNX Runtime's outputs, or for layout 1, which it lacks, those of our reference."""
    return run(graph_from_onnx(model), {"x": x}) if name == "batch major" else run_onnx(model, {"x": x})


def engine_of(model: onnx.ModelProto, folder: Path, precision: str = "fp32") -> Engine:
    onnx.save(model, folder / "model.onnx")
    calibration = None
    if precision == "int8":
        np.savez(folder / "calibration.npz", x=sequences_for(model, 32, seed=100))
        calibration = Calibration(folder / "calibration.npz", "minmax")
    symbolic = not model.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    return Engine(build_engine(folder / "model.onnx", calibration=calibration, cache=False, precision=precision,
                               max_batch=9 if symbolic else None, timing=False).plan)


@EVERY
def test_an_engine_agrees_with_onnx_runtime_and_every_layer_has_a_kernel(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    engine = engine_of(model, tmp_path)
    assert not fallbacks(engine), [f"{step.name}: {step.reason}" for step in fallbacks(engine)]
    for items in (1, 6, 11):        # one item, tiles of several, more than the plan's slots
        x = sequences_for(model, items)
        expected = oracle(name, model, x)
        for output, value in engine.run({"x": x}).items():
            assert relative_error(value, expected[output]) < TOLERANCE


@EVERY
@pytest.mark.parametrize("batch", [1, 3])
def test_a_fixed_batch_is_compiled_too(name: str, batch: int, tmp_path: Path) -> None:
    model = MODELS[name](batch=batch)
    engine = engine_of(model, tmp_path)
    assert not fallbacks(engine), [f"{step.name}: {step.reason}" for step in fallbacks(engine)]
    x = sequences_for(model, batch)
    expected = oracle(name, model, x)
    for output, value in engine.run({"x": x}).items():
        assert relative_error(value, expected[output]) < TOLERANCE


@EVERY
def test_the_passes_keep_the_meaning(name: str) -> None:
    model = MODELS[name]()
    x = sequences_for(model, 3)
    expected = oracle(name, model, x)
    graph = graph_from_onnx(model)
    for stage in (graph, simplify(graph), optimise(simplify(graph))):
        for output, value in run(stage, {"x": x}).items():
            assert relative_error(value, expected[output]) < TOLERANCE


@EVERY
def test_the_exported_model_means_the_same(name: str) -> None:
    model = MODELS[name]()
    x = sequences_for(model, 3)
    expected = oracle(name, model, x)
    for output, value in run_onnx(onnx_from_graph(optimise(simplify(graph_from_onnx(model)))), {"x": x}).items():
        assert relative_error(value, expected[output]) < TOLERANCE


@pytest.mark.parametrize("precision, least_db", [("int8", 30.0), ("bf16", 35.0), ("fp16", 50.0)])
@pytest.mark.parametrize("name", ["crnn", "recogniser", "commands", "signals", "keras lstm", "keras rnn of sequences"])
def test_other_precisions_are_close(name: str, precision: str, least_db: float, tmp_path: Path) -> None:
    model = MODELS[name]()
    engine = engine_of(model, tmp_path, precision)
    x = sequences_for(model, 8, seed=1)
    expected = oracle(name, model, x)
    for output, value in engine.run({"x": x}).items():
        assert sqnr_db(expected[output], value) > least_db
    assert not fallbacks(engine), [f"{step.name}: {step.reason}" for step in fallbacks(engine)]
    assert any("recurrence" in step.tactic and step.precision == "int16" for step in engine.plan.machine.steps)


def test_a_layer_of_batch_first_moves_nothing(tmp_path: Path) -> None:
    """Transposes cancel, so a layer is a product and a recurrence, followed by the last Gemm."""
    steps = engine_of(MODELS["commands"](), tmp_path).plan.machine.steps
    assert [step.tactic.split(":")[0] for step in steps] == ["contraction", "recurrence"] * 2 + ["contraction"]


def test_items_have_steps_of_their_own_number(tmp_path: Path) -> None:
    w = Writer()
    y, h = w.layer("GRU", w("Transpose", "x", perm=[1, 0, 2]), 5, 14, lengths="lengths", direction="bidirectional")
    model = w.model(("N", 6, 5), lengths=True, y=(y, (6, 2, "N", 14)), h=(h, (2, "N", 14)))
    engine = engine_of(model, tmp_path)
    feeds = {"x": sequences_for(model, 4), "lengths": np.array([6, 1, 3, 4], np.int32)}
    expected = run_onnx(model, feeds)
    for output, value in engine.run(feeds).items():
        assert relative_error(value, expected[output]) < TOLERANCE
    assert not any("GRU" in "".join(step.fuses) for step in fallbacks(engine))


def computed(w: Writer, *shape: int) -> str:
    """Return a layer whose weights depend on x."""
    return str(w("Add", w.draw(*shape, scale=0.4), w("ReduceMean", "x", axes=[0, 1, 2], keepdims=1)))


def test_layers_whose_weights_are_computed_are_written_out_step_by_step(tmp_path: Path) -> None:
    w = Writer()
    first = w.draw(2, 3, 5, scale=0.5)
    bias = w("Squeeze", computed(w, 1, 2, 30), w.integers(0))
    both = {"hidden_size": 5, "direction": "bidirectional"}
    lstm = w("LSTM", "x", computed(w, 2, 20, 6), computed(w, 2, 20, 5), "", "", first, first, count=3, **both)
    gru = w("GRU", "x", computed(w, 2, 15, 6), computed(w, 2, 15, 5), bias, count=2, linear_before_reset=1, **both)
    other = w("GRU", "x", w.draw(2, 15, 6), computed(w, 2, 15, 5), bias, "", first, count=2, **both)
    rnn = w("RNN", w("Transpose", "x", perm=[1, 0, 2]), computed(w, 1, 5, 6), w.draw(1, 5, 5, scale=0.4), count=2,
            hidden_size=5, direction="reverse", activations=["Relu"])
    shapes = [((2, 2, 3, 5), (2, 3, 5), (2, 3, 5))] * 3 + [((3, 1, 2, 5), (1, 2, 5))]
    pairs = [pair for layer, each in zip((lstm, gru, other, rnn), shapes, strict=True)
             for pair in zip(layer, each, strict=False)]
    model = w.model((2, 3, 6), **{f"y{i}": pair for i, pair in enumerate(pairs)})
    engine = engine_of(model, tmp_path)
    assert not fallbacks(engine), [f"{step.name}: {step.reason}" for step in fallbacks(engine)]
    x = sequences_for(model, 2)
    expected = run_onnx(model, {"x": x})
    for output, value in engine.run({"x": x}).items():
        assert relative_error(value, expected[output]) < TOLERANCE


def test_computed_weights_of_a_rarer_cell_run_on_the_reference_and_the_build_says_so(tmp_path: Path) -> None:
    w = Writer()
    y, _ = w("RNN", "x", w.draw(1, 5, 6), computed(w, 1, 5, 5), count=2, hidden_size=5, clip=0.5)
    model = w.model((3, 1, 6), y=(y, (3, 1, 1, 5)))
    engine = engine_of(model, tmp_path)
    x = sequences_for(model, 3)
    assert relative_error(engine.run({"x": x})["y"], run_onnx(model, {"x": x})["y"]) < TOLERANCE
    assert [step.reason for step in fallbacks(engine) if "RNN" in step.name]


def test_a_sequence_of_unknown_length_is_refused_by_name(tmp_path: Path) -> None:
    w = Writer()
    y = w.layer("GRU", "x", 5, 4)[0]
    model = w.model(("T", 1, 5), y=(y, ("T", 1, 1, 4)))
    with pytest.raises(ModelError, match="number of steps, axis 0, depends on the batch.*--shape"):
        graph_from_onnx(model)
    assert graph_from_onnx(model, shapes={"x": (7, 1, 5)}).shape("y") == (7, 1, 1, 4)


NODE_TESTS = [name for name, case in cases().items()
              if {node.op_type for node in model_of(case).graph.node} & {"LSTM", "GRU", "RNN"}]


@pytest.mark.parametrize("name", NODE_TESTS)
def test_onnx_node_tests_are_compiled(name: str) -> None:
    """Weights are constants here, as in networks; tests/conformance checks the results."""
    model = model_of(cases()[name])
    for (_, *weights), _ in data_of(cases()[name]):
        names = [value.name for value in model.graph.input]
        builder = Builder(BuildConfig(timing=False, constants=dict(zip(names[1:], weights, strict=True))))
        engine = Engine(builder.plan(builder.graph(model)))
        assert not fallbacks(engine), [f"{step.name}: {step.reason}" for step in fallbacks(engine)]
