"""Tests of the architectures of benchmarks/zoo, shrunk (TINY), against ONNX Runtime."""
from __future__ import annotations

from benchmarks.zoo import TINY, ZOO, Net, Tensor, architecture, images, images_for, run_onnx

__all__ = ["TINY", "ZOO", "Net", "Tensor", "architecture", "images", "images_for", "run_onnx"]
