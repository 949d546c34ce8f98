"""Small models that are not a single graph: loops, data-dependent branches and shapes, sequences."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from infer_server.engines.ir.graph import Array
from tests.engines.compiler.open_models import node, random
from tests.engines.compiler.small_models import small_model

FLOAT, BFLOAT16, INT64, BOOL = TensorProto.FLOAT, TensorProto.BFLOAT16, TensorProto.INT64, TensorProto.BOOL


def region(name: str, nodes: Sequence[onnx.NodeProto], inputs: Sequence[tuple[str, int, Any]], outputs: str,
           kinds: dict[str, int] | None = None, constants: dict[str, Array] | None = None) -> onnx.GraphProto:
    """Return a subgraph; its outputs are floats of any shape unless `kinds` gives their type."""
    return helper.make_graph(
        list(nodes), name, [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(out, (kinds or {}).get(out, FLOAT), None) for out in outputs.split()],
        [numpy_helper.from_array(array, key) for key, array in (constants or {}).items()])


def running_sum() -> onnx.ModelProto:
    """Return h' = tanh(h w + x[i]) over the rows of x: the last h, and all of them. The weights are carried, too."""
    body = region("body", [
        node("Identity", "going", "goes_on"), node("Identity", "w_in", "w_out"), node("Gather", "x i", "row", axis=0),
        node("MatMul", "h_in w_in", "p"), node("Add", "p row", "s"), node("Tanh", "s", "h_out"),
        node("Identity", "h_out", "h_all")],
        [("i", INT64, []), ("going", BOOL, []), ("h_in", FLOAT, [1, 5]), ("w_in", FLOAT, [5, 5])],
        "goes_on h_out w_out h_all", {"goes_on": BOOL})
    return small_model(
        [node("Shape", "x", "shape"), node("Gather", "shape zero", "rows", axis=0),
         node("Loop", "rows yes h w", "last weights all", body=body), node("Add", "last weights", "y")],
        {"x": ["T", 5]}, ["y", "all"],
        {"w": random(5, 5), "h": np.zeros((1, 5), np.float32), "yes": np.array(True), "zero": np.array(0)})


def first_numbers() -> onnx.ModelProto:
    """Return running_sum() with constants in the body that index a row of the last h and its first element."""
    model = running_sum()
    body = next(one for one in model.graph.node if one.op_type == "Loop").attribute[0].g
    last = body.node.pop()
    body.node.extend([
        helper.make_node("Constant", [], ["first"], value_int=0), node("Gather", "h_out first", "h_row", axis=0),
        node("Gather", "h_row first", "h_first", axis=0), node("Add", "h_out h_first", last.output[0])])
    return model


def until_large() -> onnx.ModelProto:
    """Return x doubled, and after the third step tripled (an If in the Loop), until its sum exceeds a bound."""
    double = region("double", [node("Add", "v v", "twice")], [], "twice")
    triple = region("triple", [node("Mul", "v three", "thrice")], [], "thrice")
    body = region("body", [
        node("Less", "i two", "early"), node("If", "early", "more", then_branch=double, else_branch=triple),
        node("ReduceSum", "more", "sum", keepdims=0), node("Less", "sum bound", "goes_on")],
        [("i", INT64, []), ("going", BOOL, []), ("v", FLOAT, ["n"])], "goes_on more", {"goes_on": BOOL})
    return small_model([node("Loop", "- yes x", "y", body=body)], {"x": ["n"]}, ["y"],
                       {"yes": np.array(True), "two": np.array(2), "three": np.array(3, np.float32),
                        "bound": np.array(100, np.float32)})


def recurrent() -> onnx.ModelProto:
    """Return h' = tanh(relu(x[i]) w + b + h r) over the rows of x, by a Loop and by a Scan.

    The Loop holds its weights and counts rows itself; the Scan reads the rows from the last to the first.
    """
    step = [node("Relu", "{0}row", "{0}positive"), node("MatMul", "{0}positive {0}w", "{0}p"),
            node("Add", "{0}p b", "{0}q"), node("MatMul", "{0}h_in r", "{0}s"), node("Add", "{0}q {0}s", "{0}t"),
            node("Tanh", "{0}t", "{0}h_out"), node("Identity", "{0}h_out", "{0}all")]

    def steps(mark: str) -> list[onnx.NodeProto]:
        return [onnx.NodeProto.FromString(one.SerializeToString().replace(b"{0}", mark.encode() * 3)) for one in step]

    loop = region("loop", [
        node("Identity", "going", "goes_on"), node("Gather", "x at", "lllrow", axis=0), node("Add", "one at", "next"),
        *steps("l")], [("i", INT64, []), ("going", BOOL, []), ("at", INT64, []), ("lllh_in", FLOAT, [1, 5])],
        "goes_on next lllh_out lllall", {"goes_on": BOOL, "next": INT64}, {"lllw": random(6, 5)})
    scan = region("scan", steps("s"), [("sssh_in", FLOAT, [1, 5]), ("sssrow", FLOAT, [1, 6])], "sssh_out sssall")
    return small_model(
        [node("Shape", "x", "shape"), node("Gather", "shape zero", "rows", axis=0),
         node("Loop", "rows yes zero h", "steps y all", body=loop),
         node("Scan", "h x", "z others", body=scan, num_scan_inputs=1, scan_input_directions=[1])],
        {"x": ["T", 1, 6]}, ["y", "all", "z", "others"],
        {"sssw": random(6, 5, seed=2), "r": random(5, 5), "b": random(5), "h": np.zeros((1, 5), np.float32),
         "yes": np.array(True), "zero": np.array(0), "one": np.array(1)})


def exchanged() -> onnx.ModelProto:
    """Return two states that are swapped at each step, one plus a row whose index is carried, and all sums."""
    body = region("body", [
        node("Gather", "x at", "row", axis=0), node("Add", "at one", "next"), node("Add", "b row", "sum"),
        node("Less", "next rows", "goes_on")],
        [("i", INT64, []), ("going", BOOL, []), ("at", INT64, []), ("a", FLOAT, [5]), ("b", FLOAT, [5])],
        "goes_on next sum a b", {"goes_on": BOOL, "next": INT64})
    return small_model(
        [node("Shape", "x", "shape"), node("Gather", "shape zero", "rows", axis=0),
         node("Loop", "- yes zero start start", "steps y z all", body=body)],
        {"x": ["T", 5]}, ["steps", "y", "z", "all"],
        {"start": random(5), "yes": np.array(True), "zero": np.array(0), "one": np.array(1)})


def asked() -> onnx.ModelProto:
    """Return a Loop that adds x until one step after the sum is large.

    The condition for another step is a value that the step before carried over unchanged.
    """
    body = region("body", [node("Add", "s x", "more"), node("ReduceSum", "more", "sum", keepdims=0),
                           node("Less", "sum bound", "small")],
                  [("i", INT64, []), ("going", BOOL, []), ("was_small", BOOL, []), ("s", FLOAT, [3])],
                  "was_small small more", {"was_small": BOOL, "small": BOOL})
    return small_model([node("Loop", "- yes yes start", "last y", body=body)], {"x": [3]}, ["y"],
                       {"yes": np.array(True), "start": np.zeros(3, np.float32), "bound": np.array(6, np.float32)})


def halves() -> onnx.ModelProto:
    """Return the sums of the rows of x before each row, in bfloat16."""
    body = region("body", [node("Identity", "going", "goes_on"), node("Gather", "rows i", "row", axis=0),
                           node("Add", "sum row", "next")],
                  [("i", INT64, []), ("going", BOOL, []), ("sum", BFLOAT16, [5])], "goes_on next sum",
                  {"goes_on": BOOL, "next": BFLOAT16, "sum": BFLOAT16})
    return small_model(
        [node("Cast", "x", "rows", to=BFLOAT16), node("Cast", "start", "first", to=BFLOAT16),
         node("Shape", "x", "shape"), node("Gather", "shape zero", "count", axis=0),
         node("Loop", "count yes first", "last sums", body=body), node("Cast", "sums", "all", to=FLOAT)],
        {"x": ["T", 5]}, ["all"], {"start": np.zeros(5, np.float32), "yes": np.array(True), "zero": np.array(0)})


def carried() -> onnx.ModelProto:
    """Return a sum of the rows of x, and two states of any size that are swapped at each step."""
    body = region("body", [
        node("Identity", "going", "goes_on"), node("Gather", "x i", "row", axis=0), node("Add", "sum row", "next")],
        [("i", INT64, []), ("going", BOOL, []), ("sum", FLOAT, [5]), ("u", FLOAT, ["n"]), ("v", FLOAT, ["n"])],
        "goes_on next v u", {"goes_on": BOOL})
    return small_model(
        [node("Shape", "x", "shape"), node("Gather", "shape zero", "rows", axis=0),
         node("Loop", "rows yes start a b", "y u_last v_last", body=body)],
        {"x": ["T", 5], "a": ["n"], "b": ["n"]}, ["y", "u_last", "v_last"],
        {"start": np.zeros(5, np.float32), "yes": np.array(True), "zero": np.array(0)})


def grown() -> onnx.ModelProto:
    """Return the rows so far, a state that grows at each step, and its maximum at each step."""
    body = region("body", [
        node("Identity", "going", "goes_on"), node("Gather", "x i", "row", axis=0),
        node("Concat", "sofar row", "longer", axis=0), node("ReduceMax", "longer", "most", keepdims=0)],
        [("i", INT64, []), ("going", BOOL, []), ("sofar", FLOAT, ["n"])], "goes_on longer most", {"goes_on": BOOL})
    return small_model(
        [node("Shape", "x", "shape"), node("Gather", "shape zero", "rows", axis=0),
         node("Loop", "rows yes start", "y most", body=body)],
        {"x": ["T", 5]}, ["y", "most"],
        {"start": np.zeros(1, np.float32), "yes": np.array(True), "zero": np.array(0)})


def scanned() -> onnx.ModelProto:
    """Return running sums of the columns of x, from the last one on, and their squares."""
    body = region("body", [node("Add", "sum column", "next"), node("Mul", "next next", "square")],
                  [("sum", FLOAT, [3]), ("column", FLOAT, [3])], "next square")
    return small_model(
        [node("Scan", "start x", "y squares", body=body, num_scan_inputs=1, scan_input_axes=[1],
              scan_input_directions=[1], scan_output_axes=[-1])],
        {"x": [3, "T"]}, ["y", "squares"], {"start": np.zeros(3, np.float32)})


def chosen_rows() -> onnx.ModelProto:
    """Return a layer applied to the rows of x whose sum is positive; their number depends on the data."""
    return small_model(
        [node("ReduceSum", "x one", "sums", keepdims=0), node("Greater", "sums zero", "positive"),
         node("NonZero", "positive", "where"), node("Squeeze", "where start", "index"),
         node("Gather", "x index", "rows", axis=0), node("MatMul", "rows w", "p"), node("Relu", "p", "y")],
        {"x": ["T", 6]}, ["y"],
        {"w": random(6, 4), "one": np.array([1]), "start": np.array([0]), "zero": np.array(0, np.float32)})


def chosen_patches() -> onnx.ModelProto:
    """Return a convolution, then a layer and a Loop over its bright rows; their number depends on the data."""
    body = region("body", [
        node("Identity", "going", "goes_on"), node("Gather", "rows i", "row", axis=0),
        node("MatMul", "h_in r", "p"), node("Add", "p row", "s"), node("Tanh", "s", "h_out")],
        [("i", INT64, []), ("going", BOOL, []), ("h_in", FLOAT, [1, 16])], "goes_on h_out", {"goes_on": BOOL})
    return small_model(
        [node("Conv", "x k", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "features"),
         node("ReduceMean", "x axes", "means", keepdims=0), node("Greater", "means least", "bright"),
         node("NonZero", "bright", "where"), node("Transpose", "where", "places", perm=[1, 0]),
         node("Transpose", "features", "by_row", perm=[0, 2, 1, 3]), node("GatherND", "by_row places", "patches"),
         node("Flatten", "patches", "flat"), node("MatMul", "flat w", "made"), node("Unsqueeze", "made one", "rows"),
         node("Shape", "rows", "shape"), node("Gather", "shape zero", "count", axis=0),
         node("Loop", "count yes h", "y", body=body)],
        {"x": [1, 3, "H", 8]}, ["y"],
        {"k": random(8, 3, 3, 3), "w": random(64, 16) / 16, "r": random(16, 16) / 8, "h": np.zeros((1, 16), np.float32),
         "axes": np.array([1, 3]), "least": np.array(0, np.float32), "yes": np.array(True), "zero": np.array(0),
         "one": np.array([1])})


def detector() -> onnx.ModelProto:
    """Return a detector: boxes and scores of two classes, and the boxes that NonMaxSuppression selects."""
    return small_model(
        [node("MatMul", "x w", "raw"), node("Sigmoid", "raw", "boxes"), node("MatMul", "x v", "logits"),
         node("Sigmoid", "logits", "likely"), node("Transpose", "likely", "scores", perm=[0, 2, 1]),
         node("NonMaxSuppression", "boxes scores most overlap least", "chosen"),
         node("Gather", "chosen two", "which", axis=1), node("Squeeze", "which one", "index"),
         node("Squeeze", "boxes start", "all"), node("Gather", "all index", "y", axis=0)],
        {"x": [1, "N", 8]}, ["chosen", "y"],
        {"w": random(8, 4), "v": random(8, 2, seed=5), "most": np.array([3]), "overlap": np.array([0.3], np.float32),
         "least": np.array([0.4], np.float32), "two": np.array([2]), "one": np.array([1]), "start": np.array([0])})


def collected() -> onnx.ModelProto:
    """Return a sequence to which a Loop appends a product for each row of x, concatenated at its end."""
    sequence = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, None))
    body = region("body", [
        node("Identity", "going", "goes_on"), node("Gather", "x i", "row", axis=0), node("MatMul", "row w", "p"),
        node("SequenceInsert", "s p", "longer")],
        [("i", INT64, []), ("going", BOOL, [])], "goes_on longer", {"goes_on": BOOL})
    body.input.append(helper.make_value_info("s", sequence))
    body.output[1].CopyFrom(helper.make_value_info("longer", sequence))
    return small_model(
        [node("SequenceEmpty", "", "empty"), node("Shape", "x", "shape"), node("Gather", "shape zero", "rows", axis=0),
         node("Loop", "rows yes empty", "made", body=body), node("ConcatFromSequence", "made", "y", axis=0)],
        {"x": ["T", 2, 6]}, ["y"], {"w": random(6, 4), "yes": np.array(True), "zero": np.array(0)})


def measured() -> onnx.ModelProto:
    """Return a speech synthesiser's durations: the output's length depends on the values of a layer."""
    return small_model(
        [node("MatMul", "x w", "p"), node("Abs", "p", "a"), node("Ceil", "a", "steps"),
         node("ReduceSum", "steps", "sum", keepdims=0), node("Cast", "sum", "length", to=INT64),
         node("Range", "zero length one", "places"), node("Cast", "places", "places_f", to=FLOAT),
         node("Sin", "places_f", "wave"), node("Unsqueeze", "wave axis", "column"), node("MatMul", "column v", "y")],
        {"x": ["T", 4]}, ["y"],
        {"w": random(4, 1), "v": random(1, 3), "zero": np.array(0), "one": np.array(1), "axis": np.array([1])})
