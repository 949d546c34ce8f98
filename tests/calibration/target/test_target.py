"""Builds to an accuracy target keep the layers in float that lose most, and no more."""
from functools import partialmethod
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from infer_server.calibration import Calibration
from infer_server.calibration.open_data import open_calibration_data
from infer_server.calibration.target import metrics, selection
from infer_server.calibration.target.labels import read_labels
from infer_server.calibration.target.metrics import Items, metric_of
from infer_server.calibration.target.search import AccuracyTarget
from infer_server.calibration.target.sensitivity import Layer, Sensitivity
from infer_server.calibration.target.sets import LayerSets
from infer_server.calibration.target.split import LabelledItems, for_ranges, split_of
from infer_server.cli.build_engine import main
from infer_server.cli.verifying import parse_drop, target_line
from infer_server.engines import build_engine
from infer_server.engines.errors import CalibrationError, ConfigError
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


def test_each_stage_has_progress_and_trials_are_bounded(monkeypatch):
    told = []
    build(AccuracyTarget(0.002, "cosine"), progress=lambda *step: told.append(step))
    stages = list(dict.fromkeys(stage for stage, *_ in told))
    known = ("calibrating", "searching", "evaluating", "ranking", "growing", "closing", "pruning")
    assert [stage for stage in stages if stage != "compiling"] == list(known)
    assert all(done <= of for _, done, of, _ in told if of)
    monkeypatch.setattr(selection, "MOST_GROWING", 0)       # the order is that of the layers measured alone
    assert build(AccuracyTarget(0.002, "cosine"))["target"]["met"]


def test_a_layer_that_the_target_does_not_need_returns_to_int8():
    """The first of three layers is superfluous once the others are there; "c" alone meets the target by chance."""
    every = [Layer(name, (name,)) for name in "abc"]
    ranked = [Sensitivity(layer, 0.0, noise, 1.0) for layer, noise in zip(every, (0.5, 0.3, 0.2), strict=True)]

    class Sets:
        layers, in_order = every, LayerSets.in_order
        noises = {"": 1.0, "a": 0.5, "b": 0.7, "c": 0.8, "ab": 0.4, "ac": 0.45, "bc": 0.06, "abc": 0.05}

        def key(self, kept):
            return "".join(layer.name for layer in self.in_order(kept))

        def noise(self, judge, kept):
            return self.noises[self.key(kept)]

        def drop(self, kept):
            return 0.0 if self.key(kept) == "c" else self.noises[self.key(kept)]

        def us(self, kept):
            return 0.0

    for most, expected in ((0.5, "a"), (0.2, "bc"), (0.055, "abc")):
        sets = Sets()
        chosen = selection.Selection(sets, None, ranked, most, lambda *step: None)
        assert sets.key(chosen.kept()) == expected


@pytest.mark.parametrize(("noises", "most_drop", "expected"), [
    ({"a": 0.5, "b": 0.0, "c": 0.4, "d": 0.0}, 0.15, "abc"),            # an INT8 layer between two float ones
    ({"a": 0.5, "b": 0.0, "c": 0.0, "d": 0.4, "e": 0.0}, 0.15, "abcd"),     # two of them
    ({"a": 0.5, "b": 0.0, "c": 0.0, "d": 0.0, "e": 0.0, "f": 0.0, "g": 0.0, "h": 0.4}, 0.15, "ah"),     # too many
    ({"a": 0.3, "b": 0.27, "c": 0.0, "d": 0.0, "e": 0.0, "f": 0.0, "g": 0.28}, 0.45, "ab")])    # a run, no conversion
def test_layers_that_save_conversions_move_together(noises, most_drop, expected):
    """Each layer in float takes 1 us more, each conversion 3 us."""
    every = [Layer(name, (name,)) for name in noises]
    ranked = sorted((Sensitivity(layer, 0.0, noises[layer.name], 1.0) for layer in every), key=lambda one: -one.noise)

    class Sets:
        layers, in_order = every, LayerSets.in_order

        def noise(self, judge, kept):
            return 1.0 - sum(noises[layer.name] for layer in kept)

        drop = partialmethod(noise, None)

        def us(self, kept):
            conversions = sum((a in kept) != (b in kept) for a, b in zip(every, every[1:], strict=False))
            return 100.0 + len(kept) + 3.0 * conversions

    chosen = selection.Selection(Sets(), None, ranked, most_drop, lambda *step: None)
    assert "".join(layer.name for layer in Sets().in_order(chosen.kept())) == expected


@pytest.mark.parametrize(("noise_of_bf16", "expected"), [(0.001, "bf16"), (0.2, "fp32")])
def test_layers_move_to_a_faster_precision_if_the_noise_allows_it(noise_of_bf16, expected):
    every = [Layer(name, (name,)) for name in "abc"]
    noises = {"a": 0.5, "b": 0.3, "c": 0.1}
    ranked = [Sensitivity(layer, 0.0, noises[layer.name], 1.0) for layer in every]

    class Sets:
        layers, in_order, float_type, fp32 = every, LayerSets.in_order, "fp32", frozenset()

        def noise(self, judge, kept):
            return 1.0 - sum(noises[layer.name] for layer in kept) + len(kept - self.fp32) * noise_of_bf16 * (
                self.float_type == "bf16")

        drop = partialmethod(noise, None)

        def us(self, kept):
            return 0.0

    sets = Sets()
    chosen = selection.Selection(sets, None, ranked, 0.25, lambda *step: None, ["bf16"]).kept()
    assert sets.float_type == expected and "".join(layer.name for layer in sets.in_order(chosen)) == "ab"


@pytest.mark.parametrize(("drop", "expected"), [(0.0, "a"), (9.0, "ab")])
def test_layers_that_are_too_noisy_in_a_faster_precision_stay_in_float32_alone(drop, expected):
    """Layer a is noisy in bf16. drop: that of the metric if layer b computes in bf16."""
    every = [Layer(name, (name,)) for name in "abc"]
    ranked = [Sensitivity(layer, 0.0, 0.3, 1.0) for layer in every]
    a, b, _ = every

    class Sets:
        layers, in_order, float_type, fp32 = every, LayerSets.in_order, "fp32", frozenset()

        def bf16(self, layer, kept):
            return self.float_type == "bf16" and layer in kept - self.fp32

        def noise(self, judge, kept):
            return 1.0 - 0.3 * len(kept) + 0.5 * self.bf16(a, kept) + 0.001 * sum(self.bf16(one, kept) for one in every)

        def drop(self, kept):
            return 0.2 * (3 - len(kept)) + drop * self.bf16(b, kept)

        def us(self, kept):
            return 100.0 + sum(1.0 if self.bf16(layer, kept) else 5.0 for layer in kept)

    sets = Sets()
    assert selection.Selection(sets, None, ranked, 0.1, lambda *step: None, ["bf16"]).kept() == frozenset(every)
    in_float32 = frozenset(every) if sets.float_type == "fp32" else sets.fp32
    assert "".join(layer.name for layer in sets.in_order(in_float32)) == expected


def test_all_layers_but_a_few_move_to_a_faster_precision_if_that_is_faster():
    """No layer may leave float32 by its noise; the metric misses its target only if layer a computes in bf16."""
    every = [Layer(name, (name,)) for name in "abc"]
    ranked = [Sensitivity(layer, 0.0, 0.3, 1.0) for layer in every]

    class Sets:
        layers, in_order, float_type, fp32 = every, LayerSets.in_order, "fp32", frozenset()

        def bf16(self, kept):
            return kept - self.fp32 if self.float_type == "bf16" else frozenset()

        def noise(self, judge, kept):
            return 1.0 - 0.3 * len(kept) + sum(0.9 if layer == every[0] else 0.5 for layer in self.bf16(kept))

        def drop(self, kept):
            return 0.2 * (3 - len(kept)) + 0.3 * (every[0] in self.bf16(kept))

        def us(self, kept):
            return 100.0 + 10.0 * len(kept) - 9.0 * len(self.bf16(kept))

    sets = Sets()
    assert selection.Selection(sets, None, ranked, 0.1, lambda *step: None, ["bf16"]).kept() == frozenset(every)
    assert (sets.float_type, sets.fp32) == ("bf16", {every[0]})


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
    ({"max_drop": -0.1}, "at least 0"), ({"max_drop": 0.1, "metric": "top2"}, "did you mean 'top1'"),
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


def test_drops_are_shares_or_per_cent():
    assert parse_drop("0.5%") == parse_drop("0.005") == 0.005
