"""A small network whose names try to become markup, and its builds by build-engine --report."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from infer_server.cli import build_engine
from tests.infer_server.comparing.test_compare_engine import items, network

HOSTILE = "</script><script>alert('conv')</script>"
BROKEN = "a\"'><img src=x onerror=alert(2)>&lt;\x01"
NODES = (HOSTILE, "relu1", BROKEN, "relu2", "conv3", "relu3", "pool", "flatten", "gemm")


def hostile_network() -> onnx.ModelProto:
    model = network()
    for node, name in zip(model.graph.node, NODES, strict=True):
        node.name = name
        for names in (node.input, node.output):
            for index, tensor in enumerate(names):
                if tensor == "b":
                    names[index] = "b</title><script>alert(3)</script>"
    return model


def built(folder: Path, *options: str) -> tuple[Path, Path]:
    """Build the network by the command line with a report; return the files of the plan and of the page."""
    onnx.save(hostile_network(), folder / "m.onnx")
    np.save(folder / "items.npy", items())
    plan, page = folder / "m.plan", folder / "m.html"
    assert build_engine.main([str(folder / "m.onnx"), "-o", str(plan), "--report", str(page), "--no-cache", "-q",
                              "--max-batch", "4", *options]) == 0
    return plan, page
