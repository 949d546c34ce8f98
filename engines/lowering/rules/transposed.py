"""ConvTranspose -> a Contraction for each phase of the output's rows, and of its columns or of all of those together.

The phases of the columns lie beside each other in memory: an output of n of them, c channels each, is an image of a
column in n whose pixels have n * c channels. Where they read much the same pixels, one Contraction makes all of them:
few channels then fill a vector better, and x is read once.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engines.ir.graph import Node
from engines.lowering.calls.body import write_body
from engines.lowering.calls.broadcast import broadcast, image
from engines.lowering.calls.calls import Call, Context, Refused, lowers
from engines.lowering.calls.phases import Phase, phases
from engines.lowering.calls.placement import Placement
from engines.lowering.problems.convolution import Contraction
from engines.lowering.problems.problem import Array
from engines.lowering.rules.contraction import accumulator_of


@lowers("ConvTranspose", images=True)
def lower_conv_transpose(ctx: Context, node: Node) -> Sequence[Call]:
    conv = node.anchor
    weights = ctx.constant(conv.inputs[1])          # [cin, cout, rows, columns]
    grouped, dilated = conv.attrs.get("group", 1) != 1, set(conv.attrs.get("dilations") or (1,)) != {1}
    if grouped or dilated:
        raise Refused("only a transposed convolution without groups or dilation is compiled")
    rows, columns = phases(ctx.graph, conv)
    if not all(phase.taps for phase in (*rows, *columns)):
        raise Refused("its kernel is smaller than its stride")
    calls: list[Call] = []
    for row in rows:
        apart = [_phase(ctx, node, weights[:, :, row.taps][..., column.taps].swapaxes(0, 1), row, column)
                 for column in columns]
        together = _together(ctx.lanes, apart, columns)
        calls += [together] if together else apart
    return calls


def _phase(ctx: Context, node: Node, weights: Array, row: Phase, column: Phase) -> Call:
    conv, output = node.anchor, node.outputs[0]
    body = write_body(ctx, node, accumulator_of(ctx, node, weights.sum(axis=(1, 2, 3), dtype=np.float64)))
    x = ctx.placements[conv.inputs[0]].moved(row.first, column.first, 0)
    reach = (row.end - row.first, column.end - column.first, x.view.shape[2])
    x = replace(x, view=replace(x.view, shape=reach))
    y = _part(ctx.placements[output], row, column)
    others = [_part(replace(ctx.placements[name], view=image(broadcast(ctx, name, output))), row, column)
              for name in body.operands]
    problem = Contraction(x.view, y.view, tuple(placement.view for placement in others), body.program, node.precision,
                          (len(row.taps), len(column.taps)))
    return Call(node, problem, (x, *others), (y,), {"weights": weights, "program": body.constants})


def _part(placement: Placement, row: Phase, column: Phase) -> Placement:
    """The pixels of a phase."""
    height, width, _ = placement.view.shape
    return placement.part(0, row.start, height, row.step).part(1, column.start, width, column.step)


def _together(lanes: int, apart: Sequence[Call], columns: Sequence[Phase]) -> Call | None:
    """The calls of all phases of the columns as one, their channels one behind the other.

    None where they differ in more than constants, where the pixels have gaps, or where the products with zeros, for
    pixels that a phase does not read, cost more vectors than are saved.
    """
    (x, *others), (y,), problem = apart[0].inputs, apart[0].outputs, apart[0].problem
    assert isinstance(problem, Contraction)
    couts, count = y.view.shape[2], len(apart)
    first = min(column.first for column in columns)
    taps = max(column.first + len(column.taps) for column in columns) - first
    alike = {(call.problem.program, call.problem.y) for call in apart if isinstance(call.problem, Contraction)}
    if (others or len(alike) > 1 or count != columns[0].step or y.view.strides[1] != count * couts * y.view.size
            or taps * -(-count * couts // lanes) > sum(len(c.taps) for c in columns) * -(-couts // lanes)):
        return None
    weights = np.zeros((count, couts, x.view.shape[2], problem.taps[0], taps), apart[0].constants["weights"].dtype)
    for i, (call, column) in enumerate(zip(apart, columns, strict=True)):
        begin = column.first - first
        weights[i, ..., begin:begin + len(column.taps)] = call.constants["weights"]
    x = x.moved(0, first - columns[0].first, 0)
    x = replace(x, view=replace(x.view, shape=(x.view.shape[0], columns[0].outputs + taps - 1, x.view.shape[2])))
    y = replace(y, view=replace(y.view, shape=(*y.view.shape[:2], count * couts)))
    program = [np.concatenate([np.broadcast_to(constant, couts) for constant in constants])
               for constants in zip(*(call.constants["program"] for call in apart), strict=True)]
    problem = replace(problem, x=x.view, y=y.view, taps=(problem.taps[0], taps))
    return Call(apart[0].node, problem, (x,), (y,), {"weights": weights.reshape(-1, *weights.shape[2:]),
                                                 "program": program})
