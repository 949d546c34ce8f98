"""Outputs are divided into parts of different scale: by the graph, else by channels."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from infer_server.calibration.accuracy.comparison import compare
from infer_server.calibration.accuracy.parts import parts_of_tensor
from infer_server.calibration.accuracy.sources import Sources, selections, sources_of
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.ir.graph import Array, Graph
from tests.calibration import detectors
from tests.engines.passes.build import Build


def graph_of(model: Any) -> Graph:
    return Builder(BuildConfig()).graph(model)


def boxes_and_scores(*behind: Any) -> tuple[Graph, str]:
    """Build a graph that concatenates `box` [batch, 4, 8] and `score` [batch, 2, 8], followed by the nodes `behind`."""
    net = Build()
    x = net.input("x", 6, 8)
    box = net("Relu", net("Slice", x, axes=(1,), starts=(0,), ends=(4,), steps=(1,)))
    score = net("Sigmoid", net("Slice", x, axes=(1,), starts=(4,), ends=(6,), steps=(1,)))
    y = net("Concat", box, score, axis=1)
    for step in behind:
        y = step(net, y)
    return net.graph(y), y


# ---- sources
@pytest.mark.parametrize("behind, expected", [
    ((), [[0], [0], [0], [0], [1], [1]]),
    ((lambda net, y: net("Mul", y, net.constant(np.float32([0.5]))),), [[0], [0], [0], [0], [1], [1]]),
    ((lambda net, y: net("Reshape", y, shape=("batch", 2, 3, 8)),), [[[0], [0], [0]], [[0], [1], [1]]]),
    ((lambda net, y: net("Slice", y, axes=(1,), starts=(3,), ends=(6,), steps=(1,)),), [[0], [1], [1]])],
    ids=["alone", "Mul", "Reshape", "Slice"])
def test_elements_are_traced_back_to_the_sources_of_a_concat(behind: Any, expected: Any) -> None:
    graph, y = boxes_and_scores(*behind)
    found = sources_of(graph, y)
    assert len(found.names) == 2
    np.testing.assert_array_equal(found.labels, np.broadcast_to(np.array([expected]), found.labels.shape))


def test_a_transpose_moves_the_sources_with_the_elements() -> None:
    graph, y = boxes_and_scores(lambda net, y: net("Transpose", y, perm=(0, 2, 1)))
    np.testing.assert_array_equal(sources_of(graph, y).labels, np.broadcast_to([0, 0, 0, 0, 1, 1], (1, 8, 6)))


def test_a_walk_back_is_linear_in_the_nodes() -> None:
    net = Build()
    x = net("Concat", net.input("x", 2), net.input("z", 2), axis=1)
    for _ in range(200):        # 2**200 paths
        x = net("Mul", x, net("Sigmoid", x))
    assert len(sources_of(net.graph(x), x).names) == 2


def test_a_selection_is_judged_by_the_tensors_that_enter_it() -> None:
    graph = graph_of(detectors.end_to_end())
    found = selections(graph)["y"]
    assert found.ordered and found.counts == {detectors.DETECTIONS} and {"best", "row_boxes"} <= set(found.tensors)
    assert not selections(graph_of(detectors.concatenated()))


# ---- parts
def sources(*labels: int) -> Sources:
    return Sources(("boxes", "scores", "offsets"), np.array([labels], np.int32))


def parts(values: Array, of: Sources) -> tuple[str, ...]:
    return parts_of_tensor([values.astype(np.float32)], [of]).names


def test_sources_of_one_size_are_one_part_and_zeros_are_none() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(0.5, 1, (16, 3))
    assert parts(values * [300, 1, 250], sources(0, 1, 2)) == ("boxes, offsets", "scores")
    assert parts(values, sources(0, 1, 2)) == ("",)
    assert parts(values * [300, 0, 250], sources(0, 1, 2)) == ("",)


def test_channels_of_unlike_size_are_parts_but_not_those_of_a_softmax() -> None:
    values = np.random.default_rng(0).uniform(0.5, 1, (4, 10, 7)) * np.repeat([300, 1], [4, 6])[:, None]
    whole = np.zeros((1, 10, 7), np.int32)
    assert parts(values, Sources(("y",), whole)) == ("[:, 0:4]", "[:, 4:10]")
    assert parts(values, Sources(("y",), whole, bounded=True)) == ("",)
    one_dead = np.random.default_rng(0).uniform(0.5, 1, (4, 200)) * np.repeat([1, 1e-3], [199, 1])
    assert parts(one_dead, Sources(("y",), np.zeros((1, 200), np.int32))) == ("",)


def test_values_that_became_zero_are_a_fault_though_the_peaks_keep_the_ratio() -> None:
    scores = np.full((4, 100), 0.1, np.float32)
    scores[:, :10] = 1
    rounded = np.rint(scores)
    found = compare([{"y": scores}], [{"y": rounded}])
    assert found.sqnr_db > 6 and "90 % of its values that are not 0 have become 0" in found.fault
    assert not compare([{"y": rounded}], [{"y": rounded}]).fault


def test_the_worst_part_is_the_score_of_a_comparison_and_is_named() -> None:
    rng = np.random.default_rng(1)
    right = np.concatenate([rng.uniform(0, 300, (8, 4)), rng.uniform(0, 1, (8, 2))], axis=1).astype(np.float32)
    poor = right.copy()
    poor[:, 4:] = 0
    divided = {"y": parts_of_tensor([right], [Sources(("boxes", "scores"), np.array([[0, 0, 0, 0, 1, 1]]))])}
    whole, by_part = compare([{"y": right}], [{"y": poor}]), compare([{"y": right}], [{"y": poor}], divided)
    assert whole.sqnr_db > 40 and not whole.fault and not whole.part
    assert by_part.sqnr_db < 2 and by_part.part == "y: scores" and "'y: scores'" in by_part.fault
    assert str(by_part).endswith("  y: scores")
