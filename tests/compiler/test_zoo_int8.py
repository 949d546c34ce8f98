"""INT8 engines of the zoo are close to their float models, and made of the kernels that one would write by hand."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibration.accuracy import sqnr_db
from tests.compiler.zoo_engines import MAX_BATCH, compiled, engine_of, fallbacks
from tests.zoo import TINY, images_for, run_onnx

ITEMS = 16
LOWEST_DB = 15.0        # of an output; a step of 8 bits lost somewhere gives less


@pytest.mark.parametrize("name", TINY)
def test_an_int8_engine_is_close_to_the_float_model(name: str, tmp_path: Path) -> None:
    model = TINY[name]()
    engine = engine_of(model, tmp_path, precision="int8")
    x = images_for(model, ITEMS, seed=1)
    expected = run_onnx(model, {"input": x})
    for output, value in engine.run({"input": x}).items():
        assert sqnr_db(expected[output], value) > LOWEST_DB
    assert not fallbacks(engine), [f"{step.name}: {step.reason}" for step in fallbacks(engine)]
    assert any(step.precision == "int8" for step in engine.plan.steps)


def test_items_do_not_change_each_other(tmp_path: Path) -> None:
    model = TINY["mobilenet_v2"]()
    engine = engine_of(model, tmp_path, precision="int8")
    x = images_for(model, MAX_BATCH, seed=1)
    together = engine.run({"input": x})["output"]
    for index in range(len(x)):
        np.testing.assert_array_equal(engine.run({"input": x[index:index + 1]})["output"][0], together[index])


def test_resnet50_has_a_kernel_a_convolution(tmp_path: Path) -> None:
    """53 convolutions and the last layer, the pools, and the input's conversion; BN, ReLU and Add are inside."""
    plan = compiled(TINY["resnet50"](depths=(3, 4, 6, 3)), tmp_path, precision="int8").plan
    assert len(plan.steps) <= 56
    block = {"/layer1.0/conv3/Conv", "/layer1.0/conv3_bn/BatchNormalization", "/layer1.0/Add", "/layer1.0/Relu_2"}
    assert any(block <= set(step.fuses) for step in plan.steps)


def test_siblings_of_an_inception_module_are_one_kernel(tmp_path: Path) -> None:
    plan = compiled(TINY["googlenet"](), tmp_path, precision="int8").plan
    for module in ("3a", "4c", "5b"):
        siblings = {f"/inception{module}/{branch}/Conv" for branch in ("branch1", "branch2.0", "branch3.0")}
        assert [step.name for step in plan.steps if siblings <= set(step.fuses)], f"no kernel fuses {siblings}"
