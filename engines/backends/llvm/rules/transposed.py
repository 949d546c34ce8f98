"""ConvTranspose -> a Contraction for each phase of the output."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engines.backends.llvm.calls import Call, Context, Refused, broadcast, image, lowers, write_body
from engines.backends.llvm.kernels.contraction import Contraction
from engines.backends.llvm.places import Place
from engines.backends.llvm.rules.contraction import accumulator_of
from engines.backends.llvm.transposed import Phase, phases
from engines.ir import Node


@lowers("ConvTranspose")
def lower_conv_transpose(ctx: Context, node: Node) -> Sequence[Call]:
    conv = node.anchor
    weights = ctx.constant(conv.inputs[1])          # [cin, cout, rows, columns]
    grouped, dilated = conv.attrs.get("group", 1) != 1, set(conv.attrs.get("dilations") or (1,)) != {1}
    if not conv.attrs.get("channels_last") or grouped or dilated:
        raise Refused("only a 2-D transposed convolution in NHWC, without groups or dilation, is compiled")
    rows, columns = phases(ctx.graph, conv)
    if not all(phase.taps for phase in (*rows, *columns)):
        raise Refused("its kernel is smaller than its stride")
    return [_phase(ctx, node, weights[:, :, row.taps][..., column.taps].swapaxes(0, 1), row, column)
            for row in rows for column in columns]


def _phase(ctx: Context, node: Node, weights: np.ndarray[tuple[int, ...], np.dtype[np.generic]], row: Phase,
           column: Phase) -> Call:
    conv, output = node.anchor, node.outputs[0]
    written = write_body(ctx, node, accumulator_of(ctx, conv, weights.sum(axis=(1, 2, 3), dtype=np.float64)))
    x = ctx.places[conv.inputs[0]].moved(row.first, column.first, 0)
    reach = (row.end - row.first, column.end - column.first, x.view.shape[2])
    x = replace(x, view=replace(x.view, shape=reach))
    y = _part(ctx.places[output], row, column)
    others = [_part(replace(ctx.places[name], view=image(broadcast(ctx, name, output))), row, column)
              for name in written.operands]
    spec = Contraction(x.view, y.view, tuple(place.view for place in others), written.program, node.precision,
                       (len(row.taps), len(column.taps)))
    return Call(node, spec, (x, *others), (y,), {"weights": weights, "program": written.constants})


def _part(place: Place, row: Phase, column: Phase) -> Place:
    """The pixels of a phase."""
    height, width, _ = place.view.shape
    return place.part(0, row.start, height, row.step).part(1, column.start, width, column.step)
