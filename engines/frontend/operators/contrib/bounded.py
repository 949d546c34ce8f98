"""Operators that replace ONNX's data-dependent selections in programs: an upper bound of rows, and a count."""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from infer_server.engines.frontend.operators.extension import StandardNodeBuilder, extension
from infer_server.engines.frontend.operators.normalise import OperatorCall
from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.shapes import fixed

DOMAIN = "engines"


@extension(DOMAIN, "BoundedNonMaxSuppression", "boxes:F scores:F most:L? overlap:F? least:F?", "center_point_box=0",
           outputs=2)
def _suppression(call: OperatorCall) -> list[Node]:
    w, (boxes,) = StandardNodeBuilder(call), fixed(call.type().shape[1:2])
    most, overlap, least = (
        call.node.inputs[index] if call.has(index) else w.constant(np.array([value], dtype))
        for index, value, dtype in ((2, 0, np.int64), (3, 0, np.float32), (4, -np.inf, np.float32)))
    told = call.values[2] if call.has(2) else np.zeros(1, np.int64)
    limit = boxes if told is None else min(max(int(told.reshape(-1)[0]), 0), boxes)
    attrs = {**call.keep("center_point_box"), "limit": max(limit, 1)}
    return [*w.nodes, replace(call.node, inputs=(*call.node.inputs[:2], most, overlap, least), attrs=attrs)]
