"""Engines of the zoo's models, built without timing: fast and with reproducible tactics."""
from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from infer_server.calibration.collect import histograms_of
from infer_server.calibration.table import make_table
from infer_server.calibration.trials.judge import float_engines
from infer_server.calibration.workflow import Calibration
from infer_server.engines.compiler.build import EngineBuild, build_engine
from infer_server.engines.compiler.builder import Builder
from infer_server.engines.compiler.ranges import Calibrated
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.plan.plan import Step
from infer_server.engines.runtime.engine import Engine
from tests.zoo import images_for

MAX_BATCH = 4
CALIBRATION_ITEMS = 32


_RECIPES: dict[tuple[str, ...], Recipe] = {}        # by a digest of the model and the names of its tensors


@dataclass(frozen=True)
class Widest:
    """Source of the ranges that calibrator "minmax" finds. It does not measure the error that they make.

    The float model runs on NumPy: compiling each network once more takes longer than the few pictures.
    """
    model: onnx.ModelProto
    cache: str = ""

    def first(self, inputs: Any, pixels: bool) -> None:
        return None

    def calibrate(self, subject: Subject, notify: Any, progress: Any) -> Calibrated:
        edges = subject.builder.edges(subject.graph)
        key = hashlib.sha256(self.model.SerializeToString(deterministic=True)).hexdigest(), *edges
        if key not in _RECIPES:
            interpreted = replace(subject, builder=Builder(replace(subject.builder.config, target="numpy")))
            engines, x = float_engines(interpreted, edges), images_for(self.model, CALIBRATION_ITEMS, seed=100)
            parts = np.split(x, len(x) // engines.usual.plan.batch_slots)
            histograms = histograms_of(engines.show, [{"input": part} for part in parts], edges)
            _RECIPES[key] = make_table("minmax", "", CALIBRATION_ITEMS, histograms).recipe
        return Calibrated(_RECIPES[key], {})


def compiled(model: onnx.ModelProto, folder: Path, calibrator: str = "minmax", **options: Any) -> EngineBuild:
    """Build a model; int8 is calibrated on pictures that no test uses.

    calibrator: "" searches as build-engine does by default, which builds a model some forty times.
    """
    path = folder / "model.onnx"
    if not path.exists():           # the test may have written it another way
        onnx.save(model, path)
    calibration: Any = None
    if options.get("precision") == "int8" and calibrator == "minmax":
        calibration = Widest(model)
    elif options.get("precision") == "int8":
        np.savez(folder / "calibration.npz", input=images_for(model, CALIBRATION_ITEMS, seed=100))
        calibration = Calibration(folder / "calibration.npz", calibrator)
    symbolic = not model.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    return build_engine(path, calibration=calibration, cache=False, max_batch=MAX_BATCH if symbolic else None,
                        timing=False, **options)


def engine_of(model: onnx.ModelProto, folder: Path, **options: Any) -> Engine:
    return Engine(compiled(model, folder, **options).plan)


def fallbacks(engine: Engine) -> list[Step]:
    """Return the steps that no kernel computes."""
    return [step for step in engine.plan.machine.steps if step.fallback]


def relative_error(value: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the largest difference relative to the largest expected value."""
    assert value.shape == expected.shape and value.dtype == expected.dtype
    return float(np.abs(value - expected).max() / np.abs(expected).max())
