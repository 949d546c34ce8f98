"""Small models of the tests of bulk scoring, as ONNX text."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser

from infer_server import build_engine
from infer_server.engines.ir.graph import Array

HEAD = '<ir_version: 8, opset_import: ["": 17]>'
# One score a class of a gray picture of 4x4.
CLASSES = HEAD + """ gray (float[N, 1, 4, 4] image) => (float[N, 5] scores, float[N, 2, 3] grid)
    <float[16, 5] w = {WEIGHTS}, int64[2] flat = {-1, 16}, int64[3] shape = {-1, 2, 3}, float[16, 6] v = {OTHERS}>
    { x = Reshape(image, flat) scores = MatMul(x, w) y = MatMul(x, v) grid = Reshape(y, shape) }"""
TEXT = HEAD + """ text (float[N, L, 2] x, int64[N] shift) => (float[N, L] y)
    <int64[1] last = {-1}>
    { s = ReduceSum<keepdims = 0>(x, last) f = Cast<to = 1>(shift) g = Unsqueeze(f, last) y = Add(s, g) }"""
WHOLE = HEAD + """ whole (float[1, 3] x, float[2] w) => (float[1, 3] y, float[2] z)
    <float two = {2.0}> { y = Mul(x, two) z = Mul(w, two) }"""
COUPLED = HEAD + """ coupled (float[N, 3] x) => (float[N, 3] y) <int64[1] first = {0}>
    { m = ReduceMax(x, first) y = Sub(x, m) }""".replace("ReduceMax(x, first)", "ReduceMax<axes = [0]>(x)")


def plan_of(text: str, folder: Path, **options: object) -> Path:
    """Build a plan of a model without timing, and return its file."""
    random = np.random.default_rng(0)
    text = text.replace("WEIGHTS", _numbers(random, 80)).replace("OTHERS", _numbers(random, 96))
    path = folder / "model.plan"
    build_engine(onnx.parser.parse_model(text), timing=False, **options).save(path)
    return path


def _numbers(random: np.random.Generator, count: int) -> str:
    return ", ".join(f"{number:.3f}" for number in random.standard_normal(count))


def pictures(count: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).random((count, 1, 4, 4), np.float32)
