"""Class probabilities from the probabilities between pairs of classes."""
from __future__ import annotations

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ops.items import ItemAxes, only_first, untouched_axis
from infer_server.engines.ops.op import Inputs, Op, Types

SWEEPS, ERROR = 100, 0.005          # most sweeps; bound on the gradient times the number of classes


class PairwiseCoupling(Op):
    """Class probabilities that agree best with r, where r[n, i, j] is the probability of i given i or j.

    r float32 [N, classes, classes], diagonal ignored -> [N, classes]. It stops where ONNX Runtime does.

    References
    ----------
    Wu, Lin and Weng, "Probability Estimates for Multi-class Classification by Pairwise Coupling", 2004, second method.
    """

    @classmethod
    def types(cls, node: Node, r: TensorType) -> Types:
        if len(r.shape) != 3 or r.shape[1] != r.shape[2]:
            raise GraphError("the input must be probabilities of pairs, [N, classes, classes]")
        return (TensorType(r.dtype, r.shape[:2]),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        r = inputs[0]
        assert r is not None
        return (untouched_axis(r.shape, only_first(axes), (1, 2), "couples"),)

    @classmethod
    def compute(cls, node: Node, r: Array) -> Array:
        classes = r.shape[1]
        pairs = np.where(np.eye(classes, dtype=bool), 0, r).astype(r.dtype)
        against = pairs.transpose(0, 2, 1)
        gradient = -against * pairs
        gradient[:, range(classes), range(classes)] = (against ** 2).sum(axis=2)
        p = np.full(r.shape[:2], 1 / classes, r.dtype)
        rows = np.arange(len(r))        # rows that have not converged yet
        for _ in range(SWEEPS):
            slope = np.einsum("nij,nj->ni", gradient[rows], p[rows])
            error = np.abs(slope - (p[rows] * slope).sum(axis=1, keepdims=True)).max(axis=1, initial=0)
            rows, slope = rows[error >= ERROR / classes], slope[error >= ERROR / classes]
            if not rows.size:
                break
            p[rows] = _swept(gradient[rows], p[rows], slope)
        return p


def _swept(gradient: Array, p: Array, slope: Array) -> Array:
    """Do one Newton step per class and renormalise; `slope` is gradient @ p."""
    whole = (p * slope).sum(axis=1, keepdims=True)
    for one in range(p.shape[1]):
        own = gradient[:, one, one, None]
        step = (whole - slope[:, one, None]) / own
        whole = (whole + step * (step * own + 2 * slope[:, one, None])) / (1 + step) ** 2
        slope = (slope + step * gradient[:, one]) / (1 + step)
        p[:, one] += step[:, 0]
        p = p / (1 + step)
    return p
