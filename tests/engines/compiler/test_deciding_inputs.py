"""Inputs whose values decide shapes and branches: one plan serves all values, with ONNX Runtime's results."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from infer_server.calibration import Calibration
from infer_server.engines import build_engine, load_engine
from infer_server.engines.errors import InputError
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.extents import value_name
from tests.engines.compiler.open_models import by_onnx_runtime, node, random
from tests.engines.compiler.small_models import small_model


def with_input(model: onnx.ModelProto, name: str, kind: int, shape: list[int | str]) -> onnx.ModelProto:
    """Return the model with an input of another type than float."""
    model.graph.input.append(helper.make_tensor_value_info(name, kind, shape))
    return model


def resizer() -> onnx.ModelProto:
    """Return a model that resizes a picture to a size from an input."""
    model = small_model(
        [node("Conv", "x w", "c", pads=[1, 1, 1, 1]), node("Concat", "nc size", "to", axis=0),
         node("Resize", "c - - to", "r", mode="nearest", coordinate_transformation_mode="asymmetric",
              nearest_mode="floor"), node("Relu", "r", "y")],
        {"x": [1, 3, "H", "W"]}, ["y"], {"w": random(4, 3, 3, 3), "nc": np.array([1, 4])})
    return with_input(model, "size", TensorProto.INT64, [2])


def branching() -> onnx.ModelProto:
    """Return a model with another product at a sampling rate of 8000 than at others."""
    def branch(name: str, weights: str) -> onnx.GraphProto:
        return helper.make_graph([node("MatMul", f"x {weights}", name)], name, [],
                                 [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])

    model = small_model(
        [node("Equal", "rate low", "is_low"),
         node("If", "is_low", "y", then_branch=branch("slow", "v"), else_branch=branch("fast", "w"))],
        {"x": ["N", 6]}, ["y"], {"w": random(6, 5), "v": random(6, 5, seed=4), "low": np.array(8000)})
    return with_input(model, "rate", TensorProto.INT64, [])


def sized(height: int, width: int, *size: int) -> dict[str, Array]:
    return {"x": random(1, 3, height, width), "size": np.array(size)}


def rated(items: int, rate: int) -> dict[str, Array]:
    return {"x": random(items, 6), "rate": np.array(rate)}


@pytest.mark.parametrize(("model", "feeds"), [
    (resizer(), [sized(8, 8, 16, 24), sized(8, 8, 4, 4), sized(9, 12, 16, 24)]),
    (branching(), [rated(1, 8000), rated(1, 16000), rated(3, 16000), rated(2, 8000)])])
def test_one_plan_serves_all_values(model: onnx.ModelProto, feeds: list[dict[str, Array]], tmp_path: Path) -> None:
    build_engine(model, cache=False, timing=False).save(tmp_path / "m.plan")
    engine = load_engine(tmp_path / "m.plan", cache=False)
    context = engine.create_context()
    for feed in feeds:
        expected = by_onnx_runtime(model, feed)["y"]
        for _ in range(2):      # another feed than the one before, then the same
            np.testing.assert_allclose(engine.run(feed)["y"], expected, rtol=1e-4, atol=1e-5)
        items = len(feed["x"])
        here = context.at({name: array.shape for name, array in feed.items()})
        for name, array in feed.items():
            here.input(name, items)[...] = array
        here.execute(items)
        np.testing.assert_allclose(here.output("y", items), expected, rtol=1e-4, atol=1e-5)


def test_each_value_is_specialised_once() -> None:
    engine = build_engine(branching(), cache=False, timing=False).engine()
    # The value that the engine compares.
    assert engine.executor.specialised == [{"items": 1, "value of rate": (8000,)}]
    first, again, other = (engine.at({"x": (2, 6), "rate": ()}, {"rate": np.array(n)}) for n in (8000, 8000, 1))
    assert first is again and first is not other
    assert engine.deciding == ("rate",) and "'rate'" not in str(first.inputs)


def test_a_batch_at_one_value_is_not_merged_with_others() -> None:
    plan = build_engine(branching(), cache=False, timing=False, max_batch=4).plan
    assert plan.max_batch == 4 and "the values of rate decide" in plan.dependence


def test_a_value_of_another_type_is_refused() -> None:
    engine = build_engine(branching(), cache=False, timing=False).engine()
    engine.run(rated(1, 8000))
    with pytest.raises(InputError, match="input 'rate' is float64, the model takes int64"):
        engine.run({"x": random(1, 6), "rate": np.array(8000).view(np.float64)})       # a float64 with the same bytes


def test_the_first_value_is_that_of_the_data() -> None:
    data = [rated(1, 11025), rated(1, 8000)]
    build = build_engine(branching(), cache=False, timing=False, precision="int8",
                         calibration=Calibration(data, calibrator="minmax"))
    assert build.plan.extents == {"items": 1, value_name("rate"): (11025,)}
    feed = rated(1, 8000)
    exact = by_onnx_runtime(branching(), feed)["y"]
    assert abs(build.engine().run(feed)["y"] - exact).max() < 0.05 * abs(exact).max()
