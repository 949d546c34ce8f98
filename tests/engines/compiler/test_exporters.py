"""Constructs of today's exporters, as small models: compiled without a fallback, equal to ONNX's reference."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from tests.engines.compiler.zoo_engines import engine_of, fallbacks, relative_error

TOLERANCE = 2e-5        # relative to the largest value: float32 sums in another order
ITEMS = 3
VOCABULARY = 40


# y = row `last` of each item
ROW_OF_EACH = """
        zero = Constant<value = int64 {0}>()  shape = Shape<start = 0, end = 1>(x)  size = Squeeze(shape)
        items = Range(zero, size, one)  n = Unsqueeze(items, axis)  place = Unsqueeze(last, axis)
        pairs = Concat<axis = -1>(n, place)  y = GatherND(x, pairs)"""
# name: (inputs, output, opset, nodes, shapes of constants drawn at random); "ids" are numbers of tokens, "seen" a mask
CASES: dict[str, tuple[str, str, int, str, dict[str, tuple[int, ...]]]] = {
    "positions counted in the tokens that are none of padding, as in RoBERTa": (
        "int64[N,8] ids", "float[N,8,6] y", 17, """
        one = Constant<value = int64 {1}>()
        padding = Equal(ids, one)  not_padding = Not(padding)  mask = Cast<to = 6>(not_padding)
        sums = CumSum(mask, one)  counted = Mul(sums, mask)  wide = Cast<to = 7>(counted)
        positions = Add(wide, one)  y = Gather(table, positions)""", {"table": (20, 6)}),
    "token types looked up by position": (
        "int64[N,8] ids", "float[N,8,6] y", 17, """
        types = Constant<value = int64[1,9] {0,0,0,0,0,0,0,0,0}>()  shape = Shape<start = 0, end = 1>(ids)
        nine = Constant<value = int64[1] {9}>()  size = Concat<axis = 0>(shape, nine)  every = Expand(types, size)
        limit = Constant<value = int64 {8}>()  one = Constant<value = int64 {1}>()  less = Less(ids, limit)
        places = Cast<to = 7>(less)  picked = GatherElements<axis = 1>(every, places)
        rows = Gather(table, picked)  words = Gather(table, ids)  y = Add(rows, words)""", {"table": (VOCABULARY, 6)}),
    "a mask looked up by pairs of item and key": (
        "float[N,4,8,6] q, int64[N,8] seen", "float[N,4,8,6] y", 23, """
        mask = Cast<to = 9>(seen)  zero = Constant<value = int64 {0}>()  one = Constant<value = int64 {1}>()
        shape = Shape<start = 0, end = 1>(seen)  scalar = Squeeze(shape)  items = Range(zero, scalar, one)
        apart = Constant<value = int64[3] {1,2,3}>()  n = Unsqueeze(items, apart)
        keys = Constant<value = int64[1,1,1,8] {0,1,2,3,4,5,6,7}>()  like = Max(n, keys)  size = Shape(like)
        last = Constant<value = int64[1] {-1}>()  wide_n = Expand(n, size)  ns = Unsqueeze(wide_n, last)
        wide_keys = Expand(keys, size)  ks = Unsqueeze(wide_keys, last)  pairs = Concat<axis = -1>(ns, ks)
        both = GatherND(mask, pairs)  y = Attention<scale = 0.4>(q, q, q, both)""", {}),
    "the last token of each item": (
        "float[N,8,6] x, int64[N,8] seen", "float[N,6] y", 17, f"""
        axis = Constant<value = int64[1] {{1}}>()  count = ReduceSum<keepdims = 0>(seen, axis)
        one = Constant<value = int64 {{1}}>()  last = Sub(count, one)  {ROW_OF_EACH}""", {}),
    "the last token of each item, looked up in a flat tensor": (
        "float[N,8,6] x, int64[N,8] seen", "float[N,6] y", 17, """
        axis = Constant<value = int64[1] {1}>()  count = ReduceSum<keepdims = 0>(seen, axis)
        one = Constant<value = int64 {1}>()  last = Sub(count, one)  zero = Constant<value = int64 {0}>()
        shape = Shape<start = 0, end = 1>(x)  size = Squeeze(shape)  items = Range(zero, size, one)
        eight = Constant<value = int64 {8}>()  starts = Mul(items, eight)  places = Add(last, starts)
        rows = Constant<value = int64[2] {-1, 6}>()  flat = Reshape(x, rows)  y = Gather(flat, places)""", {}),
    "the token with the highest number, as in CLIP": (
        "float[N,8,6] x, int64[N,8] ids", "float[N,6] y", 17, f"""
        axis = Constant<value = int64[1] {{1}}>()  one = Constant<value = int64 {{1}}>()
        numbers = Cast<to = 6>(ids)  last = ArgMax<axis = 1, keepdims = 0>(numbers)  {ROW_OF_EACH}""", {}),
    "the highest scores and where they were": (
        "float[N,40] x", "float[N,5] y", 17, """
        k = Constant<value = int64[1] {5}>()  eight = Constant<value = int64 {8}>()  scores, places = TopK(x, k)
        class = Mod(places, eight)  box = Div(places, eight)  code = Add(class, box)
        number = Cast<to = 1>(code)  y = Add(number, scores)""", {}),
    "attention of heads that share keys, in one tensor": (
        "float[N,5,24] q, float[N,7,8] k, float[N,7,12] v, float[5,7] mask", "float[N,5,36] y", 23,
        "y = Attention<q_num_heads = 6, kv_num_heads = 2, is_causal = 1>(q, k, v, mask)", {}),
    "attention with a past and a cap": (
        "float[N,4,5,8] q, float[N,4,5,8] k, float[N,4,5,8] v, float[N,4,3,8] pk, float[N,4,3,8] pv",
        "float[N,4,5,8] y", 23, """
        y, keys, values = Attention<softcap = 2.0, is_causal = 1>(q, k, v, , pk, pv)""", {}),
    "rotary embeddings": (
        "float[N,4,8,6] q", "float[N,4,8,6] y", 23, "y = RotaryEmbedding(q, cos, sin)",
        {"cos": (1, 8, 3), "sin": (1, 8, 3)}),
    "norms by root mean square": (
        "float[N,8,30] x", "float[N,8,30] y", 23, "y = RMSNormalization<axis = -1>(x, scale)", {"scale": (30,)}),
    "norms of groups": (
        "float[N,12,4,5] x", "float[N,12,4,5] y", 21, "y = GroupNormalization<num_groups = 3>(x, scale, bias)",
        {"scale": (12,), "bias": (12,)}),
    "places relative to each other, as in DeBERTa": (
        "float[N,4,8,6] q", "float[N,4,8,8] y", 17, """
        near = MatMul(q, places)  shape = Shape<start = 0, end = 2>(q)
        size = Constant<value = int64[2] {8,8}>()  every = Concat<axis = 0>(shape, size)
        indices = Expand(index, every)  y = GatherElements<axis = 3>(near, indices)""",
        {"places": (1, 4, 6, 16), "index": (1, 1, 8, 8)}),
    "tokens before items, as torch's attention has its result": (
        "float[N,8,12] x", "float[N,8,12] y", 17, """
        four = Constant<value = int64[4] {0,8,3,4}>()  heads = Reshape(x, four)
        turned = Transpose<perm = [0,2,1,3]>(heads)  back = Transpose<perm = [2,0,1,3]>(turned)
        flat = Constant<value = int64[2] {-1,12}>()  rows = Reshape(back, flat)
        product = Gemm<transB = 1>(rows, weight)  like = Shape<start = 0, end = 1>(x)
        eight = Constant<value = int64[1] {8}>()  width = Constant<value = int64[1] {12}>()
        shape = Concat<axis = 0>(eight, like, width)  apart = Reshape(product, shape)
        normal = LayerNormalization(apart, scale)  items = Transpose<perm = [1,0,2]>(normal)  y = Add(items, x)""",
        {"weight": (12, 12), "scale": (12,)}),
    "a mean over the height of lines of text": (
        "float[N,6,4,9] x", "float[N,9,6] y", 18, """
        image = Conv<kernel_shape = [1,1]>(x, weight)  last = Transpose<perm = [0,2,3,1]>(image)
        axis = Constant<value = int64[1] {1}>()  y = ReduceMean<keepdims = 0>(last, axis)""", {"weight": (6, 6, 1, 1)}),
    "token types as one-hot rows, as TensorFlow's BERT writes them": (
        "int64[N,8] ids", "float[N,8,6] y", 13, """
        depth = Constant<value = int64 {9}>()  values = Constant<value = float[2] {0.0,1.0}>()
        two = Constant<value = int64 {2}>()  low = Sub(ids, two)  hot = OneHot<axis = -1>(low, depth, values)
        flat = Constant<value = int64[2] {-1,9}>()  rows = Reshape(hot, flat)  product = MatMul(rows, table)
        shape = Constant<value = int64[3] {-1,8,6}>()  y = Reshape(product, shape)""", {"table": (9, 6)}),
    "bytes as one-hot rows, and a signal along the height of its picture, as jax2tf writes them": (
        "int64[N,8] ids", "float[N,6,3,1] y", 15, """
        last = Constant<value = int64[1] {2}>()  apart = Unsqueeze(ids, last)
        numbers = Constant<value = int64[1,1,5] {0,1,2,3,4}>()  equal = Equal(apart, numbers)
        hot = Cast<to = 1>(equal)  rows = MatMul(hot, table)  pictures = Unsqueeze(rows, last)
        signal = Transpose<perm = [0,3,1,2]>(pictures)
        c = Conv<kernel_shape = [3,1], pads = [1,0,1,0], strides = [2,1]>(signal, w, bias)  r = Relu(c)
        d = Conv<kernel_shape = [2,1], group = 6, dilations = [2,1], pads = [1,0,0,0]>(r, v)
        y = Add(d, more)""", {"table": (5, 6), "w": (6, 6, 3, 1), "v": (6, 1, 2, 1), "bias": (6,), "more": (6, 3, 1)}),
    "one-hot columns with values of their own": (
        "int64[N,8] ids, float[2] values", "float[N,4,8] y", 13, """
        depth = Constant<value = int32 {4}>()  hot = OneHot<axis = 1>(ids, depth, values)  y = Neg(hot)""", {}),
    "generalised means of pictures, as in GeM, and other powers": (
        "float[N,6,4,5] x", "float[N,6,1,1] y", 17, """
        least = Constant<value = float {1e-6}>()  three = Constant<value = float {3.0}>()
        third = Constant<value = float {0.333333}>()  positive = Clip(x, least)  cubes = Pow(positive, three)
        mean = GlobalAveragePool(cubes)  root = Pow(mean, third)  base = Constant<value = float {10.0}>()
        tens = Pow(base, root)  seven = Constant<value = float {7.0}>()  high = Pow(root, seven)
        minus = Constant<value = float {-2.0}>()  low = Pow(root, minus)  none = Constant<value = float {0.0}>()
        negative = Neg(mean)  one = Pow(negative, none)  y = Sum(tens, high, low, one)""", {}),
    "a cut that names the batch and takes it whole, as keras2onnx writes": (
        "float[N,9,6] x", "float[N,4,6] y", 12, """
        first = Constant<value = int64[2] {0,5}>()  end = Constant<value = int64[2] {9223372036854775807,9}>()
        axes = Constant<value = int64[2] {0,1}>()  part = Slice(x, first, end, axes)  y = Relu(part)""", {}),
    "states of layers in one tensor, taken apart and put together": (
        "float[4,1,6] h, float[7,1,6] x", "float[6,1,6] y", 17, """
        zero = Constant<value = int64 {0}>()  axis = Constant<value = int64[1] {0}>()
        sizes = Constant<value = int64[2] {1,3}>()  a, rest = Split<axis = 0>(h, sizes)
        first = Constant<value = int64[1] {1}>()  end = Constant<value = int64[1] {7}>()
        two = Constant<value = int64[1] {2}>()  odd = Slice(x, first, end, axis, two)
        b = Gather<axis = 0>(rest, zero)  whole = Unsqueeze(b, axis)  c = Tanh(whole)  d = Add(a, c)
        sums = Add(odd, rest)  e = Relu(sums)  f = Concat<axis = 0>(d, e, h)
        start = Constant<value = int64[1] {-7}>()  last = Constant<value = int64[1] {-1}>()
        y = Slice(f, start, last, axis)""", {}),
    "pictures of a fixed batch, with padding around the one half": (
        "float[2,6,5,5] x", "float[2,6,5,5] y", 17, """
        image = Conv<kernel_shape = [1,1]>(x, w)  a, b = Split<axis = 0>(image, ones)
        c = Conv<kernel_shape = [3,3], pads = [1,1,1,1]>(a, v)  y = Concat<axis = 0>(b, c)""",
        {"w": (6, 6, 1, 1), "v": (6, 6, 3, 3), "ones": (2,)}),
}


def model_of(case: tuple[str, str, int, str, dict[str, tuple[int, ...]]]) -> onnx.ModelProto:
    inputs, output, opset, nodes, constants = case
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}]> m ({inputs}) => ({output}) {{ {nodes} }}')
    random = np.random.default_rng(0)
    for name, shape in constants.items():
        array = (random.integers(0, 16, shape) if name == "index" else np.ones(shape, np.int64) if name == "ones" else
                 random.standard_normal(shape).astype(np.float32))
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def feeds_of(model: onnx.ModelProto) -> dict[str, Any]:
    random = np.random.default_rng(1)
    feeds: dict[str, Any] = {}
    for value in model.graph.input:
        shape = [d.dim_value or ITEMS for d in value.type.tensor_type.shape.dim]
        if value.name == "ids":
            feeds[value.name] = random.integers(0, 4, shape) * random.integers(0, VOCABULARY // 4, shape)
        elif value.name == "seen":
            feeds[value.name] = (np.arange(shape[1]) < random.integers(1, shape[1], (shape[0], 1))).astype(np.int64)
        else:
            feeds[value.name] = random.standard_normal(shape).astype(np.float32)
    return feeds


@pytest.mark.parametrize("name", CASES)
def test_a_turn_of_phrase_is_compiled(name: str, tmp_path: Path) -> None:
    model = model_of(CASES[name])
    engine, feeds = engine_of(model, tmp_path), feeds_of(model)
    assert not fallbacks(engine), [f"{step.name}: {step.reason}" for step in fallbacks(engine)]
    expected, = ReferenceEvaluator(model).run(["y"], feeds)
    assert relative_error(engine.run(feeds)["y"], np.asarray(expected, np.float32)) < TOLERANCE


def test_tensorflow_takes_the_pixel_in_whose_middle_a_nearest_neighbour_lies(tmp_path: Path) -> None:
    """Opset 11 has this mode, ONNX's reference does not: at half size, pixel i is pixel floor((i + 1/2) * 2)."""
    case = ("float[N,3,4,6] x", "float[N,3,2,3] y", 11, """
        roi = Constant<value = float[0] {}>()  scales = Constant<value = float[4] {1.0,1.0,0.5,0.5}>()  r = Relu(x)
        y = Resize<mode = "nearest", nearest_mode = "floor",
                   coordinate_transformation_mode = "tf_half_pixel_for_nn">(r, roi, scales)""", {})
    model = model_of(case)
    feeds = feeds_of(model)
    engine = engine_of(model, tmp_path)
    assert not fallbacks(engine)
    np.testing.assert_array_equal(engine.run(feeds)["y"], np.maximum(feeds["x"], 0)[:, :, 1::2, 1::2])


def test_a_layer_norm_as_keras_computes_it_reduces_beside_the_batch(tmp_path: Path) -> None:
    """The normalised rows are the channels of one picture, so the batch is not the leading axis."""
    case = ("float[N,6] x", "float[N,6] y", 13, """
        shape = Constant<value = int64[4] {1,-1,6,1}>()  lines = Reshape(x, shape)
        mean = ReduceMean<axes = [0,2,3]>(lines)  centred = Sub(lines, mean)
        flat = Constant<value = int64[2] {-1,6}>()  y = Reshape(centred, flat)""", {})
    model = model_of(case)
    feeds, engine = feeds_of(model), engine_of(model, tmp_path)
    assert not fallbacks(engine)
    expected = feeds["x"] - feeds["x"].mean(axis=1, keepdims=True)
    np.testing.assert_allclose(engine.run(feeds)["y"], expected, atol=1e-6)
