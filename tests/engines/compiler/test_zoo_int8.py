"""INT8 engines of the zoo are close to their float models, and use the expected kernels."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from infer_server.calibration.accuracy.measures import sqnr_db
from infer_server.engines.plan.coverage import writes_border
from tests.engines.compiler.zoo_engines import MAX_BATCH, compiled, engine_of, fallbacks
from tests.zoo import TINY, images_for, run_onnx

ITEMS = 16
# What ONNX Runtime's own INT8 reaches on the same pictures (static Q/DQ, min-max, a weight scale a channel): SQNR
# in dB of a model's worst output. Random weights are harder than trained ones of the same depth.
PEER_DB = {
    "resnet18": 19.3, "resnet50": 16.7, "resnet50_d": 15.5, "preact_resnet18": 27.7,
    "resnext50": 18.7, "regnet_y": 25.0, "alexnet": 23.2, "vgg16_bn": 28.8,
    "squeezenet": 36.6, "googlenet": 24.6, "googlenet_lrn": 27.5, "inception_v3": 32.0, "densenet": 18.7,
    "mobilenet_v1": 28.6, "mobilenet_v2": 32.2, "mobilenet_v3": 27.8, "mobilenet_v3_by_clip": 27.3,
    "mobilenet_v3_by_op": 27.8, "efficientnet_b0": 28.3, "efficientnet_lite0": 29.4, "efficientnet_v2": 20.8,
    "shufflenet_v1": 29.1, "shufflenet_v2": 33.2, "shufflenet_v2_by_slices": 33.2, "yolo_tiny": 27.5, "yolo_v5": 19.9,
    "yolo_v5_serial": 23.0, "nanodet": 28.4, "unet": 33.3, "deeplab": 26.8, "super_resolution": 18.1, "decoder": 26.4,
    "explicit_pads": 35.5, "odd_channels": 35.6, "activations": 11.1, "pointwise": 33.6, "shared_readers": 25.5,
    "views": 26.4, "layout_traps": 33.7,
}
MARGIN_DB = 3.0         # half a bit: other roundings, on these few pictures


@pytest.mark.parametrize("name", TINY)
def test_an_int8_engine_is_close_to_the_float_model(name: str, tmp_path: Path) -> None:
    model = TINY[name]()
    engine = engine_of(model, tmp_path, precision="int8")
    x = images_for(model, ITEMS, seed=1)
    expected = run_onnx(model, {"input": x})
    worst = min(sqnr_db(expected[output], value) for output, value in engine.run({"input": x}).items())
    assert worst > PEER_DB[name] - MARGIN_DB
    assert not fallbacks(engine), [f"{step.name}: {step.reason}" for step in fallbacks(engine)]
    assert any(step.precision == "int8" for step in engine.plan.machine.steps)


def test_the_search_for_ranges_is_no_worse_than_one_it_chooses_from(tmp_path: Path) -> None:
    model = TINY["mobilenet_v2"]()
    x = images_for(model, ITEMS, seed=1)
    expected = run_onnx(model, {"input": x})["output"]
    engines = {name: engine_of(model, tmp_path, calibrator=name, precision="int8") for name in ("", "minmax")}
    found = {name: sqnr_db(expected, engine.run({"input": x})["output"]) for name, engine in engines.items()}
    assert found[""] > found["minmax"] - 0.5


def test_items_do_not_change_each_other(tmp_path: Path) -> None:
    model = TINY["mobilenet_v2"]()
    engine = engine_of(model, tmp_path, precision="int8")
    x = images_for(model, MAX_BATCH, seed=1)
    together = engine.run({"input": x})["output"]
    for index in range(len(x)):
        np.testing.assert_array_equal(engine.run({"input": x[index:index + 1]})["output"][0], together[index])


def test_resnet50_has_a_kernel_a_convolution(tmp_path: Path) -> None:
    """53 convolutions, the last layer, the pools and the input's conversion; BN, ReLU and Add are fused.

    Steps that only rewrite the borders of shared buffers do not count.
    """
    plan = compiled(TINY["resnet50"](depths=(3, 4, 6, 3)), tmp_path, precision="int8").plan
    assert sum(not writes_border(step) for step in plan.machine.steps) <= 56
    block = {"/layer1.0/conv3/Conv", "/layer1.0/conv3_bn/BatchNormalization", "/layer1.0/Add", "/layer1.0/Relu_2"}
    assert any(block <= set(step.fuses) for step in plan.machine.steps)


def test_siblings_of_an_inception_module_are_one_kernel(tmp_path: Path) -> None:
    plan = compiled(TINY["googlenet"](), tmp_path, precision="int8").plan
    for module in ("3a", "4c", "5b"):
        siblings = {f"/inception{module}/{branch}/Conv" for branch in ("branch1", "branch2.0", "branch3.0")}
        assert [step.name for step in plan.machine.steps if siblings <= set(step.fuses)], f"no kernel fuses {siblings}"
