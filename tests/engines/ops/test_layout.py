"""Operators on images give equal results in both layouts."""
import numpy as np
import pytest

from infer_server.engines.ir.graph import Node, type_of
from infer_server.engines.ops import OPS

WINDOW = {"kernel_shape": (3, 3), "pads": (1, 0, 1, 1), "strides": (2, 1), "dilations": (1, 1)}
CASES = {
    "Conv": ({**WINDOW, "group": 2}, (6, 2, 3, 3)),
    "ConvTranspose": ({**WINDOW, "group": 1}, (4, 3, 3, 3)),
    "MaxPool": (WINDOW, None),
    "AveragePool": (WINDOW, None),
    "GlobalAveragePool": ({}, None),
    "GlobalMaxPool": ({}, None),
    "LRN": ({"size": 3}, None),
    "Resize": ({"scales": (1.0, 1.0, 2.0, 1.5), "mode": "linear"}, None),
    "DepthToSpace": ({"blocksize": 2}, None),
    "SpaceToDepth": ({"blocksize": 2}, None),
}


@pytest.mark.parametrize("op", CASES)
def test_channels_last_is_the_transposed_result(op):
    attrs, weights = CASES[op]
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 4, 6, 8)).astype(np.float32)
    rest = [] if weights is None else [random.standard_normal(weights).astype(np.float32)]
    names = ("x", "w")[:1 + len(rest)]
    first, last = Node(op, names, ("y",), attrs), Node(op, names, ("y",), {**attrs, "channels_last": 1})
    expected = OPS[op].reference(first, x, *rest)[0]
    turned = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    result = OPS[op].reference(last, turned, *rest)[0]
    np.testing.assert_array_equal(result.transpose(0, 3, 1, 2), expected)
    assert OPS[op].infer(first, [type_of(x), *map(type_of, rest)])[0] == type_of(expected)
    assert OPS[op].infer(last, [type_of(turned), *map(type_of, rest)])[0] == type_of(result)
