"""Rule for Recurrence: the cells of an LSTM, GRU or RNN, whose input projection is another node."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Array, Node
from infer_server.engines.ir.grid import grid_params
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, lowers
from infer_server.engines.lowering.calls.placement import Placement
from infer_server.engines.lowering.epilogue.affine import Affine, AffineWriter
from infer_server.engines.lowering.epilogue.program import ProgramBuilder
from infer_server.engines.lowering.problems.recurrence import (
    Cell,
    Recurrence,
    crowded_units,
    integer_precision,
    integer_weights,
)
from infer_server.engines.lowering.problems.view import FLOATS, View
from infer_server.engines.lowering.rules.cells import bounded, cell_of
from infer_server.engines.ops.recurrent import directions

FEW = 8                 # crowded units are few up to one in FEW


@lowers("Recurrence")
def lower_recurrence(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    gates, r, bias, peepholes, lengths, *states = (*node.inputs, *("",) * (7 - len(node.inputs)))
    cells = _cells(node, len(ctx.constant(r)), bool(peepholes))
    kept = cells[0].kept
    given = {slot: _first(ctx, name) for slot, name in enumerate(states[:kept]) if name in ctx.graph.constants}
    firsts = [ctx.placements[name] if name and slot not in given else None for slot, name in enumerate(states[:kept])]
    ends = _lengths(ctx, lengths) if lengths else None
    precision, constants = _weights(ctx, node, r, bounded(node) and not any(states[:kept]))
    units = [ctx.constant(bias)] if bias else []
    units += np.split(ctx.constant(peepholes), 3, axis=1) if peepholes else []
    constants |= {"units": units, "first": list(given.values())}
    y, *lasts = ([_used_output(ctx, name) for name in node.outputs] + [None] * kept)[:1 + kept]
    builder, numbers = _stored(ctx, node.outputs[0])
    problem = Recurrence(
        ctx.placements[gates].view, ctx.constant(r).shape[2], cells, directions(node), _view(y),
        tuple(map(_view, firsts)), tuple(map(_view, lasts)),
        _view(ends), tuple(given), builder.program(), numbers, precision,
        _rounds(node), _crowded(constants["weights"]) if _rounds(node) else None)
    if any(view.dtype not in FLOATS for view in (problem.gates, *problem.outputs)):
        raise Refused("only floats, or y as uint8, are compiled")
    inputs = tuple(placement for placement in (ctx.placements[gates], *firsts, ends) if placement)
    return [ProblemCall(node, problem, inputs, tuple(placement for placement in (y, *lasts) if placement), constants)]


def _cells(node: Node, count: int, peepholes: bool) -> tuple[Cell, ...]:
    """Return the cell of each direction."""
    try:
        return tuple(cell_of(node, direction, peepholes) for direction in range(count))
    except NotImplementedError as reason:
        raise Refused(str(reason)) from reason


def _first(ctx: Context, name: str) -> Array:
    """Return a constant initial state, one row for all items."""
    rows = ctx.constant(name)
    if len(np.unique(rows, axis=0)) > 1:
        raise Refused("its initial states are constants that differ between items")
    return np.asarray(rows[0])


def _lengths(ctx: Context, name: str) -> Placement:
    """Return the placement of the items' sequence lengths."""
    if name in ctx.graph.constants:
        raise Refused("its sequence lengths are constants")
    if ctx.type(name).dtype != np.int32:
        raise Refused("only lengths of int32 are compiled")
    return ctx.placements[name]


def _weights(ctx: Context, node: Node, name: str, integers: bool) -> tuple[str, dict[str, Any]]:
    """Return the precision of the products and the weights in it. integers: the states allow integer products."""
    weights = ctx.constant(name)
    if _rounds(node):
        return "int8", _bytes(weights)
    if node.precision == "fp32" or not integers:
        return "fp32", {"weights": weights}
    precision = integer_precision(weights) if node.precision == "int8" else "int16"
    rounded, scales = integer_weights(weights, precision)
    return precision, {"weights": rounded, "scales": scales}


def _rounds(node: Node) -> bool:
    """Return True if the model quantises the state before each step."""
    return bool(node.attrs.get("rounds_state"))


def _crowded(weights: Array) -> int | None:
    """Return the number of crowded units if multiplying them separately is cheap, else None."""
    count = len(crowded_units(weights))
    return count if count * FEW <= weights.shape[2] else None


def _bytes(weights: Array) -> dict[str, Any]:
    """Recover int8 weights [D, G H, H] and their scales."""
    rows = weights.reshape(-1, weights.shape[2])
    if (quant := grid_params(rows, 0)) is None:
        raise Refused("its recurrent weights are not symmetric int8")
    scales = np.array(quant.scale, np.float32)
    whole = np.rint(rows / scales[:, None]).astype(np.int8)
    return {"weights": whole.reshape(weights.shape), "scales": scales.reshape(weights.shape[:2])}


def _view(placement: Placement | None) -> View | None:
    return placement.view if placement else None


def _used_output(ctx: Context, name: str) -> Placement | None:
    """Return the placement of an output, or None if it is unused."""
    return ctx.placements[name] if ctx.graph.consumers[name] or name in ctx.graph.outputs else None


def _stored(ctx: Context, y: str) -> tuple[ProgramBuilder, tuple[float, ...]]:
    """Return the program from h to y."""
    builder = ProgramBuilder(True)
    writer = AffineWriter(builder)
    value = Affine.of(builder.accumulator)
    if quant := ctx.type(y).quant:
        value = writer.requantise(value, quant.scale[0], quant.zero_point[0], 0, 255)
    writer.settle(value)
    return builder, tuple(float(constant[0]) for constant in builder.constants)
