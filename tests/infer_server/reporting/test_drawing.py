"""Layout and drawing of the graph of kernels."""
from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from infer_server import build_engine
from infer_server.reporting.data import ReportData
from infer_server.reporting.drawing import boxes_of, drawn
from infer_server.reporting.elements import markup
from infer_server.reporting.layout import GAP_X, HEIGHT, WIDTH, layered
from tests.infer_server.comparing.test_compare_engine import network


def random_graph(count: int, more: int, seed: int) -> list[tuple[int, int]]:
    """Return a chain with gaps and `more` further edges."""
    rng = random.Random(seed)
    edges = [(node, node + 1) for node in range(count - 1) if rng.random() < 0.9]
    return edges + [(min(pair), max(pair)) for pair in (rng.sample(range(count), 2) for _ in range(more))]


@pytest.mark.parametrize("count, more, seed", [(1, 0, 0), (30, 0, 1), (30, 20, 2), (120, 60, 3)])
def test_boxes_do_not_overlap_and_edges_go_down(count: int, more: int, seed: int) -> None:
    edges = random_graph(count, more, seed)
    actual = layered(count, edges)
    rows: dict[float, list[float]] = {}
    for x, y in actual.nodes:
        assert WIDTH / 2 <= x <= actual.width - WIDTH / 2 and HEIGHT / 2 <= y <= actual.height - HEIGHT / 2
        rows.setdefault(y, []).append(x)
    for places in rows.values():
        assert all(b - a >= WIDTH + GAP_X - 1e-6 for a, b in itertools.pairwise(sorted(places)))
    for (source, target), points in actual.edges.items():
        assert actual.nodes[source][1] < actual.nodes[target][1]
        assert [y for _, y in points] == sorted(y for _, y in points) and not len(points) % 2
        assert all(a[0] == b[0] for a, b in zip(points[1:-1:2], points[2:-1:2], strict=True))
    assert actual.edges.keys() == {*edges}


def test_a_chain_is_straight_and_a_residual_edge_passes_beside_it() -> None:
    actual = layered(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    (a, b, c, d), bend = (x for x, _ in actual.nodes), actual.edges[0, 3][1][0]
    assert b == c and abs(a - d) < 1e-6 and abs(bend - b) > WIDTH / 2


def test_three_thousand_nodes_are_placed_and_no_time_ends_the_sweeps() -> None:
    edges = random_graph(3000, 3000, 4)
    actual = layered(3000, edges, seconds=0.0)
    assert len(actual.nodes) == 3000 and len(actual.edges) == len({*edges})


@pytest.fixture(scope="module")
def data() -> ReportData:
    return ReportData(build_engine(network(), cache=False, timing=False, max_batch=2).plan)


def test_boxes_are_inputs_kernels_and_outputs(data: ReportData) -> None:
    boxes, edges = boxes_of(data)
    kernels = [row for row in data.rows if not row.is_border]
    assert boxes[0].subtitle.startswith("input") and boxes[-1].subtitle.startswith("output")
    assert [box.rows for box in boxes[1:-1]] == [(row,) for row in kernels]
    assert {box.title for box in boxes} >= {"Conv + Relu", "Gemm"}
    assert edges[0][0] < edges[0][1] and {0} == {source for source, _ in edges} - {*range(1, len(boxes))}
    fed = {target for _, target in edges}
    assert fed == {*range(1, len(boxes))}, "all but the input are fed"


def test_neighbours_share_a_box_in_large_plans(data: ReportData) -> None:
    boxes, edges = boxes_of(data, max_boxes=2)
    inner = [box for box in boxes if box.rows]
    assert len(inner) == 2 and sum(len(box.rows) for box in inner) == sum(not row.is_border for row in data.rows)
    assert "kernels" in inner[0].title and all(source < target for source, target in edges)


def test_the_drawing_has_a_box_for_each_kernel(data: ReportData, tmp_path: Path) -> None:
    text = markup(drawn(data))
    assert text.count('class="box p-fp32"') == sum(not row.is_border for row in data.rows)
    assert text.count('class="box p-io"') == 2 and text.startswith("<svg")
