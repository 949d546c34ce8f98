"""Attention on every instruction set: int8 bit for bit, floats close, whatever the shape, the mask and the layout."""
from dataclasses import dataclass

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX512_VNNI, PORTABLE
from infer_server.engines.backends.llvm.kernels.matmul.attention import AttentionKernel
from infer_server.engines.lowering.epilogue.program import ProgramBuilder
from infer_server.engines.lowering.problems.matmul import Attention
from infer_server.engines.lowering.problems.view import View, dense_view
from scripts.testing.suite import check, random_array
from tests.engines.backends.llvm.runner import DynamicRunner
from tests.engines.backends.runners import EVERY_BACKEND, every_float

BATCH = 2
TOLERANCE = {"int8": 0, "fp32": 2e-5, "bf16": 1e-2, "fp16": 2e-3}
STORED = {"int8": "uint8", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Shape:
    heads: int
    queries: int
    keys: int
    depth: int
    width: int
    mask: str = ""          # "", "keys" (a row for all), "full" (one for all heads), "heads" (of all items)
    k_first: bool = False   # k lies [heads, D, T]

    def spec(self, precision, program, stored="", result=""):
        dtype = stored or STORED[precision]
        h, s, t, d, e = self.heads, self.queries, self.keys, self.depth, self.width
        k = turned(dense_view(dtype, (h, d, t)), 0, 2, 1) if self.k_first else split_heads(dtype, t, h, d)
        mask = None
        if self.mask == "keys":
            mask = View("float32", (h, s, t), (0, 0, 4), 4 * t)
        elif self.mask == "full":
            mask = View("float32", (h, s, t), (0, 4 * t, 4), 4 * s * t)
        elif self.mask == "heads":
            mask = View("float32", (h, s, t), (4 * s * t, 4 * t, 4), 0)
        return Attention(split_heads(dtype, s, h, d), k, split_heads(dtype, t, h, e),
                         split_heads(result or dtype, s, h, e), mask, program, precision)


def split_heads(dtype, tokens, heads, depth):
    """Return a view [heads, tokens, depth] of [tokens, heads * depth], itself a third of a wider tensor."""
    whole = dense_view(dtype, (tokens, 3, heads, depth))
    token, _, head, element = whole.strides
    return View(dtype, (heads, tokens, depth), (head, token, element), whole.item)


def turned(view, *axes):
    return View(view.dtype, tuple(view.shape[a] for a in axes), tuple(view.strides[a] for a in axes), view.item)


SHAPES = {
    "16 tokens, 8 deep": Shape(2, 16, 16, 8, 8),
    "nothing a multiple of anything": Shape(3, 13, 41, 15, 15, "keys"),
    "wider than a panel, values wider than keys": Shape(1, 7, 150, 6, 70, "full"),
    "keys transposed in memory": Shape(2, 9, 37, 20, 33, "heads", k_first=True),
    "one query": Shape(2, 1, 70, 16, 16, "keys"),
    "one query, values of several panels": Shape(3, 1, 37, 32, 80),
    "two queries": Shape(2, 2, 20, 48, 16, "full"),
    "a few queries, an odd depth": Shape(2, 3, 61, 21, 35, "full"),
    "a few queries, keys transposed": Shape(1, 2, 39, 12, 9, k_first=True),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def problem(shape, precision, stored="", result=""):
    """Return (spec, inputs, constants)."""
    random = np.random.default_rng(0)
    b = ProgramBuilder(True)
    wide = (result or stored or STORED[precision]) == "uint8"
    b.add("fma", b.accumulator, b.constant(random.uniform(0.5, 1.5, shape.width) * (2 if wide else 1)),
          b.constant(120.0 if wide else 0.0))
    spec = shape.spec(precision, b.program(), stored, result)
    inputs = [random_array(random, view.dtype, (BATCH, *view.shape)) for view in spec.inputs]
    bytes_in = spec.q.dtype == "uint8"
    zeros = [117.0, 130.0, 125.0] if bytes_in else [0.0] * 3
    scale = (0.0005 if bytes_in else 0.7) / shape.depth ** 0.5
    constants = {"numbers": [scale, *zeros], "program": b.constants}
    if shape.mask:
        kept = {"keys": np.s_[:, :1, :1], "full": np.s_[:, :1], "heads": np.s_[:1]}[shape.mask]
        rows = np.where(inputs[3][kept] < -1, -1e4, 0).astype(np.float32)
        inputs[3] = np.broadcast_to(rows, inputs[3].shape)
    return spec, inputs, constants


@EVERY_BACKEND
@EVERY_SHAPE
def test_attention_of_bytes_equals_its_reference_bit_for_bit(shape, runner):
    spec, inputs, constants = problem(shape, "int8")
    assert spec.reference(inputs, constants)[0].std() > 5       # not all alike
    check(spec, runner, inputs, constants, pieces=2, slack=4)


@every_float(SHAPES)
def test_attention_of_floats_agrees_with_its_reference(shape, precision, runner):
    spec, inputs, constants = problem(shape, precision, result="float32")
    check(spec, runner, inputs, constants, TOLERANCE[precision], pieces=2, slack=4)


@pytest.mark.parametrize("isa", [AVX512_VNNI, PORTABLE], ids=lambda isa: isa.name)
def test_a_mask_is_read_at_most_a_vector_past_its_end_if_its_extent_is_dynamic(isa):
    """A panel of four vectors may have one key."""
    spec, inputs, constants = problem(Shape(2, 20, 65, 8, 8, "full"), "int8")
    for tactic in AttentionKernel(spec).tactics(isa):
        check(spec, DynamicRunner(isa), inputs, constants, tactic=tactic, slack=4)


@EVERY_BACKEND
def test_a_few_queries_that_see_nothing_see_zeros(runner):
    spec, inputs, constants = problem(SHAPES["two queries"], "fp32")
    inputs[3] = inputs[3].copy()
    inputs[3][:, :, 1] = -np.inf
    check(spec, runner, inputs, constants, TOLERANCE["fp32"], pieces=2, slack=4)


@EVERY_BACKEND
@pytest.mark.parametrize("precision, zero", [("int8", 125 - 128), ("fp32", 0)])
def test_a_query_that_may_look_at_nothing_sees_zeros(precision, zero, runner):
    """The int8 program is given means less 128; that of real zeros is their zero point less 128."""
    spec, inputs, constants = problem(SHAPES["wider than a panel, values wider than keys"], precision)
    inputs[3] = inputs[3].copy()
    inputs[3][:, :, 2] = -np.inf
    offset = 10
    result, = spec.reference(inputs, {**constants, "program": [np.ones(1, np.float32), np.float32([offset])]})
    assert (result[:, :, 2] == offset + zero).all() and (result[:, :, 3] != offset + zero).any()
    check(spec, runner, inputs, constants, TOLERANCE[precision], pieces=2, slack=4)
