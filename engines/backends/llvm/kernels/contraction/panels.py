"""Panels of output channels (couts), by which all kernels of a contraction pack their weights.

A panel has as many vectors of couts as a micro-kernel accumulates for a pixel; the last one of a group may have fewer.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.kernel import pack_channels
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.problem import Array


def cout_panels(problem: Contraction, isa: Isa, vectors: int) -> list[Array]:
    """Return for each panel [vector][lane] -> cout among all groups; lanes without a cout have one past the last."""
    panels, width = [], vectors * isa.lanes
    for group in range(problem.groups):
        for start in range(0, problem.cout, width):
            lanes = Lanes(isa, min(width, problem.cout - start), problem.y.dtype == "uint8")
            order = np.asarray(lanes.order())
            absolute = order + group * problem.cout + start
            panels.append(np.where(order < lanes.channels, absolute, problem.y.shape[-1]))
    return panels


def pack_program(problem: Contraction, panels: Sequence[Array], constants: Mapping[str, Any]) -> Array:
    """Pack the program's constants as [panel][constant][vector][lane]."""
    return pack_channels(constants["program"], problem.y.shape[-1], [panel.tolist() for panel in panels])


def rows_with_zeros(rows: Array) -> Array:
    """Append a row of zeros to rows of one cout each, for lanes without a cout."""
    return np.concatenate([rows, np.zeros_like(rows[:1])])
