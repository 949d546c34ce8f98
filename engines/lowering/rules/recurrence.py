"""Recurrence -> its kernel: the cells of an LSTM, GRU or RNN whose projection is another node."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.ir.graph import Node
from engines.lowering.calls.calls import Call, Context, Refused, lowers
from engines.lowering.calls.placement import Placement
from engines.lowering.epilogue.affine import Affine, AffineWriter
from engines.lowering.epilogue.program import ProgramBuilder
from engines.lowering.problems.recurrence import Recurrence, integer_precision, integer_weights
from engines.lowering.problems.view import FLOATS
from engines.lowering.rules.cells import bounded, cell_of
from engines.ops.recurrent import directions


@lowers("Recurrence")
def lower_recurrence(ctx: Context, node: Node) -> Sequence[Call]:
    gates, r, bias, peepholes, lengths, *states = (*node.inputs, *("",) * (7 - len(node.inputs)))
    weights, backwards = ctx.constant(r), directions(node)
    count, _, hidden = weights.shape
    try:
        cells = tuple(cell_of(node, d, bool(peepholes)) for d in range(count))
    except NotImplementedError as reason:
        raise Refused(str(reason)) from reason
    states = states[:cells[0].kept]
    given = tuple(slot for slot, name in enumerate(states) if name in ctx.graph.constants)
    firsts = [ctx.constant(states[slot]) for slot in given]
    if any(len(np.unique(first, axis=0)) > 1 for first in firsts):
        raise Refused("its first states are constants that differ from item to item")
    placed = ["" if slot in given else name for slot, name in enumerate(states)]
    if lengths in ctx.graph.constants:
        raise Refused("its lengths are constants that differ from item to item")
    inputs = [ctx.placements[name] for name in (gates, *placed, lengths) if name]
    if lengths and ctx.type(lengths).dtype != np.int32:
        raise Refused("only lengths of int32 are compiled")
    units: list[Any] = []
    if bias:
        units.append(ctx.constant(bias))
    if peepholes:
        units += np.split(ctx.constant(peepholes), 3, axis=1)
    constants: dict[str, Any] = {"weights": weights, "units": units, "first": [first[0] for first in firsts]}
    precision = "fp32"
    if node.precision != "fp32" and bounded(node) and not any(states):
        precision = integer_precision(weights) if node.precision == "int8" else "int16"
        constants["weights"], constants["scales"] = integer_weights(weights, precision)
    made = [_wanted(ctx, name) for name in node.outputs]
    made += [None] * (1 + cells[0].kept - len(made))
    builder, numbers = _stored(ctx, node.outputs[0])
    spec = Recurrence(
        ctx.placements[gates].view, hidden, cells, backwards, made[0].view if made[0] else None,
        tuple(ctx.placements[name].view if name else None for name in placed),
        tuple(placement.view if placement else None for placement in made[1:]),
        ctx.placements[lengths].view if lengths else None, given, builder.program(), numbers, precision)
    if any(view.dtype not in FLOATS for view in (spec.gates, *spec.outputs)):
        raise Refused("only floats, or y as uint8, are compiled")
    return [Call(node, spec, tuple(inputs), tuple(placement for placement in made if placement), constants)]


def _wanted(ctx: Context, name: str) -> Placement | None:
    """Where an output lies, if anybody reads it."""
    return ctx.placements[name] if ctx.graph.consumers[name] or name in ctx.graph.outputs else None


def _stored(ctx: Context, y: str) -> tuple[ProgramBuilder, tuple[float, ...]]:
    """The program of h on its way to y."""
    builder = ProgramBuilder(True)
    writer = AffineWriter(builder)
    value = Affine.of(builder.accumulator)
    if quant := ctx.type(y).quant:
        value = writer.requantise(value, quant.scale[0], quant.zero_point[0], 0, 255)
    writer.settle(value)
    return builder, tuple(float(constant[0]) for constant in builder.constants)
