"""Products and sums of looked-up rows are folded into the table if it grows little."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.engines.ir.graph import BATCH, Graph, TensorType
from infer_server.engines.ops import reference
from infer_server.engines.passes.pipeline import optimise
from infer_server.engines.passes.rules.tables import LARGEST
from tests.engines.passes.build import SAME, Build, ops

ROWS, WIDTH = 7, 6


def places(net: Build, *shape: int) -> str:
    name = net.input("places", *shape)
    net.types[name] = TensorType(np.dtype(np.int64), net.types[name].shape)
    return name


def rows(net: Build, *shape: int) -> str:
    return str(net("Gather", net.draw(ROWS, WIDTH), places(net, *shape), axis=0))


def keeps_rows(graph: Graph) -> Graph:
    after = optimise(graph)
    shape = [3, *graph.shape("places")[1:]]
    fed = {"places": np.random.default_rng(1).integers(0, WIDTH, shape)}
    for name, wanted in reference.run(graph, fed).items():
        np.testing.assert_allclose(reference.run(after, fed)[name], wanted, **SAME)
    return after


@pytest.mark.parametrize("form", ["a product", "and a bias", "through views", "a Gemm", "a Gemm and a bias"])
def test_products_of_rows_of_a_table_are_rows_of_a_table_of_products(form: str) -> None:
    net = Build()
    x, weights = rows(net) if "Gemm" in form else rows(net, 5), net.draw(WIDTH, 4)
    if "Gemm" in form:
        y = net("Gemm", x, net.draw(4, WIDTH), *([net.draw(4)] if "bias" in form else []), transB=1)
    elif form == "through views":
        seen = net("Reshape", net("Transpose", x, perm=(1, 0, 2)), shape=(5, BATCH, 1, WIDTH))
        y = net("Add", net("Transpose", net("MatMul", seen, weights), perm=(1, 0, 2, 3)), net.draw(4))
    else:
        y = net("MatMul", x, weights)
        y = net("Add", y, net.draw(4)) if form == "and a bias" else y
    graph = keeps_rows(net.graph(y))
    assert [op for op in ops(graph) if op not in ("Reshape", "Transpose")] == ["Gather"]


@pytest.mark.parametrize(("count", "columns", "left"), [
    (WIDTH, LARGEST, "Gather"), (WIDTH + 1, LARGEST, "MatMul"),
    (LARGEST // 16, 4, "Gather"), (LARGEST // 16 + 1, 4, "MatMul")])
def test_a_table_of_products_takes_no_more_than_the_weights_or_a_second_level_of_cache(
        count: int, columns: int, left: str) -> None:
    net = Build()
    x = net("Gather", net.constant(np.zeros((count, WIDTH))), places(net, 5), axis=0)
    graph = optimise(net.graph(net("MatMul", x, net.draw(WIDTH, columns))))
    assert ops(graph)[-1] == left


@pytest.mark.parametrize("op", ["MatMul", "Add"])
def test_what_is_stored_as_bytes_is_not_made_larger(op: str) -> None:
    net = Build()
    count = LARGEST // 4 // WIDTH + 1
    steps = net.random.integers(-127, 128, (count, WIDTH)).astype(np.float32) * np.float32(0.01)
    table, other = (net.draw(count, WIDTH), net.constant(steps.T)) if op == "MatMul" else (net.constant(steps),
                                                                                       net.draw(WIDTH))
    graph = optimise(net.graph(net(op, net("Gather", table, places(net, 5), axis=0), other)))
    assert ops(graph)[-1] == op


def test_weights_that_another_product_reads_are_not_had_twice() -> None:
    net = Build()
    weights = net.draw(WIDTH, LARGEST // 8)
    y = net("MatMul", net("Gather", net.draw(WIDTH, WIDTH), places(net, 5), axis=0), weights)
    assert "MatMul" not in ops(optimise(net.graph(y)))
    assert ops(optimise(net.graph(y, net("MatMul", net.input("x", WIDTH), weights)))).count("MatMul") == 2


def test_rows_and_tables_that_others_read_stay() -> None:
    net = Build()
    x = rows(net, 5)
    assert "MatMul" in ops(keeps_rows(net.graph(net("MatMul", x, net.draw(WIDTH, 4)), net("Relu", x))))
    net = Build()
    x = rows(net, 5)
    table = net.nodes[0].inputs[0]
    y = net("Add", x, net.draw(WIDTH))
    again = net("Gather", table, "places", axis=0)
    assert "Add" in ops(keeps_rows(net.graph(y, net("Relu", again))))


def test_a_product_of_what_is_no_whole_row_stays() -> None:
    net = Build()
    halves = net("Reshape", rows(net, 5), shape=(BATCH, 10, WIDTH // 2))
    assert "MatMul" in ops(keeps_rows(net.graph(net("MatMul", halves, net.draw(WIDTH // 2, 4)))))
    net = Build()
    columns = net("Gather", net.draw(WIDTH, ROWS), places(net, WIDTH), axis=1)
    assert "MatMul" in ops(keeps_rows(net.graph(net("MatMul", columns, net.draw(WIDTH, 4)))))
