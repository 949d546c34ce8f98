"""Tests of build-engine --weight-only, and of what the other commands say about its plans."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from infer_server.cli import inspect_engine
from infer_server.comparing import cli as compare_engine
from infer_server.engines.loading import load_engine
from tests.engines.compiler.weight_only.models import encoder, ids, sqnr_db
from tests.infer_server.cli.commands import Workshop


@pytest.fixture
def shop(workshop: Workshop) -> Workshop:
    onnx.save(encoder(), workshop.path("m.onnx"))
    return workshop


@pytest.mark.parametrize("options", [("int8",), ("int4",), ("int4", "--group-size", "64", "--bf16"),
                                     ("int4", "--accuracy-level", "4")])
def test_a_build_is_verified_and_says_what_was_quantised(shop: Workshop, options: tuple[str, ...]) -> None:
    engine = shop.built("--weight-only", *options, "--no-timing", "--verify")
    assert "m.plan (weight-only) beside" in shop.said and "m.plan: verified" in shop.said
    assert "weights: 0.11 of 0.11 M are quantised" in shop.said and "0.5 MB before" in shop.said
    expected = shop.built("--no-timing", output="float.plan").run(ids())["y"]
    assert sqnr_db(expected, engine.run(ids())["y"]) > 12
    assert Path(shop.path("m.plan")).stat().st_size < 0.6 * Path(shop.path("float.plan")).stat().st_size


def test_calibration_data_are_used_for_rounding(shop: Workshop) -> None:
    np.savez(shop.path("calib.npz"), **ids(128))
    shop.built("--weight-only", "int4", "--calib", shop.path("calib.npz"), "--no-timing")
    assert "2 matrices of INT4, a scale for 32 weights, rounded by GPTQ" in shop.said
    assert "of the layers' outputs" in shop.said


def test_inspect_engine_and_compare_engine_know_the_plan(shop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    shop.built("--weight-only", "int4", "--no-timing", "--keep-float", "second")
    capsys.readouterr()
    assert inspect_engine.main([shop.path("m.plan")]) == 0
    said = capsys.readouterr().out
    assert "1 matrix of INT4, a scale for 32 weights, rounded to the nearest" in said
    assert "2 stay float" in said
    assert inspect_engine.main([shop.path("m.plan"), "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["metadata"]["weights"]["layers"]
    assert [layer["node"] for layer in layers] == ["embedding", "first"] and layers[1]["sqnr_db"] > 18
    assert compare_engine.main([shop.path("m.plan"), shop.path("m.onnx"), "--min-sqnr", "10", "-q"]) == 0


def test_the_exported_model_is_the_plan_s(shop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    shop.built("--weight-only", "int4", "--no-timing", "--export-qdq", shop.path("q.onnx"))
    assert "with packed weights, for ONNX Runtime" in shop.said
    assert Path(shop.path("q.onnx")).stat().st_size < 0.4 * Path(shop.path("m.onnx")).stat().st_size
    assert compare_engine.main([shop.path("q.onnx"), shop.path("m.plan"), "--min-sqnr", "60", "-q"]) == 0


@pytest.mark.parametrize("options, message", [
    (("--int8", "--calib", "x", "--weight-only", "int4"), "--weight-only int4 leaves activations in float, and --int8"),
    (("--group-size", "32"), "--group-size is of weight-only quantisation: give --weight-only int4"),
    (("--weight-only", "int8", "--group-size", "32"), "INT8 weights have one scale per output channel"),
    (("--weight-only", "int4", "--calib-cache", "c"), "--calib-cache and --calib-part are of INT8 builds"),
    (("--weight-only", "int4", "--keep-float", "*"), "has no weights to quantise"),
])
def test_contradictory_options_are_refused(shop: Workshop, options: tuple[str, ...], message: str) -> None:
    assert shop.build(*options) == 2 and message in shop.said
    assert not Path(shop.path("m.plan")).exists()


def test_a_stripped_plan_runs(shop: Workshop) -> None:
    shop.built("--weight-only", "int4", "--no-timing", "--strip")
    assert np.isfinite(load_engine(shop.path("m.plan")).run(ids())["y"]).all()
