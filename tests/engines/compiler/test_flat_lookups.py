"""Lookups of each item's rows in a tensor flattened with the batch, as in end-to-end detectors."""
import numpy as np
from onnx import parser
from onnxruntime import InferenceSession

from infer_server.engines import build_engine

MODEL = """<ir_version: 8, opset_import: ["" : 17]> g (float[n, 12] x) => (int64[n, 4, 1] y)
<int64 zero = {0}, int64 one = {1}, int64[1] four = {4}, int64[1] axis = {1}, int64[2] column = {-1, 1}> {
  scores, chosen = TopK(x, four)
  best, places = TopK(scores, four)
  flat = Reshape(chosen, column)
  shape = Shape(x)
  count = Gather(shape, zero)
  items = Range(zero, count, one)
  numbers = Unsqueeze(items, axis)
  starts = Mul(numbers, four)
  rows = Add(places, starts)
  y = Gather(flat, rows) }"""


def test_several_rows_of_each_item_leave_the_batch_open() -> None:
    proto = parser.parse_model(MODEL)
    engine = build_engine(proto, timing=False, cache=False).engine(threads=1)
    assert engine.inputs[0].shape == ("batch", 12)
    x = np.random.default_rng(0).standard_normal((3, 12)).astype(np.float32)
    expected, = InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    np.testing.assert_array_equal(engine.run({"x": x})["y"], expected)
