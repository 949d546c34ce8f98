"""Batch normalisation statistics for random weights: each layer gets the mean and the variance of its input.

A trained network has this property, and a random one with mean 0 and variance 1 does not: its activations drift by a
factor a layer. One pass of data is enough, because each layer is normalised by its own batch before the next sees it.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from benchmarks.zoo.oracle import run_onnx

MINIMUM_VARIANCE = 1e-2     # for dead channels: dividing by less would amplify their noise


def measure(model: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the running mean and variance of every BatchNormalization of `model` on the feeds, by name."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.node[:], probe.graph.output[:]
    measured: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            mean, variance = _normalise_by_batch(probe, node)
            measured |= {mean: node.input[3], variance: node.input[4]}
        else:
            probe.graph.node.append(node)
    if not measured:
        return {}
    constants: dict[str, NDArray[Any]] = {
        "rows": np.array([0, 0, -1], np.int64), "flat": np.array([-1], np.int64),
        "all_but_channels": np.array([0, 2], np.int64), "minimum_variance": np.array([MINIMUM_VARIANCE], np.float32)}
    probe.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    probe.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in measured)
    values = run_onnx(probe, feeds, outputs=list(measured))
    return {measured[name]: value for name, value in values.items()}


def _normalise_by_batch(probe: onnx.ModelProto, node: onnx.NodeProto) -> tuple[str, str]:
    """Add `node` with its input's statistics, and return the names of mean and variance, float32 [channels]."""
    x, gamma, beta = node.input[:3]
    prefix = node.output[0]

    def add(op: str, *inputs: str, **attrs: Any) -> str:
        output = f"{prefix}.{len(probe.graph.node)}"
        probe.graph.node.append(helper.make_node(op, list(inputs), [output], **attrs))
        return output

    def mean_of(value: str) -> str:
        if probe.opset_import[0].version < 18:
            return add("ReduceMean", value, axes=[0, 2], keepdims=1)
        return add("ReduceMean", value, "all_but_channels", keepdims=1)

    rows = add("Reshape", x, "rows")        # [items, channels, positions], for any number of spatial axes
    mean = mean_of(rows)
    centred = add("Sub", rows, mean)
    mean, variance = (add("Reshape", value, "flat") for value in (mean, mean_of(add("Mul", centred, centred))))
    variance = add("Max", variance, "minimum_variance")
    normalised = helper.make_node("BatchNormalization", [x, gamma, beta, mean, variance], [prefix], epsilon=1e-5)
    probe.graph.node.append(normalised)
    return mean, variance
