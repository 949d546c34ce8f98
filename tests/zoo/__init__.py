"""The architectures of benchmarks/zoo, as tests use them: TINY, each shrunk, beside ONNX Runtime's answers."""
from __future__ import annotations

from benchmarks.zoo import TINY, ZOO, Net, Tensor, architecture, images, images_for, run_onnx

__all__ = ["TINY", "ZOO", "Net", "Tensor", "architecture", "images", "images_for", "run_onnx"]
