"""An operator's traits hold for what it computes, and are consistent with each other."""
from __future__ import annotations

import inspect
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from infer_server.engines.ir.graph import Node
from infer_server.engines.ops import OPS, Stored, op_of
from infer_server.engines.ops.pointwise import Pointwise
from infer_server.engines.ops.reduction import Reduction

RANDOM = np.random.default_rng(0)
X = RANDOM.permutation(24).reshape(2, 3, 4).astype(np.float32)
AXIS: dict[str, Any] = {"axis": 1}
# Operator -> attributes, and inputs; every one that moves elements or works along axes has a line.
SAMPLES: dict[str, tuple[Any, ...]] = {
    "Identity": ({}, X), "Concat": (AXIS, X, X + 24), "Split": ({"axis": 2, "split": (1, 3)}, X),
    "Slice": ({"axes": (2, 0), "starts": (3, 0), "ends": (0, 1), "steps": (-1, 1)}, X),
    "Pad": ({"pads": (0, 1, 2, 1, 0, 0)}, X), "Tile": ({"repeats": (1, 2, 3)}, X),
    "Expand": ({"shape": (2, 5, 4)}, X[:, :1]), "Gather": (AXIS, X, np.array([2, 0])),
    "Softmax": (AXIS, X), "LogSoftmax": (AXIS, X), "LpNormalization": (AXIS, X), "CumSum": (AXIS, X),
    "CumProd": (AXIS, X / 9),
    "TopK": ({"axis": 2, "k": 2}, X), "ArgMax": (AXIS, X), "ArgMin": (AXIS, X),
    **{name: ({"axes": (0, 2)}, X) for name, op in OPS.items() if issubclass(op, Reduction)},
    "Reshape": ({"shape": (4, 6)}, X), "Flatten": (AXIS, X), "Squeeze": ({"axes": (0,)}, X[:1]),
    "Unsqueeze": ({"axes": (1,)}, X), "Transpose": ({"perm": (2, 0, 1)}, X),
    "GatherElements": (AXIS, X, np.array([[[2, 0, 1, 1]], [[0, 0, 2, 1]]])),
    "DepthToSpace": ({"blocksize": 2}, X.reshape(1, 4, 2, 3)),
    "SpaceToDepth": ({"blocksize": 2}, X.reshape(1, 1, 4, 6)),
}
ALONG = [name for name, op in OPS.items() if op.along is not None and not op.pointwise]
MOVING = [name for name, op in OPS.items() if op.moves]
BINARY = [name for name, op in OPS.items() if issubclass(op, Pointwise) and name not in ("Cast", "BitCast") and (
    op.formula.nin if isinstance(op.formula, np.ufunc) else
    sum(p.default is p.empty for p in inspect.signature(op.formula).parameters.values())) == 2]


def results(name: str, attrs: Any, *arrays: Any) -> tuple[Any, ...]:
    return OPS[name].reference(Node(name, tuple("abc"[:len(arrays)]), ("y",), attrs), *arrays)


@pytest.mark.parametrize("name", ALONG)
def test_axes_that_are_renumbered_give_the_result_with_its_axes_moved(name: str) -> None:
    attrs, *arrays = SAMPLES[name]
    expected = results(name, attrs, *arrays)
    for perm in permutations(range(3)):
        turned = [array.transpose(perm) if array.ndim == 3 else array for array in arrays]
        moved = OPS[name].renumbered(Node(name, ("x",), ("y",), attrs), 3, perm.index)
        for made, wanted in zip(results(name, moved, *turned), expected, strict=True):
            np.testing.assert_allclose(made, wanted.transpose(perm), rtol=1e-6)


@pytest.mark.parametrize("name", ALONG)
def test_what_reduces_loses_its_axes_and_what_does_not_keeps_the_rank(name: str) -> None:
    attrs, *arrays = SAMPLES[name]
    made = results(name, {**attrs, "keepdims": 0}, *arrays)
    axes = OPS[name].axes(Node(name, ("x",), ("y",), attrs), 3) if OPS[name].reduces else ()
    assert {result.ndim for result in made} == {3 - len(axes)}
    assert not axes or made[0].shape == tuple(extent for axis, extent in enumerate(X.shape) if axis not in axes)


@pytest.mark.parametrize("name", MOVING)
def test_what_moves_elements_makes_none(name: str) -> None:
    attrs, *arrays = SAMPLES[name]
    node = Node(name, tuple("abc"[:len(arrays)]), ("y",), attrs)
    data = [array for array, source in zip(arrays, node.inputs, strict=True) if source in OPS[name].data(node)]
    assert all(np.isin(made, data).all() for made in results(name, attrs, *arrays))


@pytest.mark.parametrize("name", BINARY)
def test_an_operator_is_commutative_if_its_inputs_can_be_swapped(name: str) -> None:
    a, b = (RANDOM.integers(1, 9, 64) for _ in range(2))
    swaps = all(np.array_equal(x, y) for x, y in zip(results(name, {}, a, b), results(name, {}, b, a), strict=True))
    assert OPS[name].commutative == swaps


@pytest.mark.parametrize("name", OPS)
def test_the_traits_of_an_operator_fit_each_other(name: str) -> None:
    op = OPS[name]
    assert isinstance(op.stored, Stored)
    assert op.along in (None, "", "axis", "axes", "pads", "repeats", "shape")
    assert not op.commutative or name in BINARY
    assert not op.epilogue or op.pointwise
    assert op.output_axis is None or op.anchor
    assert not (op.anchor or op.epilogue) or op.stored is Stored.CONVERTED
    assert not op.reduces or op.along in ("axis", "axes")
    assert not op.pointwise or op.along == ""


def test_of_an_operator_that_is_not_ours_nothing_is_taken_for_granted() -> None:
    op, node = op_of("NonMaxSuppression"), Node("NonMaxSuppression", ("x",), ("y",))
    assert (op.along, op.output_axis, op.stored, op.data(node)) == (None, None, Stored.FLOAT, ())
    assert not any((op.pointwise, op.commutative, op.moves, op.reduces, op.anchor, op.epilogue))
