"""Trials of a search share compiled kernels and the items read for the ranges."""
import numpy as np
from onnx import parser

from infer_server.calibration import Calibration, run
from infer_server.calibration.table import read_table
from infer_server.calibration.trials.judge import Judge
from infer_server.engines import build_engine
from infer_server.engines.codegen.compiler_pool import CompilerPool

MODEL = parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 17]> g (float[1, 3, 8, 8] x) => (float[1, 4, 8, 8] y) '
    f"<float[4, 3, 3, 3] w = {{{', '.join(str(0.01 * (i % 17 - 8)) for i in range(108))}}}, "
    f"float[4, 4, 1, 1] v = {{{', '.join(str(0.1 * (i % 5 - 2)) for i in range(16))}}}> "
    "{ a = Conv<pads = [1, 1, 1, 1]>(x, w) b = Relu(a) y = Conv(b, v) }")


def test_a_kernel_is_compiled_once_for_trials_and_plan(monkeypatch):
    texts = []
    compile_all = CompilerPool.compile

    def recorded(pool, modules, *done):
        modules = list(modules)
        texts.extend(modules)
        return compile_all(pool, modules, *done)

    monkeypatch.setattr(CompilerPool, "compile", recorded)
    random = np.random.default_rng(0)
    feeds = [{"x": random.random((1, 3, 8, 8)).astype(np.float32)} for _ in range(8)]
    build = build_engine(MODEL, precision="int8", timing=False, cache=False, calibration=Calibration(feeds))
    assert texts and len(texts) == len(set(texts))
    assert len(build.plan.machine.code) > 1


def test_each_item_is_read_once_for_ranges_and_trials():
    read = []

    def feeds():
        random = np.random.default_rng(0)
        for number in range(8):
            read.append(number)
            yield {"x": random.random((1, 3, 8, 8)).astype(np.float32)}

    build_engine(MODEL, precision="int8", timing=False, cache=False, calibration=Calibration(feeds))
    assert read.count(7) == 1


def test_a_table_is_measured_once(monkeypatch):
    """The default calibrator's table is a trial, a candidate, and the start of the refinement."""
    tables = []
    measured = Judge.errors
    monkeypatch.setattr(Judge, "errors", lambda judge, table: tables.append(table) or measured(judge, table))
    random = np.random.default_rng(0)
    feeds = [{"x": random.random((1, 3, 8, 8)).astype(np.float32)} for _ in range(8)]
    build_engine(MODEL, precision="int8", timing=False, cache=False, calibration=Calibration(feeds))
    contents = [(dict(table.ranges), dict(table.means), bool(table.rounding)) for table in tables]
    assert len(contents) > 2 and all(content not in contents[:i] for i, content in enumerate(contents))


def test_channels_of_small_values_are_equalised(tmp_path, monkeypatch):
    """Each channel of `b` has a tenth of the values of the one before it, and ten times its weights."""
    sizes = (1.0, 0.1, 0.01, 0.001)
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 1, 8, 8] x) => (float[N, 1, 8, 8] y) '
        f"<float[4, 1, 1, 1] w = {{{', '.join(map(str, sizes))}}}, float zero = {{0.0}}, float six = {{6.0}}, "
        f"float[4, 1, 3, 3] v = {{{', '.join(str((i % 5 - 1) / size) for size in sizes for i in range(9))}}}, "
        "float[1, 4, 1, 1] u = {1.0, -1.0, 1.0, -1.0}> "
        "{ a = Conv(x, w) b = Clip(a, zero, six) c = Conv<group = 4, pads = [1, 1, 1, 1]>(b, v) y = Conv(c, u) }")
    random = np.random.default_rng(0)
    feeds = [{"x": random.uniform(0, 5, (1, 1, 8, 8)).astype(np.float32)} for _ in range(8)]
    options = {"timing": False, "cache": False}
    expected = build_engine(model, **options).engine().run(feeds[0])["y"]

    def error(name):
        calibration = Calibration(feeds, cache=tmp_path / name)
        engine = build_engine(model, precision="int8", calibration=calibration, **options).engine()
        return np.abs(engine.run(feeds[0])["y"] - expected).max()

    with_factors = error("with.json")
    assert set(read_table(tmp_path / "with.json").smoothing) == {"b", "c"}
    monkeypatch.setattr(run, "EQUALISING", ())
    assert with_factors < error("without.json") / 4
    assert not read_table(tmp_path / "without.json").smoothing
