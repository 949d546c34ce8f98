"""ONNX Runtime as the reference for our results."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from numpy.typing import NDArray

ERRORS_ONLY = 3


def run_onnx(model: onnx.ModelProto | Path, feeds: Mapping[str, NDArray[Any]], *,
             outputs: list[str] | None = None, optimised: bool = True) -> dict[str, NDArray[Any]]:
    """Run a model by ONNX Runtime on one thread and return its outputs by name.

    outputs: names of the outputs, or None for all. optimised: with ONNX Runtime's graph optimisations.
    """
    options = onnxruntime.SessionOptions()
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = ERRORS_ONLY
    options.intra_op_num_threads = 1
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    outputs = outputs or [output.name for output in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, dict(feeds)), strict=True))
