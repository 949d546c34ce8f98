"""Rule for ConvTranspose: a Contraction per phase of the output, or a Depthwise for images with one channel per group.

There is a call per phase of the rows (of planes and rows for volumes), and per phase of the columns or for all of these
together. Phases of columns are adjacent in memory: an output of n phases with c channels is an image of one column in n
whose pixels have n * c channels. If they read mostly the same pixels, one Contraction computes all of them: it fills
vectors better and reads x once. This needs a single group, as channels of groups would not be contiguous.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, product

import numpy as np

from infer_server.engines.ir.graph import Node
from infer_server.engines.lowering.calls.body import write_body
from infer_server.engines.lowering.calls.broadcast import broadcast
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, lowers
from infer_server.engines.lowering.calls.phases import Phase, phases
from infer_server.engines.lowering.calls.placement import Placement
from infer_server.engines.lowering.problems.convolution import Contraction, Depthwise
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.rules.contraction import accumulator_of, border_of, merge_small_groups, sum_of_couts


@lowers("ConvTranspose", images=True, volumes=True)
def lower_conv_transpose(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    conv = node.anchor
    groups = int(conv.attrs.get("group", 1))
    weights = _conv_weights(ctx.constant(conv.inputs[1]), groups)
    if set(conv.attrs.get("dilations") or (1,)) != {1}:
        raise Refused("a transposed convolution with dilation is not compiled by this rule")
    if not _is_depthwise(weights, groups):
        weights, groups = merge_small_groups(weights, groups, ctx.lanes)
    *outer, columns = axes = phases(ctx.graph, conv)
    if not all(phase.taps for phase in chain(*axes)):
        raise Refused("its kernel is smaller than its stride")
    calls: list[ProblemCall] = []
    for combination in product(*outer):
        apart = [_phase(ctx, node, weights, groups, (*combination, column)) for column in columns]
        together = _merged_columns(ctx, apart, combination, columns) if groups == 1 else None
        calls += [together] if together else apart
    return calls


def _conv_weights(weights: Array, groups: int) -> Array:
    """Rearrange [groups * cin, cout, *kernel] to [groups * cout, cin, *kernel]."""
    cin, cout, *kernel = weights.shape
    blocks = weights.reshape(groups, cin // groups, cout, *kernel).swapaxes(1, 2)
    return blocks.reshape(groups * cout, cin // groups, *kernel)


def _is_depthwise(weights: Array, groups: int) -> bool:
    """Return True for an image with one input and output channel per group."""
    return groups > 1 and weights.shape[:2] == (groups, 1) and weights.ndim == 4


def _phase(ctx: Context, node: Node, weights: Array, groups: int, combination: Sequence[Phase]) -> ProblemCall:
    """Return the call of a phase. weights: [groups * cout, cin, *kernel]; combination: the phase along each axis."""
    conv, output = node.anchor, node.outputs[0]
    for axis, phase in enumerate(combination, 2):
        weights = np.take(weights, phase.taps, axis)
    body = write_body(ctx, node, accumulator_of(ctx, node, sum_of_couts(weights)))
    x = ctx.placements[conv.inputs[0]].moved(*(phase.first for phase in combination), 0)
    reach = (*(phase.end - phase.first for phase in combination), x.view.shape[-1])
    x = replace(x, view=replace(x.view, shape=reach))
    y = _part(ctx.placements[output], combination)
    others = [_part(replace(ctx.placements[name], view=broadcast(ctx, name, output)), combination)
              for name in body.operands]
    ones = (1,) * len(combination)
    seen = (x.view, y.view, tuple(placement.view for placement in others), body.program, node.precision,
            tuple(len(phase.taps) for phase in combination), ones, ones)
    border = border_of(ctx, conv, x.view, [-phase.first for phase in combination])
    problem = Depthwise(*seen) if _is_depthwise(weights, groups) else Contraction(*seen, groups, border)
    return ProblemCall(node, problem, (x, *others), (y,), {"weights": weights, "program": body.constants})


def _part(placement: Placement, combination: Sequence[Phase]) -> Placement:
    """Return the pixels of a phase."""
    for axis, phase in enumerate(combination):
        placement = placement.part(axis, phase.start, placement.view.shape[axis], phase.step)
    return placement


def _merged_columns(ctx: Context, apart: Sequence[ProblemCall], combination: Sequence[Phase],
                    columns: Sequence[Phase]) -> ProblemCall | None:
    """Merge the calls of all phases of the columns, with their channels side by side.

    `combination` is the phase along each other axis. Returns None if the calls differ in more than constants, if pixels
    have gaps, or if multiplications by zeros, for pixels that a phase does not read, cost more vectors than are saved.
    """
    (x, *others), (y,), problem = apart[0].inputs, apart[0].outputs, apart[0].problem
    assert isinstance(problem, Contraction)
    couts, count = y.view.shape[-1], len(apart)
    first = min(column.first for column in columns)
    taps = max(column.first + len(column.taps) for column in columns) - first
    same = problem.program, problem.y
    differ = any((one.problem.program, one.problem.y) != same for one in apart if isinstance(one.problem, Contraction))
    if (others or differ or count != columns[0].step or y.view.strides[-2] != count * couts * y.view.size
            or taps * -(-count * couts // ctx.lanes) > sum(len(c.taps) for c in columns) * -(-couts // ctx.lanes)):
        return None
    outer, depth = problem.taps[:-1], x.view.shape[-1]
    weights = np.zeros((count, couts, depth, *outer, taps), apart[0].constants["weights"].dtype)
    for i, (call, column) in enumerate(zip(apart, columns, strict=True)):
        begin = column.first - first
        weights[i, ..., begin:begin + len(column.taps)] = call.constants["weights"]
    x = x.moved(*(0 for _ in outer), first - columns[0].first, 0)
    x = replace(x, view=replace(x.view, shape=(*x.view.shape[:-2], columns[0].outputs + taps - 1, depth)))
    y = replace(y, view=replace(y.view, shape=(*y.view.shape[:-1], count * couts)))
    program = [np.concatenate([np.broadcast_to(constant, couts) for constant in constants])
               for constants in zip(*(call.constants["program"] for call in apart), strict=True)]
    node = apart[0].node
    border = border_of(ctx, node.anchor, x.view, [*(-phase.first for phase in combination), -first])
    problem = replace(problem, x=x.view, y=y.view, taps=(*outer, taps), border=border)
    return ProblemCall(node, problem, (x,), (y,), {"weights": weights.reshape(-1, *weights.shape[2:]),
                                                 "program": program})
