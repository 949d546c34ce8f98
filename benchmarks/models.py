"""Models to measure, from the zoo by name or from ONNX files, with their data and build options."""
from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.zoo import ZOO, images
from infer_server.calibration.data.items import CalibrationData
from infer_server.calibration.open_data import open_calibration_data
from infer_server.cli.common import parse_shape
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import IoTensor
from infer_server.engines.preprocess import load_preprocess

CALIBRATION_ITEMS = 32      # number of random images, if no calibration data is given


@dataclass(frozen=True)
class Model:
    """ONNX file with its options for build-engine."""
    source: Path
    calibration: str                    # --calib: random pictures by default
    preprocess: str = ""                # --preprocess
    shapes: tuple[str, ...] = ()        # values of --shape
    accuracy: Path | None = None        # script with the model's metric, see benchmarks.measure.accuracy

    @property
    def name(self) -> str:
        return self.source.stem

    @property
    def build_options(self) -> tuple[str, ...]:
        """Return the options of build-engine for this model in every precision."""
        return tuple(option for shape in self.shapes for option in ("--shape", shape))

    @property
    def calibration_options(self) -> tuple[str, ...]:
        """Return the further options of build-engine for this model in INT8."""
        preprocess = ("--preprocess", self.preprocess) if self.preprocess else ()
        return ("--calib", self.calibration, *preprocess)

    @cached_property
    def inputs(self) -> tuple[IoTensor, ...]:
        graph = Builder(BuildConfig(shapes=dict(map(parse_shape, self.shapes)))).graph(self.source)
        types = {name: graph.types[name] for name in graph.inputs}
        return tuple(IoTensor(name, str(np.dtype(t.dtype)), tuple(t.shape)) for name, t in types.items())

    @property
    def batched(self) -> bool:
        """True if one inference may take several items."""
        return any(isinstance(extent, str) for tensor in self.inputs for extent in tensor.shape[:1])

    @property
    def data(self) -> CalibrationData:
        """Return the calibration items, of which the first are also used for timing."""
        return open_calibration_data(self.calibration, self.inputs,
                                     load_preprocess(self.preprocess) if self.preprocess else None)


    @cached_property
    def data_digest(self) -> str:
        """Return a digest of the calibration items' names and values."""
        return digest(*(part for item in self.data for name, array in item.items() for part in (name, array.tobytes())))

    def feed(self, batch: int) -> dict[str, Array]:
        """Return the first `batch` items, repeated if there are fewer, as one feed."""
        items = list(self.data.limit(batch))
        chosen = [items[i % len(items)] for i in range(batch)]
        return {name: np.concatenate([item[name] for item in chosen]) if name in self.data.batched else first
                for name, first in chosen[0].items()}


def digest(*parts: str | bytes) -> str:
    """Return a digest of parts, for the name of a file that is made from them."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part.encode() if isinstance(part, str) else part)
        hasher.update(b"\0")
    return hasher.hexdigest()[:16]


def run(module: str, *arguments: object) -> None:
    """Run a module as a command, with output to stderr; its failure ends the benchmark."""
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=True, stdout=sys.stderr)


def source_of(model: str, folder: Path) -> Path:
    """Return the path of an ONNX file: `model` itself, or the zoo's model of that name, written into `folder`."""
    if model not in ZOO:
        return Path(model)
    path = folder / f"{model}.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(ZOO[model](), path)
    return path


def random_pictures(source: Path, folder: Path) -> Path:
    """Write random pictures for the model's only input to an .npz file; other models end the benchmark."""
    value, *others = onnx.load(source, load_external_data=False).graph.input
    extents = [extent.dim_value for extent in value.type.tensor_type.shape.dim]
    if others or len(extents) != 4 or not all(extents[1:]):
        raise SystemExit(f"{source} does not take one picture of a fixed size: give calibration data (--calib)")
    _, channels, size, _ = extents
    path = folder / f"{source.stem}.npz"
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {value.name: images(CALIBRATION_ITEMS, channels, size)}
    np.savez(path, **arrays)
    return path


def build(source: Path, plan: Path, precision: str, max_batch: int, options: Sequence[object] = ()) -> None:
    """Run build-engine; int8 is calibrated on random pictures of the input's size."""
    plan.parent.mkdir(parents=True, exist_ok=True)
    calibration = ("--calib", random_pictures(source, plan.parent)) if precision == "int8" else ()
    run("infer_server.cli.build_engine", source, "-o", plan, f"--{precision}", "--max-batch", max_batch, "--no-cache",
        *calibration, *options)
