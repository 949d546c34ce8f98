"""Small detectors: boxes in pixels beside sigmoid scores, selected inside the model or not."""
import numpy as np
import onnx
import onnx.parser

POINTS, CLASSES, DETECTIONS = 64, 5, 30

_HEAD = f"""<ir_version: 8, opset_import: ["" : 17]>
    m (float[N,3,16,16] x) => ({{outputs}})
    {{{{ hidden = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w)  active = Relu(hidden)
        box_map = Conv(active, w_boxes)  class_map = Conv(active, w_classes)
        to_boxes = Constant<value = int64[3] {{{{0, 4, {POINTS}}}}}>()
        to_classes = Constant<value = int64[3] {{{{0, {CLASSES}, {POINTS}}}}}>()
        flat_boxes = Reshape(box_map, to_boxes)  flat_classes = Reshape(class_map, to_classes)
        pixels = Constant<value = float {{{{120.0}}}}>()  positive = Relu(flat_boxes)
        boxes = Mul(positive, pixels)  scores = Sigmoid(flat_classes)
        {{body}} }}}}"""
_CONCAT = "y = Concat<axis=1>(boxes, scores)"
_SELECTED = f"""joined = Concat<axis=1>(boxes, scores)  rows = Transpose<perm=[0,2,1]>(joined)
    parts = Constant<value = int64[2] {{4, {CLASSES}}}>()  row_boxes, row_scores = Split<axis=2>(rows, parts)
    best = ReduceMax<axes=[2], keepdims=0>(row_scores)  label = ArgMax<axis=2, keepdims=1>(row_scores)
    k = Constant<value = int64[1] {{{DETECTIONS}}}>()  top, places = TopK<axis=1>(best, k)
    last = Constant<value = int64[1] {{2}}>()  index = Unsqueeze(places, last)  score = Unsqueeze(top, last)
    four = Constant<value = int64[3] {{1, 1, 4}}>()  wide = Tile(index, four)
    picked = GatherElements<axis=1>(row_boxes, wide)  picked_label = GatherElements<axis=1>(label, index)
    kind = Cast<to=1>(picked_label)  y = Concat<axis=2>(picked, score, kind)"""
_SUPPRESSED = """rows = Transpose<perm=[0,2,1]>(boxes)
    most = Constant<value = int64[1] {20}>()  overlap = Constant<value = float[1] {0.5}>()
    least = Constant<value = float[1] {0.55}>()
    y = NonMaxSuppression(rows, scores, most, overlap, least)"""


def _model(body: str, outputs: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_HEAD.format(body=body, outputs=outputs))
    random = np.random.default_rng(5)
    shapes = {"w": (8, 3, 3, 3), "w_boxes": (4, 8, 1, 1), "w_classes": (CLASSES, 8, 1, 1)}
    scale = {"w": 0.3, "w_boxes": 0.4, "w_classes": 0.6}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array((scale[name] * random.standard_normal(shape)).astype(np.float32), name)
        for name, shape in shapes.items())
    return model


def concatenated() -> onnx.ModelProto:
    """[n, 4 + classes, points], as Ultralytics exports it."""
    return _model(_CONCAT, "float[N,C,P] y")


def end_to_end() -> onnx.ModelProto:
    """[n, detections, 6]: the best points by TopK, with box, score and class."""
    return _model(_SELECTED, "float[N,K,6] y")


def suppressed() -> onnx.ModelProto:
    """Return a model that ends in NonMaxSuppression of one item, with output [selected, 3]: batch, class, point."""
    model = _model(_SUPPRESSED, "int64[K,3] y")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    return model


def pictures(count: int, seed: int = 0) -> np.ndarray:
    """[count, 3, 16, 16] with a bright patch each."""
    random = np.random.default_rng(seed)
    x = 0.3 * random.standard_normal((count, 3, 16, 16)).astype(np.float32)
    for item in x:
        row, column = random.integers(0, 12, 2)
        item[:, row:row + 4, column:column + 4] += random.standard_normal((3, 1, 1)).astype(np.float32) * 2
    return x
