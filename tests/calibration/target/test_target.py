"""Builds to an accuracy target keep the layers in float that lose most, and no more."""
import argparse
import math
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from infer_server.calibration import Calibration
from infer_server.calibration.open_data import open_calibration_data
from infer_server.calibration.target import metrics
from infer_server.calibration.target.labels import read_labels
from infer_server.calibration.target.metrics import Items, metric_of
from infer_server.calibration.target.plan_times import PlanTimes
from infer_server.calibration.target.search import AccuracyTarget
from infer_server.calibration.target.sensitivity import layers_of
from infer_server.calibration.target.sets import LayerSets, Mix
from infer_server.calibration.target.split import LabelledItems, for_ranges, split_of
from infer_server.cli.build_engine import main
from infer_server.cli.verifying import parse_drop, parse_slowdown, target_line
from infer_server.engines import build_engine
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.compiler.subject import read_subject
from infer_server.engines.errors import CalibrationError, ConfigError
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.plan.plan import IoTensor

WIDE = ("wide_a", "wide_b")         # layers that meet at a tensor whose channels have unlike ranges
CLASSES = 5


def model():
    """Return a classifier of [N, 4] whose layers `wide_a` and `wide_b` cannot be stored in 8 bits between them."""
    rng = np.random.default_rng(0)
    shapes = {"first": (4, 16), "wide_a": (16, 16), "wide_b": (16, 16), "last": (16, CLASSES)}
    weights = {name: (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
               for name, shape in shapes.items()}
    weights["wide_a"][:, 0] *= 1000.0
    weights["wide_b"][0] /= 1000.0
    nodes, x = [], "x"
    for name in shapes:
        nodes.append(helper.make_node("MatMul", [x, f"{name}.w"], [f"{name}.y"], name=name))
        x = f"{name}.y"
        if name != "last":
            nodes.append(helper.make_node("Relu", [x], [f"{name}.r"], name=f"{name}_relu"))
            x = f"{name}.r"
    graph = helper.make_graph(
        nodes, "unlike", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["N", CLASSES])],
        [numpy_helper.from_array(values, f"{name}.w") for name, values in weights.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def feeds(count=32, seed=1):
    values = np.random.default_rng(seed).standard_normal((count, 4)).astype(np.float32)
    return [{"x": row[None]} for row in values]


def build(target, data=None, **options):
    return build_engine(model(), precision="int8", timing=False, cache=False,
                        calibration=Calibration(data or feeds(), "minmax", target=target), **options).plan.metadata


def test_the_layers_that_lose_most_stay_in_float():
    found = build(AccuracyTarget(0.002, "cosine"))
    report = found["target"]
    assert report["met"] and report["float"] - report["score"] <= 0.002 < report["float"] - report["int8"]
    assert set(report["kept"]) & set(WIDE) and len(report["kept"]) < 4
    assert set(report["kept"]) <= set(found["kept_float"])
    assert report["items"] == 8                         # every fourth
    assert found["calibration_items"] == 24
    assert {one["layer"] for one in report["layers"]} == {"first", "wide_a", "wide_b", "last"}


def test_each_stage_has_progress():
    told = []
    build(AccuracyTarget(0.002, "cosine"), progress=lambda *step: told.append(step))
    stages = list(dict.fromkeys(stage for stage, *_ in told))
    known = ("calibrating", "searching", "evaluating", "ranking", "growing", "closing", "pruning")
    assert [stage for stage in stages if stage != "compiling"] == list(known)
    assert all(done <= of for _, done, of, _ in told if of)


def test_the_noise_of_layers_is_that_of_each_alone_in_int8():
    layers = build(AccuracyTarget(0.002, "cosine"))["target"]["layers"]
    (first, *others), noise = layers, [one["noise"] for one in layers]
    assert first["layer"] == "wide_b" and noise == sorted(noise, reverse=True)      # it reads the tensor of both
    assert 0.9 < first["noise"] < 1.1 and all(0.0 < one["noise"] < 0.01 for one in others)
    assert first["sqnr_db"] < 10.0 < 40.0 < others[0]["sqnr_db"]


def test_nothing_stays_in_float_if_int8_is_within_the_target():
    found = build(AccuracyTarget(1.0, "cosine"))
    assert found["target"]["met"] and not found["target"]["kept"] and "kept_float" not in found


def test_a_target_that_cannot_be_met_gives_the_closest_plan(tmp_path):
    script = tmp_path / "metric.py"
    script.write_text("calls = []\n"
                      "def score(inputs, outputs, labels):\n"
                      "    assert len(inputs) == len(outputs) == len(labels) == 8\n"
                      "    calls.append(0)\n"
                      "    return 1.0 if len(calls) == 1 else 0.5 + len(calls) / 1000\n")
    notices = []
    target = AccuracyTarget(0.1, f"{script}:score", feeds(8, seed=2), list(range(8)))
    found = build(target, notify=notices.append)["target"]
    assert not found["met"] and found["float"] == 1.0
    assert any("NOT met" in notice for notice in notices)
    assert found["items"] == 8


def time_us(builder, graph, ranges):
    """Return 100 us for all layers in INT8, and 10 us more for each in float."""
    return 100.0 + 10.0 * sum(not name.endswith("_relu") for name in builder.config.keep_float)


@pytest.fixture
def timed(monkeypatch):
    """Set the times of kernels, and the time of a plan to 10 % more than INT8's for each layer in float."""
    monkeypatch.setattr(Builder, "time_us", time_us)
    monkeypatch.setattr(PlanTimes, "ratio", lambda self, mix: 1.0 + 0.1 * len(mix.kept))


def test_layers_stay_in_float_within_a_limit_of_time(timed):
    notices = []

    def found(share):
        return build_engine(model(), precision="int8", timing=False, cache=False, notify=notices.append,
                            calibration=Calibration(feeds(), "minmax", max_slowdown=share)).plan.metadata

    limited = found(0.1)
    assert limited["limit"]["kept"] == ["wide_b"] and limited["kept_float"] == ["wide_b", "wide_b_relu"]
    assert limited["limit"]["us"] == {"int8": 100.0, "chosen": 110.0} and len(limited["limit"]["layers"]) == 4
    assert "1 of 4 layers stay in fp32, at 1.10 times the time of INT8: wide_b" in notices
    assert len(found(0.25)["limit"]["kept"]) == 2
    assert "kept_float" not in found(0.05) and "limit" not in found(0.0)


def test_the_whole_plan_is_within_the_limit(timed, monkeypatch):
    """The kernels of two layers take 20 % more than INT8, and the plan 40 %."""
    monkeypatch.setattr(PlanTimes, "ratio", lambda self, mix: 1.0 + 0.2 * len(mix.kept))
    found = build(AccuracyTarget(0.0, "cosine", max_slowdown=0.25))["target"]
    assert found["kept"] == ["wide_b"] and found["slowdown"] == pytest.approx(0.2)


def test_plans_of_mixes_are_run():
    builder = Builder(BuildConfig(precision="int8", timing=False))
    subject = read_subject(builder, model().SerializeToString())
    sets = LayerSets(subject, recipe := Recipe(dict.fromkeys(builder.edges(subject.graph), (-9.0, 9.0))),
                     layers_of(subject.graph, ()))
    times, mix = PlanTimes(subject, recipe, sets), Mix().moved(sets.layers[1], "fp32")
    assert times.ratio(Mix()) == 1.0 and times.ratio(mix) > 0.0 and times.ratio(mix) == times.ratio(mix)
    assert not builder.config.keep_float and not builder.log


def test_a_target_takes_no_longer_than_its_limit_of_time(timed):
    notices = []
    limited = build(AccuracyTarget(0.0, "cosine", max_slowdown=0.1), notify=notices.append)["target"]
    assert not limited["met"] and limited["kept"] == ["wide_b"] and limited["us"]["chosen"] == 110.0
    assert any("NOT met within 10 % more than the time of INT8" in notice and "at 1.40 times that time" in notice
               for notice in notices)
    free = build(AccuracyTarget(0.0, "cosine", max_slowdown=None))["target"]
    assert free["met"] and len(free["kept"]) > 1


def test_a_limit_of_time_needs_times_data_and_int8(tmp_path):
    def built(calibration, **options):
        return build_engine(model(), **{"precision": "int8", **options}, timing=False, cache=False,
                            calibration=calibration)

    with pytest.raises(ConfigError, match="leave --no-timing out"):
        built(Calibration(feeds(), "minmax", max_slowdown=0.1))
    with pytest.raises(ConfigError, match="a limit of time is for int8"):
        built(Calibration(feeds(), "minmax", max_slowdown=0.1), precision="best")
    built(Calibration(feeds(), "minmax", cache=tmp_path / "ranges"))
    with pytest.raises(ConfigError, match="needs calibration data"):
        built(Calibration(cache=tmp_path / "ranges", max_slowdown=0.1))
    with pytest.raises(ConfigError, match=r"AccuracyTarget\.max_slowdown"):
        Calibration(feeds(), max_slowdown=0.1, target=AccuracyTarget(0.1))
    with pytest.raises(ConfigError, match="at least 0"):
        Calibration(feeds(), max_slowdown=math.inf)


def test_the_command_exits_with_3_and_writes_the_plan(tmp_path, capsys):
    import onnx
    onnx.save(model(), tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=np.concatenate([feed["x"] for feed in feeds()]))
    np.savetxt(tmp_path / "labels.txt", np.zeros(32, np.int64), "%d")
    command = [str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.plan"), "--int8", "--calib",
               str(tmp_path / "data.npz"),
               "--no-timing", "--no-cache", "--calibrator", "minmax"]
    (tmp_path / "worse.py").write_text("scores = [1.0]\ndef f(inputs, outputs, labels):\n"
                                       "    return scores.pop() if scores else 0.0\n")
    assert main([*command, "--max-drop", "1%", "--metric", f"{tmp_path / 'worse.py'}:f"]) == 3
    assert (tmp_path / "m.plan").exists() and "NOT met" in capsys.readouterr().err
    assert main([*command, "--max-drop", "100%", "--eval", str(tmp_path / "data.npz"),
                 "--labels", str(tmp_path / "labels.txt")]) == 0
    assert "top1" in capsys.readouterr().err
    assert main([*command, "--metric", "top1"]) == 2
    assert "give --max-drop" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "message"), [
    ({"max_drop": -0.1}, "at least 0"), ({"max_drop": 0.1, "max_slowdown": -1.0}, "share of the INT8 time"),
    ({"max_drop": 0.1, "metric": "top2"}, "did you mean 'top1'"),
    ({"max_drop": 0.1, "metric": "top1"}, "needs labels"), ({"max_drop": 0.1, "labels": [1]}, "give evaluation data"),
    ({"max_drop": 0.1, "test_labels": [1]}, "give test data"),
    ({"max_drop": 0.1, "data": [], "labels": [1], "test": []}, "labels of the test items, too")])
def test_wrong_targets_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        AccuracyTarget(**options)


def test_a_number_of_labels_that_does_not_fit_is_refused():
    with pytest.raises(CalibrationError, match="3 labels for 8 evaluation items"):
        build(AccuracyTarget(0.1, "top1", feeds(8), [0, 1, 2]))


def test_options_that_would_be_ignored_are_refused(tmp_path, capsys):
    with pytest.raises(ConfigError, match="target is for int8"):
        build_engine(model(), precision="best", timing=False, cache=False,
                     calibration=Calibration(feeds(), "minmax", target=AccuracyTarget(0.1)))
    for options, message in ((["--max-slowdown", "none", "--int8"], "give it with --max-drop"),
                             (["--max-slowdown", "25%", "--int8", "--no-timing"], "leave --no-timing out"),
                             (["--max-slowdown", "25%"], "it needs --int8")):
        assert main(["m.onnx", "-o", str(tmp_path / "m.plan"), "--calib", "x", *options]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="float_type is the precision"):
        build_engine(model(), precision="fp32", float_type="bf16", cache=False)
    assert main(["m.onnx", "-o", str(tmp_path / "m.plan"), "--int8", "--calib", "x", "--max-drop", "1%",
                 "--float-type", "bf16"]) == 2
    assert "leave --float-type out" in capsys.readouterr().err


def test_labels_of_folders_and_files(tmp_path):
    from PIL import Image
    for name in ("dog/1.png", "cat/2.png", "cat/1.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(tmp_path / "photos" / name)
    photos = tmp_path / "photos"
    assert read_labels("folders", photos) == [0, 0, 1]
    (tmp_path / "labels.csv").write_text("file,label\ncat/1.png,7\ncat/2.png,8\ndog/1.png,9\n")
    assert read_labels(tmp_path / "labels.csv", photos) == [7, 8, 9]
    (tmp_path / "labels.csv").write_text("cat/1.png,7\n")
    with pytest.raises(CalibrationError, match=r"no line for cat/2\.png"):
        read_labels(tmp_path / "labels.csv", photos)
    np.save(tmp_path / "labels.npy", np.arange(3))
    assert read_labels(tmp_path / "labels.npy", photos) == [0, 1, 2]
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_labels(tmp_path / "missing.txt", photos)


def test_metrics():
    expected = [{"y": np.array([[0.0, 1.0, 0.5]])}, {"y": np.array([[2.0, 1.0, 0.0]])}]
    came = [{"y": np.array([[0.0, 2.0, 1.0]])}, {"y": np.array([[0.0, 1.0, 0.5]])}]

    def scored(name, labels=None):
        metric = metric_of(name, expected[0], labels is not None)
        data = SimpleNamespace(batches=lambda size: iter([{}, {}]))
        items = Items(data, labels, list(map(metric.keep, expected)))
        return metric.name, metric.score(items, iter(came))     # outputs are iterated over once, and not held

    assert scored("", [1, 1]) == ("top1", 1.0) and scored("") == ("agreement", 0.5)
    assert scored("agreement", [1, 1])[1] == 0.5
    assert 0.5 < scored("cosine")[1] < 1.0
    boxes = {"boxes": np.zeros((1, 3, 4))}
    assert metric_of("", boxes, False).name == "cosine"
    with pytest.raises(ConfigError, match="is for classifiers"):
        metric_of("agreement", boxes, False)


def test_padded_positions_do_not_count_in_the_cosine():
    feed = {"attention_mask": np.array([[1, 1, 0]])}
    expected = {"hidden": np.array([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]), "embedding": np.array([[1.0, 2.0]])}
    metric = metric_of("cosine", expected, False)

    def score(hidden):
        items = Items(SimpleNamespace(batches=lambda size: iter([feed])), None, [metric.keep(expected)])
        return metric.score(items, iter([{**expected, "hidden": np.array([hidden])}]))

    assert score([[1.0, 0.0], [0.0, 1.0], [-9.0, 9.0]]) == pytest.approx(1.0)
    assert score([[1.0, 0.0], [0.0, -1.0], [1.0, 1.0]]) == pytest.approx(0.0)


def test_metrics_keep_of_the_float_model_only_what_they_need():
    outputs = {"y": np.array([[0.0, 1.0, 0.5]]), "n": np.array([3])}
    assert metric_of("agreement", outputs, False).keep(outputs) == 1
    assert metric_of("top1", outputs, True).keep(outputs) is None
    assert [*metric_of("cosine", outputs, False).keep(outputs)] == ["y"]


def test_items_that_a_metric_holds_have_a_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(metrics, "MOST_BYTES", 100)
    with pytest.raises(CalibrationError, match="evaluation items take more than"):
        build(AccuracyTarget(0.002, "cosine"))
    (tmp_path / "metric.py").write_text("def score(inputs, outputs, labels): return 1.0\n")
    with pytest.raises(CalibrationError, match="give fewer items, --eval"):
        build(AccuracyTarget(0.1, f"{tmp_path / 'metric.py'}:score"))
    assert build(AccuracyTarget(1.0, "agreement"))["target"]["met"]         # holds a number an item


def test_the_chosen_layers_are_scored_on_test_items():
    notices = []
    target = AccuracyTarget(0.002, "cosine", feeds(8, seed=2), test=feeds(12, seed=3))
    found = build(target, notify=notices.append)["target"]
    assert found["test"]["items"] == 12 and found["test"]["float"] == pytest.approx(1.0)
    assert 0.9 < found["test"]["score"] < 1.0 and found["test"]["score"] != found["score"]
    test_notice = next(notice for notice in notices if notice.startswith("test: cosine 1.0000 in float"))
    exceeds = found["test"]["float"] - found["test"]["score"] > 0.002
    assert ("exceeds the target" in test_notice) == exceeds
    labelled = AccuracyTarget(1.0, "top1", feeds(8), [0] * 8, feeds(4), [1] * 4)
    assert build(labelled)["target"]["test"]["items"] == 4


def test_many_items_are_split_into_three_parts():
    notices = []
    found = build(AccuracyTarget(0.002, "cosine"), feeds(128), notify=notices.append)
    assert found["calibration_items"] == found["target"]["calibration_items"] == 64
    assert found["target"]["items"] == found["target"]["test"]["items"] == 32
    assert "64 items, layers on 32, the score on 32 others (every fourth calibration item)" in target_line(
        found["target"])
    assert any("32 items that nothing was chosen on (every fourth calibration item)" in notice for notice in notices)
    few = build(AccuracyTarget(0.002, "cosine"))["target"]
    assert "on the items that chose the layers; ranges chosen on 24 items, layers on 8" in target_line(few)


def test_no_item_is_in_two_parts():
    rows = [float(feed["x"][0, 0]) for feed in feeds(128)]
    data = open_calibration_data(lambda: feeds(128), [IoTensor("x", "float32", ("N", 4))])

    def seen(items):
        return [rows.index(float(item["x"][0, 0])) for item in items]

    split = split_of(lambda: data, None, None)
    parts = seen(for_ranges(data, False, False)), seen(split.evaluation.data), seen(split.test.data)
    assert [len(part) for part in parts] == [64, 32, 32] and len(set().union(*parts)) == 128
    given = split_of(lambda: data, LabelledItems(data, list(range(128))), None)
    for items, count in ((given.evaluation, 96), (given.test, 32)):
        assert seen(items.data) == list(items.labels) and len(items.labels) == count
    assert seen(for_ranges(data, True, False)) == list(range(128))
    own_test = split_of(lambda: data, None, LabelledItems(data.limit(3)))
    assert seen(own_test.test.data) == [0, 1, 2] and own_test.source == "--test"
    assert len(seen(for_ranges(data, False, True))) == 96
    assert split_of(lambda: data.limit(127), None, None).test is None


def test_drops_and_slowdowns_are_shares_or_per_cent():
    assert parse_drop("0.5%") == parse_drop("0.005") == parse_slowdown("0.5%") == 0.005
    assert parse_slowdown("none") == math.inf
    with pytest.raises(argparse.ArgumentTypeError, match="'fast' is not a share of time such as 25%"):
        parse_slowdown("fast")
