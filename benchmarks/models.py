"""Models to measure: of the zoo by name, or ONNX files; and the plans that build-engine makes of them."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.zoo import ZOO, images

CALIBRATION_ITEMS = 32


def run(module: str, *arguments: object) -> None:
    """A command of ours, by its module; its output goes to our stderr, its failure ends the benchmark."""
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=True, stdout=sys.stderr)


def source_of(model: str, folder: Path) -> Path:
    """The ONNX file: `model` itself, or the zoo's model of that name, written into `folder`."""
    if model not in ZOO:
        return Path(model)
    path = folder / f"{model}.onnx"
    onnx.save(ZOO[model](), path)
    return path


def build(source: Path, plan: Path, precision: str, max_batch: int, *options: object) -> None:
    """build-engine; int8 is calibrated on random pictures of the input's size."""
    plan.parent.mkdir(parents=True, exist_ok=True)
    if precision == "int8":
        value = onnx.load(source, load_external_data=False).graph.input[0]
        _, channels, size, _ = (extent.dim_value for extent in value.type.tensor_type.shape.dim)
        feeds: dict[str, Any] = {value.name: images(CALIBRATION_ITEMS, channels, size)}
        np.savez(plan.with_suffix(".npz"), **feeds)
        options = ("--calib", plan.with_suffix(".npz"), *options)
    run("infer_server.cli.build_engine", source, "-o", plan, f"--{precision}", "--max-batch", max_batch, *options)
