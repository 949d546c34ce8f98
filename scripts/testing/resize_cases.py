"""Random Resize nodes, and their deviation from ONNX Runtime."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnxruntime import InferenceSession, SessionOptions
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, NotImplemented, RuntimeException

from infer_server.engines import build_engine
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ops import reference

COORDINATES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners", "tf_crop_and_resize",
               "half_pixel_symmetric")
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
FAMILIES = ("nearest", "linear", "cubic", "antialias")
SCALES = (0.25, 0.3, 1 / 3, 0.5, 0.6, 2 / 3, 0.7, 0.75, 1.0, 1.1, 1.2, 1.25, 1.3, 4 / 3, 1.5, 1.7, 2.0, 2.4, 3.0)
TOLERANCES = {"float32": 1e-5, "float16": 2e-3}
REFUSED = (Fail, InvalidArgument, NotImplemented, RuntimeException)


@dataclass(frozen=True)
class Case:
    """Model of one Resize, and its input."""
    model: onnx.ModelProto
    x: NDArray[Any]
    family: str

    def __str__(self) -> str:
        attrs = {a.name: helper.get_attribute_value(a) for a in self.model.graph.node[0].attribute}
        numbers = {t.name: numpy_helper.to_array(t).tolist() for t in self.model.graph.initializer}
        return f"opset {self.model.opset_import[0].version} {self.x.dtype} {self.x.shape} {numbers} {attrs}"


def sampled(seed: int, family: str, dtypes: Sequence[str] = ("float32",)) -> Case:
    """Return a case of a family of modes; equal seeds make equal cases."""
    random = np.random.default_rng([seed, FAMILIES.index(family)])
    opset = int(random.choice([18, 19]) if family == "antialias" else random.choice([10, 11, 13, 18, 19]))
    dtype = np.dtype(str(random.choice(list(dtypes))))
    rank, axes = _layout(random, family)
    shape = [int(random.integers(1, 4)) if axis not in axes else int(random.integers(2, 24)) for axis in range(rank)]
    attrs = _attributes(random, family, opset, axes)
    inputs, tensors = _extents(random, shape, axes, opset, attrs)
    x = random.standard_normal(shape) * 3 if dtype.kind == "f" else random.integers(0, 120, shape)
    return Case(model_of(dtype, shape, inputs, tensors, attrs, opset), x.astype(dtype), family)


def _layout(random: np.random.Generator, family: str) -> tuple[int, list[int]]:
    """Return the rank and the axes that are resized, among those that ONNX Runtime takes."""
    if family == "nearest":
        rank = int(random.integers(1, 6))
        return rank, sorted(random.permutation(rank)[:int(random.integers(1, min(rank, 3) + 1))].tolist())
    choices = [(2, [0, 1]), (4, [2, 3]), (4, [2, 3]), (4, [2, 3])]
    if family == "linear":
        choices += [(3, [0, 1, 2]), (5, [2, 3, 4]), (4, [1, 2])]
    if family == "antialias":
        choices += [(4, [1, 2])]
    return choices[int(random.integers(len(choices)))]


def _attributes(random: np.random.Generator, family: str, opset: int, axes: list[int]) -> dict[str, Any]:
    attrs: dict[str, Any] = {"mode": family if family != "antialias" else str(random.choice(["linear", "cubic"]))}
    if opset < 11:
        return attrs
    known = [mode for mode in COORDINATES if opset >= 19 or mode != "half_pixel_symmetric"]
    if family == "antialias" and axes == [1, 2]:
        known.remove("tf_crop_and_resize")      # ONNX Runtime puts extrapolated pixels where channels-first images have
    attrs["coordinate_transformation_mode"] = str(random.choice(known))     # them
    if family == "nearest":
        attrs["nearest_mode"] = str(random.choice(NEAREST))
    if attrs["mode"] == "cubic":
        attrs["cubic_coeff_a"] = float(random.choice([-0.75, -0.5, -0.6]))
    if family in ("cubic", "antialias"):
        attrs["exclude_outside"] = int(random.integers(2))
    if family == "antialias":
        attrs["antialias"] = 1
    if attrs["coordinate_transformation_mode"] == "tf_crop_and_resize":
        attrs["extrapolation_value"] = float(random.choice([0.0, 7.0]))
    return attrs


def _extents(random: np.random.Generator, shape: list[int], axes: list[int], opset: int,
             attrs: dict[str, Any]) -> tuple[list[str], dict[str, NDArray[Any]]]:
    """Return the names of the node's inputs and the constants among them; `attrs` receives axes and policy."""
    few = opset >= 18 and bool(random.integers(2))
    named = axes if few else list(range(len(shape)))
    if few:
        attrs["axes"] = named
    changes = {axis: float(random.choice(SCALES) if random.integers(3) else random.uniform(0.3, 3)) for axis in axes}
    scales = np.array([max(changes.get(axis, 1.0), min(1.001 / shape[axis], 1.0)) for axis in named], np.float32)
    if opset < 11:          # growing and shrinking are two operators: growth by less than a pixel becomes 1
        scales = np.where((scales > 1) & (np.floor(scales * shape) == shape), np.float32(1), scales)
    if attrs.get("antialias") and attrs["coordinate_transformation_mode"] == "tf_crop_and_resize":
        # ONNX Runtime copies an axis that keeps its extent, but extrapolates it.
        scales = np.where(np.floor(scales * [shape[axis] for axis in named]) == [shape[axis] for axis in named],
                          np.float32(1), scales)
    tensors: dict[str, NDArray[Any]] = {}
    inputs = ["x", "", "scales"] if opset >= 11 else ["x", "scales"]
    if opset == 11:         # no optional inputs yet: empty tensors instead
        inputs[1], tensors["roi"] = "roi", np.zeros(0, np.float32)
    if attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        ends = np.sort(np.round(random.uniform(-0.2, 1.2, (2, len(named))), 2), 0)
        inputs[1], tensors["roi"] = "roi", ends.ravel().astype(np.float32)
    if opset >= 11 and random.integers(2):
        if opset >= 18 and (few or len(axes) == len(shape)):
            attrs["keep_aspect_ratio_policy"] = str(random.choice(["stretch", "not_larger", "not_smaller"]))
        tensors["sizes"] = np.array([max(int(scale * shape[axis]), 1) for scale, axis in
                                     zip(scales, named, strict=True)], np.int64)
        if opset == 11:
            return [*inputs, "sizes"], tensors | {"scales": np.zeros(0, np.float32)}
        return [*inputs[:2], "", "sizes"], tensors
    return inputs, tensors | {"scales": scales}


def model_of(dtype: np.dtype[Any], shape: Sequence[int], inputs: list[str], tensors: dict[str, NDArray[Any]],
           attrs: dict[str, Any], opset: int) -> onnx.ModelProto:
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    graph = helper.make_graph(
        [helper.make_node("Resize", inputs, ["y"], **attrs)], "resize",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, [f"d{axis}" for axis in range(len(shape))])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def onnx_runtime(case: Case) -> NDArray[Any] | None:
    """Return ONNX Runtime's result; None if it refuses the node."""
    options = SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        result: NDArray[Any] = InferenceSession(case.model.SerializeToString(), options).run(None, {"x": case.x})[0]
    except REFUSED:
        return None
    return result


def by_reference(case: Case) -> NDArray[Any]:
    """Return the result of the NumPy reference."""
    result, = reference.run(graph_from_onnx(case.model), {"x": case.x}).values()
    return result


def by_kernels(case: Case) -> NDArray[Any]:
    """Return the result of an engine for this CPU."""
    result: NDArray[Any] = build_engine(case.model, timing=False, cache=False).engine(threads=1).run({"x": case.x})["y"]
    return result


def fault(case: Case, result: NDArray[Any], right: NDArray[Any]) -> str:
    """Return the fault of a result, or ""."""
    if result.shape != right.shape or result.dtype != right.dtype:
        return f"{result.dtype} {result.shape} for {right.dtype} {right.shape}: {case}"
    if case.family == "nearest" or result.dtype.kind != "f":
        allowed = case.family == "antialias"        # a difference of 1: antialiasing may round ties the other way
        wrong = np.abs(result.astype(np.float64) - right) > allowed
    else:
        wrong = ~np.isclose(result, right, rtol=TOLERANCES[result.dtype.name], atol=3 * TOLERANCES[result.dtype.name])
    if not wrong.any():
        return ""
    where = tuple(int(i[0]) for i in np.nonzero(wrong))
    return f"{wrong.sum()} of {wrong.size}, at {where} {result[where]} for {right[where]}: {case}"
