"""Merging of norms and products with the scaling of their rows, so that rows are read while they are in cache."""
from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields, replace

from infer_server.engines.ir.graph import Graph
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.broadcast import image, is_image
from infer_server.engines.lowering.calls.calls import AnyCall, ProblemCall
from infer_server.engines.lowering.calls.placement import Placement, with_items
from infer_server.engines.lowering.problems.convolution import Contraction, ScaledContraction
from infer_server.engines.lowering.problems.problem import Problem
from infer_server.engines.lowering.problems.rows import Norm, ScaledNorm, ScaledRows

WIDEST = 16 << 10       # maximum bytes of a row of which kernels keep a block in scratch memory


def with_merged_scaling(graph: Graph, calls: Iterable[AnyCall],
                        solved: Collection[type[Problem]] | None) -> tuple[AnyCall, ...]:
    """Return the calls of a graph with each ScaledRows merged into the call before it whose result it reads.

    solved: problems that the target has kernels for; None: all.
    """
    merged: list[AnyCall] = []
    for call in calls:
        before = merged[-1] if merged else None
        both = None
        if isinstance(before, ProblemCall) and isinstance(call, ProblemCall) and isinstance(call.problem, ScaledRows):
            both = _scaled_norm(before, call) or _scaled_product(graph, before, call)
        if both is not None and (solved is None or type(both.problem) in solved):
            merged[-1] = both
        else:
            merged.append(call)
    return tuple(merged)


def _scaled_norm(norm: ProblemCall, scaled: ProblemCall) -> ProblemCall | None:
    rows = scaled.problem
    assert isinstance(rows, ScaledRows)
    if type(norm.problem) is not Norm or scaled.inputs != norm.outputs or rows.sources != norm.problem.outputs:
        return None
    known = {field.name: getattr(norm.problem, field.name) for field in fields(Norm)}
    problem = ScaledNorm(**known, numbers=rows.y, scales=rows.scales)
    return replace(norm, problem=problem, outputs=(*norm.outputs, *scaled.outputs))


def only_scaled(graph: Graph, rows: str) -> bool:
    """Return True if ScaledRows nodes read a tensor, nothing else does, and it is no output of the graph."""
    readers = graph.consumers[rows]
    return bool(readers) and rows not in graph.outputs and all(node.op == "ScaledRows" for node in readers)


def _scaled_product(graph: Graph, product: ProblemCall, scaled: ProblemCall) -> ProblemCall | None:
    """Merge a matrix product, whose tensors are viewed as images of one row."""
    problem, rows = product.problem, scaled.problem
    assert isinstance(rows, ScaledRows)
    if type(problem) is not Contraction or problem.y.dtype != "float32" or problem.rows != 1 or problem.groups != 1:
        return None
    (x,), (y,) = scaled.inputs, product.outputs
    placed = [_as_pixels(placement, y.items) for placement in (x, *scaled.outputs)]
    if placed[0] != y:
        return None
    numbers, scales = placed[1:]
    assert numbers is not None and scales is not None
    known = {field.name: getattr(problem, field.name) for field in fields(Contraction)}
    writes_y = not only_scaled(graph, scaled.node.inputs[0]) or problem.cout * y.view.size > WIDEST
    merged = ScaledContraction(**known, numbers=numbers.view, scales=scales.view, steps=rows.steps, writes_y=writes_y)
    return replace(product, problem=merged, outputs=(*([y] if writes_y else []), numbers, scales))


def _as_pixels(placement: Placement, items: object) -> Placement | None:
    """Return a placement as an image with so many items, all of them in one if that is 1; None if it cannot be one."""
    view = placement.view
    if items != placement.items:
        placement, view = replace(placement, items=1), with_items(view, as_int(placement.items))
    return replace(placement, view=image(view)) if items == placement.items and is_image(view) else None
