"""Tests of the options for dynamic shapes, named as in trtexec (--minShapes etc.)."""
from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from infer_server.cli import inspect_engine, run_engine
from infer_server.engines import load_engine
from infer_server.engines.plan.file import read_plan
from infer_server.engines.plan.symbolic.encoding import decode
from tests.engines.compiler.open_models import attention_net, picture_net, random
from tests.infer_server.cli.commands import Workshop

SHAPES = {"min": "x:1x2x16,mask:1x2", "opt": "x:1x8x16,mask:1x8", "max": "x:4x16x16,mask:4x16"}


def options(*which: str) -> list[str]:
    return [part for name in which for part in (f"--{name}-shapes", SHAPES[name])]


def test_a_profile_is_built_shown_run_and_verified(workshop: Workshop) -> None:
    onnx.save(attention_net(), workshop.path("open.onnx"))
    assert workshop.build("--no-timing", "--verify", *options("min", "opt", "max"), model="open.onnx") == 0
    assert "verified" in workshop.said
    plan = workshop.path("m.plan")
    part = read_plan(plan).open
    assert part is not None and part.profiles == ({"batch": (1, 1, 4), "T": (2, 8, 16)},)
    assert inspect_engine.main([plan]) == 0
    assert "x float32['batch', 'T', 16]" in (shown := workshop.capture.readouterr().out) and "T=8" in shown
    assert "symbolic plans, which run other shapes where\n  " in shown and " <= T <= " in shown
    assert inspect_engine.main([plan, "--json"]) == 0
    described = json.loads(workshop.capture.readouterr().out)["open"]
    assert described["specialisations"] == [{"T": 8}]
    assert len(described["symbolic_plans"]) == len(decode(part.symbolic, read_plan(plan)))
    assert all(one["conditions"] and one["traced_at"]["T"] for one in described["symbolic_plans"])
    assert run_engine.main([plan, "--seconds", "0", "--shapes", "x:1x5x16,mask:1x5"]) == 0
    np.savez(workshop.path("feeds.npz"), x=random(3, 11, 16), mask=random(3, 11))
    assert run_engine.main([plan, "--seconds", "0", "--batch", "3", "--data", workshop.path("feeds.npz")]) == 0
    assert run_engine.main([plan, "--seconds", "0", "--shapes", "x:1x17x16,mask:1x17", "--no-specialise"]) == 2
    assert "'T' is 17, and the plan was built for 2 to 16" in workshop.capture.readouterr().err


@pytest.mark.parametrize("given, complaint", [
    (options("min"), "give --opt-shapes for each profile"),
    (["--opt-shapes", "x:1x8x16,mask:1x8", "--min-shapes", "x:1x2x16"], "must name the same inputs"),
    (["--opt-shapes", "x:1x8x17,mask:1x8"], "input 'x' has shape"),
    (["--opt-shapes", "x:1x8x16,mask:1x8", "--shape", "x:1x8x16"], "no open extents")])
def test_profiles_that_make_no_sense_are_refused(workshop: Workshop, given: list[str], complaint: str) -> None:
    onnx.save(attention_net(), workshop.path("open.onnx"))
    assert workshop.build("--no-timing", *given, model="open.onnx") == 2
    assert complaint in workshop.said


def test_int8_of_open_pictures_is_exported_and_verified_and_its_ranges_serve_one_size(workshop: Workshop) -> None:
    onnx.save(picture_net(), workshop.path("open.onnx"))
    np.savez(workshop.path("calib.npz"), x=random(4, 3, 32, 24))
    given = ["--int8", "--calib-cache", workshop.path("ranges.json"), "--no-timing",
             "--opt-shapes", "x:1x3x32x24", "--min-shapes", "x:1x3x8x8", "--max-shapes", "x:4x3x40x40"]
    assert workshop.build(*given, "--calib", workshop.path("calib.npz"), "--export-qdq", workshop.path("qdq.onnx"),
                          model="open.onnx") == 0
    assert read_plan(workshop.path("m.plan")).extents == {"H": 32, "W": 24}
    assert workshop.build(*given, "--verify", model="open.onnx") == 0      # on generated pictures of three sizes
    assert "39 items of generated inputs" in workshop.said and "verified" in workshop.said

    assert workshop.build("--int8", "--calib-cache", workshop.path("ranges.json"), "--no-timing",    # and no data
                          "--shape", "x:batchx3x16x8", model="open.onnx", output="fixed.plan") == 0
    feed = {"x": random(2, 3, 16, 8)}
    actual = load_engine(workshop.path("m.plan")).run(feed)
    for name, expected in load_engine(workshop.path("fixed.plan")).run(feed).items():
        np.testing.assert_array_equal(actual[name], expected)
