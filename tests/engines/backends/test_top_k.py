import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import PORTABLE
from infer_server.engines.backends.llvm.kernels.elementwise.top_k import BLOCK, MOST_KEYS
from infer_server.engines.ir.graph import Node
from infer_server.engines.lowering.problems.elementwise import TopK
from infer_server.engines.lowering.problems.view import dense_view
from infer_server.engines.ops import OPS
from scripts.testing.suite import check, gapped, run
from tests.engines.backends.llvm.runner import CpuRunner
from tests.engines.backends.runners import EVERY_WIDTH

ITEMS = 2


def spec_of(shape, k, largest=True):
    outer = shape[:-1]
    return TopK(gapped("float32", shape), dense_view("float32", (*outer, k)), gapped("int64", (*outer, k)), largest)


def draw(shape, kinds):
    """Draw random numbers with `kinds` distinct values."""
    return np.random.default_rng(0).integers(-kinds, kinds, (ITEMS, *shape)).astype(np.float32) / 8


@EVERY_WIDTH
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("shape, k", [((3, 5), 5), ((37,), 3), ((2, BLOCK), 1), ((3, 3 * BLOCK + 17), 1),
                                      ((3 * BLOCK + 17,), 40), ((BLOCK * BLOCK + 70,), 9)])
@pytest.mark.parametrize("kinds", [3, 1000], ids=["many equals", "few equals"])
def test_the_k_come_in_order_and_equals_in_the_order_of_their_places(kinds, shape, k, largest, runner):
    spec, x = spec_of(shape, k, largest), draw(shape, kinds)
    check(spec, runner, [x], {}, pieces=2)
    node = Node("TopK", ("x",), ("v", "i"), {"k": k, "axis": -1, "largest": int(largest)})
    for mine, expected in zip(spec.reference([x], {}), OPS["TopK"].reference(node, x), strict=True):
        np.testing.assert_array_equal(mine, expected)


@EVERY_WIDTH
@pytest.mark.parametrize("largest", [True, False])
def test_infinities_and_both_zeros_are_numbers_like_others(largest, runner):
    x = np.array([[0, -np.inf, -0.0, np.inf, 1e-40, -np.inf, np.inf, -1e-40, -0.0, 0]], np.float32)
    check(spec_of((10,), 10, largest), runner, [np.repeat(x, ITEMS, 0)], {})


@EVERY_WIDTH
@pytest.mark.parametrize("largest", [True, False])
def test_integers_are_ordered_too_and_places_alone_are_an_answer(largest, runner):
    x = np.random.default_rng(0).integers(-(1 << 31) + 1, 1 << 31, (ITEMS, 3, 70)).astype(np.int32)
    x[:, 0, 5] = np.iinfo(np.int32).max
    spec = TopK(dense_view("int32", (3, 70)), None, dense_view("int64", (3, 1)), largest)
    check(spec, runner, [x], {}, pieces=2)
    np.testing.assert_array_equal(spec.reference([x], {})[0][..., 0], (np.argmax if largest else np.argmin)(x, -1))


@EVERY_WIDTH
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 40])
@pytest.mark.parametrize("dtype", ["int64", "float64", "uint32"])
def test_what_differs_in_bits_that_others_have_not_is_ordered(dtype, k, largest, runner):
    x = np.random.default_rng(0).integers(0, 9, (ITEMS, 3, 70))
    x = x + (2 ** 53 + 2 ** 59 if dtype == "int64" else 2 ** 31) if dtype != "float64" else 1 + x * 2.0 ** -50
    spec = TopK(gapped(dtype, (3, 70)), dense_view(dtype, (3, k)), dense_view("int64", (3, k)), largest)
    check(spec, runner, [x.astype(dtype)], {}, pieces=2)
    order = np.argsort(-x if largest else x, -1, kind="stable")
    np.testing.assert_array_equal(spec.reference([x.astype(dtype)], {})[1], order[..., :k])


@EVERY_WIDTH
def test_a_few_are_found_in_rows_too_wide_for_their_keys_to_be_kept(runner):
    width = MOST_KEYS + BLOCK + 5
    x = np.random.default_rng(0).integers(-width, width, (ITEMS, width)).astype(np.float32)
    x[0, [3, width // 2, width - 1]] = x[1, width - 4] = 2 * width
    check(spec_of((width,), 70), runner, [x], {})


def test_a_wrong_order_is_caught():
    x = draw((20,), 1000)
    got, _ = run(spec_of((20,), 4), CpuRunner(PORTABLE), [x], {})
    assert (got != spec_of((20,), 4, largest=False).reference([x], {})[0]).any()
