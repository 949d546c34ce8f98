"""DeepBench's inference problems as ONNX models of one node.

The sizes are those of the device and server sets in code/kernels/*_problems.h of github.com/baidu-research/DeepBench,
each once; the sparse products have sparse weights, and dense kernels compute them. DeepBench names no data: weights are
random numbers of the size that layers are initialised with, so that sums neither vanish nor saturate.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from infer_server.engines.ir.graph import Array

PRODUCT, SPARSE, CONVOLUTION, RECURRENT = CLASSES = ("product", "sparse", "convolution", "recurrent")
OPSET, IR_VERSION = 17, 8       # supported by all compared runtimes

# m n k: y[n, m] = x[n, k] @ w[k, m]. DeepBench's matrices are column-major: n counts the rows of ONNX.
PRODUCTS = """
    5124 700 2048, 35 700 2048, 3072 1 1024, 64 1 1216, 3072 1500 1024, 128 1500 1280, 3072 1500 128, 128 1 1024,
    3072 1 128, 176 1500 1408, 4224 1500 176, 128 1 1408, 4224 1 128, 5124 700 2560, 35 700 2560, 5124 1500 2048,
    35 1500 2048, 5124 1500 2560, 35 1500 2560, 7680 1 2560, 7680 2 2560, 7680 4 2560, 3072 2 1024, 3072 4 1024,
    512 1 500000, 1024 1 500000, 512 2 500000, 1024 2 500000, 512 4 500000, 1024 4 500000, 1024 700 512,
    7680 1500 2560, 6144 1500 2048, 4608 1500 1536, 8448 1500 2816, 7680 3000 2560, 6144 3000 2048, 4608 3000 1536,
    8448 3000 2816, 3072 3000 1024, 7680 6000 2560, 6144 6000 2048, 4608 6000 1536, 8448 6000 2816, 3072 6000 1024,
    6144 1 2048, 4608 1 1536, 8448 1 2816, 6144 2 2048, 4608 2 1536, 8448 2 2816, 6144 4 2048, 4608 4 1536,
    8448 4 2816, 512 1500 2816, 512 1500 2048, 512 1500 2560, 512 1500 1536, 1024 1500 2816, 1024 1500 2048,
    1024 1500 2560, 1024 1500 1536, 512 1 512, 1024 1 512, 512 3000 2816, 512 3000 2048, 512 3000 2560, 512 3000 1536,
    1024 3000 2816, 1024 3000 2048, 1024 3000 2560, 1024 3000 1536, 512 2 512, 1024 2 512, 512 6000 2816,
    512 6000 2048, 512 6000 2560, 512 6000 1536, 1024 6000 2816, 1024 6000 2048, 1024 6000 2560, 1024 6000 1536,
    512 4 512, 1024 4 512
"""

# m n k, and the share of weights that are 0
SPARSE_PRODUCTS = """
    7680 1 2560 0.95, 7680 1500 2560 0.95, 10752 1 3584 0.95, 10752 1500 3584 0.95, 7680 1 2560 0.9,
    7680 1500 2560 0.9, 10752 1 3584 0.9, 10752 1500 3584 0.9, 7860 2 2560 0.95, 7860 4 2560 0.95,
    7860 3000 2560 0.95, 7860 6000 2560 0.95, 10752 2 3584 0.95, 10752 4 3584 0.95, 10752 3000 3584 0.95,
    10752 6000 3584 0.95, 7860 2 2560 0.9, 7860 4 2560 0.9, 7860 3000 2560 0.9, 7860 6000 2560 0.9, 10752 2 3584 0.9,
    10752 4 3584 0.9, 10752 3000 3584 0.9, 10752 6000 3584 0.9
"""

# width height channels batch filters; the kernel's width and height; padding and strides likewise
CONVOLUTIONS = """
    112 112 64 1 64 1 1 0 0 1 1, 56 56 64 1 256 1 1 0 0 1 1, 56 56 256 1 64 1 1 0 0 1 1, 56 56 256 1 128 1 1 0 0 2 2,
    28 28 128 1 512 1 1 0 0 1 1, 28 28 512 1 128 1 1 0 0 1 1, 28 28 512 1 256 1 1 0 0 2 2,
    14 14 256 1 1024 1 1 0 0 1 1, 28 28 512 1 1024 1 1 0 0 2 2, 14 14 1024 1 256 1 1 0 0 1 1,
    14 14 1024 1 512 1 1 0 0 2 2, 7 7 512 1 512 3 3 1 1 1 1, 7 7 512 1 2048 1 1 0 0 1 1,
    14 14 1024 1 2048 1 1 0 0 2 2, 7 7 2048 1 512 1 1 0 0 1 1, 700 161 1 1 32 20 5 0 0 2 2,
    700 161 1 2 32 20 5 0 0 2 2, 700 161 1 4 32 20 5 0 0 2 2, 341 79 32 1 32 10 5 0 0 2 2,
    341 79 32 2 32 10 5 0 0 2 2, 341 79 32 4 32 10 5 0 0 2 2, 480 48 1 1 16 3 3 1 1 1 1, 240 24 16 1 32 3 3 1 1 1 1,
    120 12 32 1 64 3 3 1 1 1 1, 60 6 64 1 128 3 3 1 1 1 1, 108 108 3 1 64 3 3 1 1 2 2, 54 54 64 1 64 3 3 1 1 1 1,
    27 27 128 1 128 3 3 1 1 1 1, 14 14 128 1 256 3 3 1 1 1 1, 7 7 256 1 512 3 3 1 1 1 1, 224 224 3 1 64 3 3 1 1 1 1,
    112 112 64 1 128 3 3 1 1 1 1, 56 56 128 1 256 3 3 1 1 1 1, 28 28 256 1 512 3 3 1 1 1 1,
    14 14 512 1 512 3 3 1 1 1 1, 224 224 3 2 64 3 3 1 1 1 1, 112 112 64 2 128 3 3 1 1 1 1,
    56 56 128 2 256 3 3 1 1 1 1, 28 28 256 2 512 3 3 1 1 1 1, 14 14 512 2 512 3 3 1 1 1 1, 7 7 512 2 512 3 3 1 1 1 1,
    224 224 3 1 64 7 7 3 3 2 2, 28 28 192 1 32 5 5 2 2 1 1, 28 28 192 1 64 1 1 0 0 1 1, 14 14 512 1 48 5 5 2 2 1 1,
    14 14 512 1 192 1 1 0 0 1 1, 7 7 832 1 256 1 1 0 0 1 1, 7 7 832 1 128 5 5 2 2 1 1, 224 224 3 2 64 7 7 3 3 2 2,
    28 28 192 2 32 5 5 2 2 1 1, 28 28 192 2 64 1 1 0 0 1 1, 14 14 512 2 48 5 5 2 2 1 1, 14 14 512 2 192 1 1 0 0 1 1,
    7 7 832 2 256 1 1 0 0 1 1, 7 7 832 2 128 5 5 2 2 1 1, 56 56 64 1 64 3 3 1 1 1 1, 56 56 64 1 256 1 1 0 0 2 2,
    28 28 128 1 128 3 3 1 1 1 1, 28 28 128 1 512 1 1 0 0 2 2, 14 14 256 1 256 1 1 0 0 1 1,
    14 14 256 1 256 3 3 1 1 1 1, 14 14 256 1 1024 1 1 0 0 2 2, 7 7 512 1 512 1 1 0 0 1 1, 7 7 2048 1 512 1 1 3 3 2 2,
    56 56 64 2 64 3 3 1 1 1 1, 56 56 64 2 256 1 1 0 0 2 2, 28 28 128 2 128 3 3 1 1 1 1, 28 28 128 2 512 1 1 0 0 2 2,
    14 14 256 2 256 1 1 0 0 1 1, 14 14 256 2 256 3 3 1 1 1 1, 14 14 256 2 1024 1 1 0 0 2 2, 7 7 512 2 512 1 1 0 0 1 1,
    7 7 2048 2 512 1 1 3 3 2 2, 700 161 1 1 64 5 5 1 1 2 2, 350 80 64 1 64 3 3 1 1 1 1, 350 80 64 1 128 5 5 1 1 2 2,
    175 40 128 1 128 3 3 1 1 1 1, 175 40 128 1 256 5 5 1 1 2 2, 84 20 256 1 256 3 3 1 1 1 1,
    84 20 256 1 512 5 5 1 1 2 2, 42 10 512 1 512 3 3 1 1 1 1, 700 161 1 2 64 5 5 1 1 2 2, 350 80 64 2 64 3 3 1 1 1 1,
    350 80 64 2 128 5 5 1 1 2 2, 175 40 128 2 128 3 3 1 1 1 1, 175 40 128 2 256 5 5 1 1 2 2,
    84 20 256 2 256 3 3 1 1 1 1, 84 20 256 2 512 5 5 1 1 2 2, 42 10 512 2 512 3 3 1 1 1 1,
    112 112 64 2 64 1 1 0 0 1 1, 56 56 64 2 256 1 1 0 0 1 1, 56 56 256 2 64 1 1 0 0 1 1, 56 56 256 2 128 1 1 0 0 2 2,
    28 28 128 2 512 1 1 0 0 1 1, 28 28 512 2 128 1 1 0 0 1 1, 28 28 512 2 256 1 1 0 0 2 2,
    14 14 256 2 1024 1 1 0 0 1 1, 28 28 512 2 1024 1 1 0 0 2 2, 14 14 1024 2 256 1 1 0 0 1 1,
    14 14 1024 2 512 1 1 0 0 2 2, 7 7 512 2 2048 1 1 0 0 1 1, 14 14 1024 2 2048 1 1 0 0 2 2,
    7 7 2048 2 512 1 1 0 0 1 1
"""

# cell, units, batch, time steps
RECURRENCES = """
    vanilla 32 1 672, vanilla 64 1 96, lstm 256 1 150, lstm 512 1 25, lstm 512 2 25, lstm 512 4 25, lstm 1024 1 25,
    lstm 1024 2 25, lstm 1024 4 25, lstm 2048 1 25, lstm 2048 2 25, lstm 2048 4 25, lstm 1536 1 50, lstm 1536 2 50,
    lstm 1536 4 50, lstm 256 2 150, lstm 256 4 150, gru 2816 1 1500, gru 2816 1 750, gru 2816 1 375, gru 2816 1 187,
    gru 2816 2 1500, gru 2816 2 750, gru 2816 2 375, gru 2816 2 187, gru 2816 4 1500, gru 2816 4 750, gru 2816 4 375,
    gru 2816 4 187, gru 2048 1 1500, gru 2048 1 750, gru 2048 1 375, gru 2048 1 187, gru 2048 2 1500, gru 2048 2 750,
    gru 2048 2 375, gru 2048 2 187, gru 2048 4 1500, gru 2048 4 750, gru 2048 4 375, gru 2048 4 187, gru 1536 1 1500,
    gru 1536 1 750, gru 1536 1 375, gru 1536 1 187, gru 1536 2 1500, gru 1536 2 750, gru 1536 2 375, gru 1536 2 187,
    gru 1536 4 1500, gru 1536 4 750, gru 1536 4 375, gru 1536 4 187, gru 2560 1 1500, gru 2560 1 750, gru 2560 1 375,
    gru 2560 1 187, gru 2560 2 1500, gru 2560 2 750, gru 2560 2 375, gru 2560 2 187, gru 2560 4 1500, gru 2560 4 750,
    gru 2560 4 375, gru 2560 4 187, gru 512 1 1, gru 512 2 1, gru 512 4 1, gru 1024 1 1500, gru 1024 2 1500,
    gru 1024 4 1500
"""

# ONNX's operator, its gates, its attributes: "vanilla" with ONNX's own tanh, the GRU that cuDNN and PyTorch compute
CELLS: Mapping[str, tuple[str, int, Mapping[str, int]]] = {
    "vanilla": ("RNN", 1, {}), "lstm": ("LSTM", 4, {}), "gru": ("GRU", 3, {"linear_before_reset": 1})}


@dataclass(frozen=True)
class Problem:
    """Problem as a model of one node, from float32 x to float32 y; `weights` draws its constants."""
    kind: str                           # one of CLASSES
    name: str
    operator: str
    x: tuple[int, ...]
    y: tuple[int, ...]
    macs: int
    weights: Callable[[np.random.Generator], list[Array]]
    weight_elements: int
    attributes: Mapping[str, Any]

    @property
    def effort(self) -> int:
        """Estimate of the time to compute and build the problem, for sorting."""
        return self.macs + 100 * self.weight_elements

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the ONNX file and an .npz file with one x; return their paths."""
        random = np.random.default_rng(0)
        model, data = folder / f"{self.name}.onnx", folder / f"{self.name}.npz"
        onnx.save(self.model(random), model)
        arrays: dict[str, Any] = {"x": random.standard_normal(self.x, np.float32)}
        np.savez(data, **arrays)
        return model, data

    def model(self, random: np.random.Generator) -> onnx.ModelProto:
        constants = [numpy_helper.from_array(array, f"c{i}") for i, array in enumerate(self.weights(random))]
        node = helper.make_node(self.operator, ["x", *(constant.name for constant in constants)], ["y"],
                                **self.attributes)
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, self.x)
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, self.y)
        graph = helper.make_graph([node], self.name, [x], [y], constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


def problems() -> list[Problem]:
    """Return all problems, sorted by effort."""
    every = [*map(_product, _lines(PRODUCTS)), *map(_product, _lines(SPARSE_PRODUCTS)),
             *map(_convolution, _lines(CONVOLUTIONS)), *map(_recurrence, _lines(RECURRENCES))]
    return sorted(every, key=lambda problem: problem.effort)


def _lines(text: str) -> Iterator[list[str]]:
    return (line.split() for line in text.split(","))


def _product(numbers: list[str]) -> Problem:
    m, n, k = map(int, numbers[:3])
    zeros = float(numbers[3]) if numbers[3:] else 0.0

    def weights(random: np.random.Generator) -> list[Array]:
        drawn = _normal(random, (k, m), k)
        if zeros:
            drawn *= random.random((k, m), np.float32) >= zeros
        return [drawn]

    name = f"gemm-{m}x{n}x{k}" + (f"-{zeros:.2f}" if zeros else "")
    return Problem(SPARSE if zeros else PRODUCT, name, "MatMul", (n, k), (n, m), m * n * k, weights, k * m, {})


def _convolution(numbers: list[str]) -> Problem:
    width, height, channels, batch, filters, kernel_w, kernel_h, pad_w, pad_h, stride_w, stride_h = map(int, numbers)
    x, filter_shape = (batch, channels, height, width), (filters, channels, kernel_h, kernel_w)
    rows, columns = (height + 2 * pad_h - kernel_h) // stride_h + 1, (width + 2 * pad_w - kernel_w) // stride_w + 1
    name = (f"conv-{batch}x{channels}x{height}x{width}-{filters}x{kernel_h}x{kernel_w}"
            f"-pad{pad_h}x{pad_w}-stride{stride_h}x{stride_w}")
    attributes = {"kernel_shape": (kernel_h, kernel_w), "pads": (pad_h, pad_w) * 2, "strides": (stride_h, stride_w)}
    return Problem(CONVOLUTION, name, "Conv", x, (batch, filters, rows, columns),
                   batch * rows * columns * prod(filter_shape),
                   lambda random: [_normal(random, filter_shape, prod(filter_shape[1:])), _normal(random, (filters,))],
                   prod(filter_shape), attributes)


def _recurrence(fields: list[str]) -> Problem:
    """Return the problem of a recurrent layer whose input is as wide as its state."""
    cell, (units, batch, steps) = fields[0], map(int, fields[1:])
    operator, gates, attributes = CELLS[cell]

    def weights(random: np.random.Generator) -> list[Array]:
        matrix, bound = (1, gates * units, units), units ** -0.5
        return [random.uniform(-bound, bound, extents).astype(np.float32)
                for extents in (matrix, matrix, (1, 2 * gates * units))]

    elements = 2 * gates * units ** 2
    name, macs = f"{cell}-{units}-batch{batch}-steps{steps}", steps * batch * elements
    return Problem(RECURRENT, name, operator, (steps, batch, units), (steps, 1, batch, units), macs, weights, elements,
                   {"hidden_size": units, **attributes})


def _normal(random: np.random.Generator, shape: tuple[int, ...], terms: int = 1) -> Array:
    """Draw normal weights scaled by 1 / sqrt(terms), so that outputs have the variance of inputs."""
    return random.standard_normal(shape, np.float32) / np.float32(terms ** 0.5)
