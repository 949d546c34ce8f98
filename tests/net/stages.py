"""Stages of the compiler, each run by the reference, which must keep a graph's results."""
from __future__ import annotations

from collections.abc import Iterator

from infer_server.engines.compiler.builder import BuildConfig
from infer_server.engines.errors import EngineError
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ir.graph import Graph
from infer_server.engines.ops import reference
from infer_server.engines.passes.pipeline import optimise, simplify
from tests.net.evaluation import Array
from tests.net.graphs import ITEMS, Case


def float_stages(case: Case, config: BuildConfig) -> Iterator[tuple[str, Graph]]:
    """Yield (name, graph) as imported, after `simplify` and after `optimise`.

    There is none of a model whose batch has to be fixed first, which the builder finds out.
    """
    try:
        graph = graph_from_onnx(case.model(), keep_batch=config.max_batch is not None)
        for name, stage in (("import", lambda g: g), ("simplify", simplify), ("optimise", optimise)):
            graph = stage(graph)
            yield name, graph
    except EngineError:
        return


def results_of(case: Case, graph: Graph) -> dict[str, Array]:
    """Return the reference's outputs of all ITEMS items."""
    return reference.run(graph, case.feeds(ITEMS))
