"""Tests of build-engine: its engines, their target machines, and its error messages."""
from __future__ import annotations

import argparse
import fcntl
import os
import platform
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from infer_server.calibration.accuracy.measures import sqnr_db
from infer_server.cli.build_engine import Bar, parse_constant, parse_shape
from infer_server.engines.backends.llvm.tuning import candidate_times
from infer_server.engines.errors import PlanTargetError
from infer_server.engines.loading import load_engine
from infer_server.engines.lowering.calls.calls import FALLBACK_RULES, RULES
from infer_server.engines.plan.file import read_plan
from tests.engines.compiler.program_models import chosen_patches
from tests.engines.compiler.small_models import node, small_model
from tests.engines.compiler.zoo_engines import relative_error
from tests.infer_server.cli.commands import MODEL, UNTIMED, Workshop
from tests.zoo import run_onnx

FOREIGN = "avx2" if platform.machine() == "aarch64" else "aarch64_dotprod"


@pytest.mark.parametrize(("precision", "decibels"), [("fp32", 80), ("fp16", 45), ("bf16", 25), ("best", 80)])
def test_a_float_engine_is_as_close_to_onnx_runtime_as_its_type_is_precise(
        workshop: Workshop, precision: str, decibels: float) -> None:
    engine = workshop.built(f"--{precision}", *UNTIMED)
    assert engine.plan.precision == precision
    assert sqnr_db(workshop.expected(), engine.run(workshop.feeds())["output"]) > decibels


@pytest.mark.parametrize("precision", ["int8", "best"])
def test_a_calibrated_engine_computes_in_int8_and_is_close(workshop: Workshop, precision: str) -> None:
    engine = workshop.built(f"--{precision}", "--calib", workshop.calibration(), *UNTIMED)
    assert any(step.precision == "int8" for step in engine.plan.machine.steps)
    assert sqnr_db(workshop.expected(), engine.run(workshop.feeds())["output"]) > 15


@pytest.mark.parametrize(("text", "shape"), [
    ("x:1x3x8", (1, 3, 8)), ("x:batchx8", (None, 8)), ("x:batch", (None,)), ("x:7", (7,)), ("a:0:batchx2", (None, 2))])
def test_a_shape_is_read_with_or_without_a_batch(text: str, shape: tuple[int | None, ...]) -> None:
    assert parse_shape(text) == (text.rpartition(":")[0], shape)


@pytest.mark.parametrize("text", ["x", "x:", "x:0x3", "x:3xbatch", "x:batchx", "x:-1x3", "x:1,3"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not NAME:1x3x224x224"):
        parse_shape(text)


@pytest.mark.parametrize(("text", "constant"), [
    ("sr=16000", ("sr", 16000)), ("x=-0.5", ("x", -0.5)), ("on=true", ("on", True)), ("a:0=[1, 2]", ("a:0", [1, 2]))])
def test_a_constant_is_a_number_or_a_list(text: str, constant: tuple[str, object]) -> None:
    assert parse_constant(text) == constant


@pytest.mark.parametrize("text", ["sr", "sr=", "=1", "sr=many", 'sr="1"', "sr=[1, [2]]", "sr={}", "sr=null"])
def test_what_is_no_constant_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=16000"):
        parse_constant(text)


def test_int8_without_calibration_says_which_option_is_missing(workshop: Workshop) -> None:
    assert workshop.build("--int8") == 2
    assert "give --calib" in workshop.said
    assert not Path(workshop.path("m.plan")).exists()


def test_code_is_built_for_an_instruction_set_that_this_machine_may_lack(workshop: Workshop) -> None:
    assert workshop.build("--target", "avx512_vnni", *UNTIMED) == 0
    assert read_plan(workshop.path("m.plan")).machine.target == "avx512_vnni"


def test_a_node_that_the_target_has_no_kernel_for_has_an_exit_status_of_its_own(workshop: Workshop) -> None:
    onnx.save(small_model([node("Det", "x", "y")], {"x": ["N", 3, 3]}, ["y"]), workshop.path("det.onnx"))
    assert workshop.build("--target", "sm_80", model="det.onnx") == 3
    assert "error: 'det' (Det) cannot run on sm_80" in workshop.said


def test_a_stripped_plan_takes_half_the_room_and_is_refused_on_another_cpu(workshop: Workshop) -> None:
    output = Path(workshop.path("m.plan"))
    whole = workshop.built(*UNTIMED).run(workshop.feeds())["output"]
    size = output.stat().st_size
    stripped = workshop.built("--strip", "--verify", *UNTIMED)
    np.testing.assert_array_equal(stripped.run(workshop.feeds())["output"], whole)
    assert output.stat().st_size < 0.75 * size
    assert workshop.build("--strip", "--target", FOREIGN) == 0
    with pytest.raises(PlanTargetError, match="made for .* stripped .*build it here, or without"):
        load_engine(output)


def test_code_for_another_architecture_is_not_timed(workshop: Workshop) -> None:
    """The build's CPU cannot execute such code."""
    assert workshop.build("--target", FOREIGN) == 0
    assert not any(step.time_us for step in read_plan(workshop.path("m.plan")).machine.steps)


def test_a_plan_for_another_machine_is_compiled_again_with_the_same_integers(
        workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    options = ("--int8", "--calib", workshop.calibration(), "--calibrator", "minmax", *UNTIMED)
    here = workshop.built(*options)
    assert workshop.build(*options, "--target", FOREIGN, output="foreign.plan") == 0
    foreign = load_engine(workshop.path("foreign.plan"))
    assert "compiling its graph again" in caplog.text
    assert foreign.plan.machine.target == here.plan.machine.target
    np.testing.assert_array_equal(foreign.run(workshop.feeds())["output"], here.run(workshop.feeds())["output"])


def test_a_plan_for_another_machine_is_refused_on_request(workshop: Workshop) -> None:
    assert workshop.build("--target", FOREIGN, *UNTIMED) == 0
    with pytest.raises(PlanTargetError, match="made for"):
        load_engine(workshop.path("m.plan"), on_target_mismatch="refuse")


def test_the_exported_qdq_model_computes_what_the_engine_computes(workshop: Workshop) -> None:
    engine = workshop.built("--int8", "--calib", workshop.calibration(), "--calibrator", "minmax",
                            "--export-qdq", workshop.path("qdq.onnx"), *UNTIMED)
    exported = onnx.load(workshop.path("qdq.onnx"))
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in exported.graph.node}
    expected = run_onnx(exported, workshop.feeds())["output"]
    assert relative_error(engine.run(workshop.feeds())["output"], expected) < 0.05


@pytest.mark.parametrize("option", [
    ("--export-qdq", "q.onnx"), ("--calib-cache", "c.table", "--tensorrt-cache", "t.cache", "8.6.1")],
    ids=["Q/DQ", "TensorRT"])
def test_a_program_has_no_one_graph_to_write_out(workshop: Workshop, option: tuple[str, ...]) -> None:
    onnx.save(chosen_patches(), workshop.path("rows.onnx"))
    np.savez(workshop.path("rows.npz"), x=np.random.default_rng(0).standard_normal((2, 3, 6, 8)).astype(np.float32))
    paths = [workshop.path(word) if "." in word and word[0].isalpha() else word for word in option]
    assert workshop.build("--int8", "--calib", workshop.path("rows.npz"), "--calibrator", "minmax", *paths, *UNTIMED,
                          model="rows.onnx") == 2
    assert "rows is a program" in workshop.said and Path(workshop.path("m.plan")).exists()


def test_quiet_says_nothing_about_a_build_without_fallbacks(workshop: Workshop) -> None:
    assert workshop.build("--int8", "--calib", workshop.calibration(), "--calibrator", "minmax", "--quiet",
                          "--export-qdq", workshop.path("qdq.onnx"), *UNTIMED) == 0
    assert workshop.said == ""


def test_what_falls_back_is_named_even_when_quiet(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FALLBACK_RULES, "Hardmax")
    onnx.save(_one_node("Hardmax"), workshop.path("hardmax.onnx"))
    assert workshop.build("--quiet", "--no-timing", model="hardmax.onnx") == 0
    assert "no kernel for Hardmax" in workshop.said


def test_a_timed_build_ends_with_the_share_of_what_the_reference_runs(
        workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions run by the numpy reference here; their constants must be available while the steps are timed."""
    monkeypatch.delitem(RULES, "Conv")
    monkeypatch.delitem(FALLBACK_RULES, "Conv")
    assert workshop.build("--no-cache", "--max-batch", "2") == 0
    assert re.search(r"coverage: .* by reference \(\S+ %\); timed at the build\n$", workshop.said)
    assert all(step.time_us for step in read_plan(workshop.path("m.plan")).machine.steps if step.fallback)


def test_strict_refuses_what_the_reference_would_run_and_writes_nothing(
        workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert workshop.build("--strict", *UNTIMED) == 0 and "0 by reference" in workshop.said
    Path(workshop.path("m.plan")).unlink()
    monkeypatch.delitem(RULES, "Conv")
    monkeypatch.delitem(FALLBACK_RULES, "Conv")
    assert workshop.build("--strict", "--no-cache", *UNTIMED) == 2
    assert "steps run on the reference:\n  Conv, " in workshop.said and "no kernel for Conv ('" in workshop.said
    assert not Path(workshop.path("m.plan")).exists()


def test_options_that_make_no_sense_are_told_all_at_once(workshop: Workshop) -> None:
    assert workshop.build("--uint8-input", "--export-qdq", workshop.path("q.onnx"), "--calib", "photos") == 2
    assert all(option in workshop.said for option in ("--calib is", "--uint8-input needs", "--export-qdq writes"))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int16, np.uint16, np.int64, np.uint8])
def test_an_input_of_a_type_without_kernels_runs_on_the_reference(workshop: Workshop, dtype: type[np.generic]) -> None:
    shape = ("N", 3, 4, 5)
    x = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    nodes = [helper.make_node("Cast", ["x"], ["float"], to=TensorProto.FLOAT),
             helper.make_node("Relu", ["float"], ["y"])]
    model = helper.make_model(helper.make_graph(nodes, "cast", [x], [y]),
                              opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, workshop.path("m.onnx"))
    values = np.arange(-20, 100).reshape(2, 3, 4, 5).astype(dtype)
    engine = workshop.built(*UNTIMED)
    np.testing.assert_array_equal(engine.run({"x": values})["y"], np.maximum(values.astype(np.float32), 0))


def test_a_terminal_sees_a_bar_for_each_stage(workshop: Workshop) -> None:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    command = [sys.executable, "-m", "infer_server.cli.build_engine", workshop.path("m.onnx"), "--int8", "--calib",
               workshop.calibration(), "--calibrator", "minmax", "-o", workshop.path("m.plan"), *UNTIMED]
    subprocess.run(command, stderr=slave, check=True)
    seen = os.read(master, 1 << 16).decode()
    assert re.search(r"calibrating: .*/8 ", seen) and re.search(r"compiling: .*kernel", seen)


def test_a_build_that_says_nothing_for_long_prints_where_it_is(capsys: pytest.CaptureFixture[str],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bar, "QUIET", 0.0)
    monkeypatch.setattr(Bar, "BEAT", 0.001)
    output = ""
    with Bar() as bar:
        bar("searching", 3, 18, "")
        while "searching: 3 of 18 trials" not in output:    # a time limit of the run ends it
            output += capsys.readouterr().err


@pytest.mark.parametrize(("columns", "shown"), [(0, b"searching: 3 of 18 trials"), (80, b"searching:  17%|")])
def test_a_terminal_of_unknown_width_gets_lines(columns: int, shown: bytes) -> None:
    """On a terminal of 0 columns tqdm shows nothing."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    script = ("import sys\nfrom infer_server.cli.build_engine import Bar\nBar.QUIET = Bar.BEAT = 0.01\n"
              "with Bar() as bar:\n    bar('searching', 3, 18, '')\n    sys.stdin.read()\n")
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=theirs) as process:
        output = b""
        while shown not in output:      # a time limit of the run ends it
            output += os.read(mine, 1 << 16)
        process.communicate()
    os.close(mine)
    os.close(theirs)


# ---- what cannot be built: one line on stderr, exit code 2
def test_a_model_that_is_not_there_is_named(workshop: Workshop) -> None:
    assert workshop.build(model="missing.onnx") == 2
    assert workshop.said.startswith("build-engine: error: ") and "missing.onnx" in workshop.said


@pytest.mark.parametrize("content", [b"", b"a text file\n" * 99, MODEL().SerializeToString()[:5000]],
                         ids=["empty", "text", "truncated"])
def test_a_file_that_is_no_model_is_refused(workshop: Workshop, content: bytes) -> None:
    Path(workshop.path("bad.onnx")).write_bytes(content)
    assert workshop.build(model="bad.onnx") == 2
    assert "bad.onnx is not a" in workshop.said and len(workshop.said.splitlines()) == 1


def test_an_opset_that_is_too_new_is_named(workshop: Workshop) -> None:
    workshop.model.opset_import[0].version = 999
    onnx.save(workshop.model, workshop.path("new.onnx"))
    assert workshop.build(model="new.onnx") == 2
    assert "opset 999 is newer" in workshop.said


def test_an_unknown_operator_is_named(workshop: Workshop) -> None:
    onnx.save(_one_node("Frobnicate"), workshop.path("unknown.onnx"))
    assert workshop.build(model="unknown.onnx") == 2
    assert "Frobnicate" in workshop.said


@pytest.mark.parametrize("output", ["", "missing/m.plan"])
def test_an_output_that_cannot_be_written_is_refused_before_the_build(workshop: Workshop, output: str) -> None:
    assert workshop.build(output=output) == 2
    assert "cannot write" in workshop.said


def test_a_quantised_model_that_cannot_be_written_is_refused_before_the_build(workshop: Workshop) -> None:
    exported = workshop.path("missing/q.onnx")
    assert workshop.build("--int8", "--calib", workshop.calibration(), "--export-qdq", exported) == 2
    assert "cannot write" in workshop.said and not Path(workshop.path("m.plan")).exists()


def test_a_batch_axis_is_needed_for_max_batch(workshop: Workshop) -> None:
    onnx.save(MODEL(batch=1), workshop.path("fixed.onnx"))
    assert workshop.build("--max-batch", "4", model="fixed.onnx") == 2
    assert "--max-batch 4" in workshop.said
    assert workshop.build("--no-timing", model="fixed.onnx") == 0


def test_the_batch_to_optimise_for_is_one_that_the_plan_takes(workshop: Workshop) -> None:
    assert workshop.build("--opt-batch", "8", *UNTIMED) == 2
    assert "--opt-batch 8" in workshop.said and "raise --max-batch" in workshop.said
    onnx.save(MODEL(batch=1), workshop.path("fixed.onnx"))
    assert workshop.build("--opt-batch", "8", "--no-timing", model="fixed.onnx") == 2
    assert "no symbolic batch axis" in workshop.said


def test_tactics_are_timed_with_the_batch_to_optimise_for(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []
    monkeypatch.setattr(candidate_times, "call_of", lambda function, arrays, grid, items, parts: lambda: (
        timed.append(items) or 1.0))
    onnx.save(_one_node("Relu", shape=("N", 3, 8, 6)), workshop.path("relu.onnx"))
    assert workshop.build("--opt-batch", "3", "--max-batch", "4", model="relu.onnx") == 0
    assert set(timed) == {3}


def test_a_shape_makes_symbolic_extents_known(workshop: Workshop) -> None:
    onnx.save(_one_node("Relu", shape=("N", 3, "H", "W")), workshop.path("sizes.onnx"))
    assert workshop.build("--shape", "x:1x3x8x6", "--no-timing", model="sizes.onnx") == 0
    assert read_plan(workshop.path("m.plan")).inputs[0].shape[-2:] == (8, 6)


def test_a_constant_decides_which_branch_is_taken(workshop: Workshop) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in "xy")
    rate = helper.make_tensor_value_info("rate", TensorProto.INT64, [])
    branches = {f"{which}_branch": helper.make_graph([helper.make_node(op, ["x"], ["made"])], which, [], [
        helper.make_empty_tensor_value_info("made")]) for which, op in (("then", "Neg"), ("else", "Abs"))}
    nodes = [helper.make_node("Equal", ["rate", "usual"], ["is_usual"]),
             helper.make_node("If", ["is_usual"], ["y"], **branches)]
    graph = helper.make_graph(nodes, "rates", [x, rate], [y], [helper.make_tensor("usual", TensorProto.INT64, [], [8])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, workshop.path("rates.onnx"))
    assert workshop.build("--no-timing", model="rates.onnx") == 0
    engine = load_engine(workshop.path("m.plan"))
    for value, sign in ((8, -1), (9, 1)):
        feed = {"x": np.ones((2, 4), np.float32), "rate": np.array(value)}
        assert np.all(engine.run(feed)["y"] == sign), "the value decides, and is an input"
    for value, sign in ((8, -1), (9, 1)):
        assert workshop.build("--constant", f"rate={value}", "--verify", "--no-timing", model="rates.onnx") == 0
        engine = load_engine(workshop.path("m.plan"))
        assert [io.name for io in engine.inputs] == ["x"]
        assert np.all(engine.run({"x": np.ones((2, 4), np.float32)})["y"] == sign)


@pytest.mark.parametrize("option", ["--max-batch", "--opt-batch", "--threads"])
@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_a_number_that_is_none_is_a_usage_error(workshop: Workshop, option: str, number: str) -> None:
    with pytest.raises(SystemExit) as ended:
        workshop.build(f"{option}={number}")
    assert ended.value.code == 2
    assert f"'{number}' is not a whole number above 0" in workshop.capture.readouterr().err


@pytest.mark.parametrize("text", ["input", "input:", "input:axb", "input:1x0x2x2", "1x3x2x2"])
def test_a_shape_that_is_none_is_a_usage_error(workshop: Workshop, text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        workshop.build("--shape", text)
    assert ended.value.code == 2


def _one_node(operator: str, shape: tuple[int | str, ...] = ("N", 3, 8, 8)) -> onnx.ModelProto:
    """Return a model with one node, from x to y."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "one", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
