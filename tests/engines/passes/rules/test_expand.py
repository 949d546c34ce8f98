"""Repetitions become Expand nodes, and values that are equal for all items are folded to constants."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from infer_server.engines.ir.graph import BATCH
from infer_server.engines.passes import fold_constants
from infer_server.engines.passes.pipeline import simplify
from tests.engines.passes.build import Build, keeps, ops


@pytest.mark.parametrize(("repeats", "left"), [((1, 1, 3), ["Reshape", "Expand", "Reshape"]), ((1, 4, 1), ["Expand"]),
                                               ((1, 4, 3), ["Reshape", "Expand", "Reshape"]), ((1, 1, 1), [])])
def test_a_tile_is_an_expand(repeats: tuple[int, ...], left: list[str]) -> None:
    net = Build()
    tiled = net("Tile", net("Sigmoid", net.input("x", 1, 5)), repeats=repeats)
    assert ops(keeps(simplify, net.graph(net("Softmax", tiled, axis=-1)))) == ["Sigmoid", *left, "Softmax"]


def ones(net: Build, *shape: Any) -> str:
    return str(net("ConstantOfShape", shape=shape, value=np.ones(1, np.float32)))


def test_positions_counted_in_a_mask_of_ones_are_constants() -> None:
    net = Build()
    mask = net("Reshape", ones(net, BATCH, 4, 6), shape=(1, BATCH, 4, 6))
    small = net("Resize", mask, sizes=(1, BATCH, 2, 3), mode="nearest",
                coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    alone = net("Gather", small, net.constant(np.array(0)), axis=0)
    count = net("CumSum", alone, axis=2)
    total = net("Slice", count, axes=(2,), starts=(-1,), ends=(9,), steps=(1,))
    angles = net("Mul", net("Div", count, total), net.constant(np.float32(6)))
    embedding = net("Concat", net("Sin", angles), net("Cos", angles), axis=1)
    graph = keeps(simplify, net.graph(net("Add", net.input("x", 4, 3), embedding)))
    assert ops(graph) == ["Add"]


def test_products_of_what_is_alike_are_constants() -> None:
    net = Build()
    queries = net("Expand", net.draw(1, 5, 8), shape=(BATCH, 5, 8))
    keys = net("Transpose", net("MatMul", queries, net.draw(8, 8)), perm=(0, 2, 1))
    weights = net("Softmax", net("MatMul", queries, keys), axis=2)
    graph = keeps(simplify, net.graph(net("Add", net.input("x", 5, 5), weights)))
    assert ops(graph) == ["Add"]


@pytest.mark.parametrize("op", ["CumSum", "Softmax"])
def test_what_runs_along_the_batch_is_not_alike(op: str) -> None:
    net = Build()
    filled = net("Expand", net.draw(1, 3), shape=(BATCH, 3))
    graph = keeps(simplify, net.graph(net("Add", net.input("x", 3), net(op, filled, axis=0))))
    assert op in ops(graph)


def test_items_that_a_reshape_mixes_are_not_alike() -> None:
    net = Build()
    filled = net("Expand", net.draw(4, 1), shape=(4, BATCH))
    mixed = net("Reshape", filled, shape=(BATCH, 4))
    assert "Reshape" in ops(keeps(simplify, net.graph(net("Add", net.input("x", 4), mixed))))


@pytest.mark.parametrize(("width", "folded"), [(600, True), (100, False)])
def test_a_bias_for_each_pair_of_places_is_folded_where_it_is_little_beside_the_weights(
        width: int, folded: bool) -> None:
    net = Build()
    wide = net("MatMul", net.input("x", 80, width), net.draw(width, width))
    distance = net.constant(np.abs(np.arange(80)[:, None] - np.arange(80)))
    bias = net("Gather", net.draw(80, 12), distance, axis=0)            # 80 * 80 * 12: more than is spared anyway
    scores = net("Slice", wide, axes=(2,), starts=(0,), ends=(12,), steps=(1,))
    total = net("Add", net("Reshape", scores, shape=(BATCH, 80, 1, 12)), bias)
    assert ("Gather" not in ops(simplify(net.graph(total)))) == folded


@pytest.mark.parametrize(("op", "left"), [("MatMul", ["MatMul"]), ("Mul", ["Add", "Sin", "Mul"])])
def test_weights_that_are_computed_are_constants_however_large(op: str, left: list[str]) -> None:
    net = Build()
    grid = net("Sin", net("Add", net.draw(300, 1), net.draw(1, 300)))       # more than is spared for others
    assert ops(keeps(simplify, net.graph(net(op, net.input("x", 300, 300), grid)))) == left


def test_weights_that_are_computed_are_constants_until_these_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit leaves room for two of three, however often constants are folded."""
    monkeypatch.setattr(fold_constants, "MOST_ELEMENTS", 2 * 300 * 300 + 3 * 600)
    net = Build()
    x = net.input("x", 300, 300)
    products = [net("MatMul", x, net("Sin", net("Add", net.draw(300, 1), net.draw(1, 300)))) for _ in range(3)]
    assert ops(simplify(net.graph(*products))).count("Sin") == 1
